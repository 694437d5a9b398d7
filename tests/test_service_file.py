from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from ray.serve.schema import ServeDeploySchema

from outrider import registry
from outrider.config import (
    DrafterArgs,
    DrafterOptions,
    LimitOptions,
    LocalConfig,
    PlannerOptions,
    RouterArgs,
    RouterOptions,
    ServiceArgs,
    SpeculativeConfig,
    VerifierArgs,
    parse,
)
from outrider.errors import ConfigError
from outrider_serve import service_file
from outrider_serve.service_file import check

QUICKSTART = Path(__file__).parents[1] / "manifests" / "quickstart.yaml"

Edited: TypeAlias = Callable[[Callable[[dict[str, Any]], None]], list[str]]


def application(file: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = file["applications"][0]
    return found


def deployment(file: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(d for d in application(file)["deployments"] if d["name"] == name)
    return found


def speculation(file: dict[str, Any], **changes: Any) -> None:
    """Change the speculative_config of the Router, and of the Drafter alike."""
    for name in ("Router", "Drafter"):
        config = deployment(file, name)["user_config"]["speculative_config"]
        config.update(changes)


@pytest.fixture
def edited(tmp_path: Path) -> Edited:
    """The faults of the quickstart after one edit of its content."""

    def faults(edit: Callable[[dict[str, Any]], None]) -> list[str]:
        # Copied without its anchors: an edit of the Router must not be one of the Drafter.
        file = copy.deepcopy(yaml.safe_load(QUICKSTART.read_text()))
        for each in application(file)["deployments"]:
            each["user_config"] = copy.deepcopy(each["user_config"])
        edit(file)
        path = tmp_path / "service.yaml"
        path.write_text(yaml.safe_dump(file, sort_keys=False))
        return check(path)

    return faults


def check_text(folder: Path, text: str) -> list[str]:
    path = folder / "service.yaml"
    path.write_text(text)
    return check(path)


@pytest.mark.parametrize("file", sorted(QUICKSTART.parent.glob("*.yaml")), ids=lambda path: path.name)
def test_every_manifest_is_fine(file: Path) -> None:
    assert check(file) == []


def test_serve_itself_ignores_what_the_linter_finds(edited: Edited) -> None:
    def misspell(file: dict[str, Any]) -> None:
        deployment(file, "Verifier")["max_ongoing_request"] = 7
        ServeDeploySchema.model_validate(copy.deepcopy(file))  # no complaint

    (fault,) = edited(misspell)
    assert "unknown key 'max_ongoing_request'; did you mean 'max_ongoing_requests'?" in fault


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (
            lambda f: f.update(http_option={}),
            "the file: unknown key 'http_option'; did you mean 'http_options'?",
        ),
        (lambda f: f["http_options"].update(prt=1), "http_options: unknown key 'prt'; did you mean 'port'?"),
        (
            lambda f: f.update(logging_config={"log_levl": "INFO"}),
            "logging_config: unknown key 'log_levl'; did you mean 'log_level'?",
        ),
        (
            lambda f: application(f).update(rout_prefix="/"),
            "applications[0]: unknown key 'rout_prefix'; did you mean 'route_prefix'?",
        ),
        (
            lambda f: application(f).update(autoscaling_policy={"policy_func": "x:y"}),
            "applications[0].autoscaling_policy: unknown key 'policy_func'; did you mean 'policy_function'?",
        ),
        (
            lambda f: deployment(f, "Router").update(ray_actor_options={"num_cpu": 1}),
            "deployments[0].ray_actor_options: unknown key 'num_cpu'; did you mean 'num_cpus'?",
        ),
        (
            lambda f: deployment(f, "Router").update(
                autoscaling_config={"policy": {"policy_fnction": "a:b"}}
            ),
            "applications[0].deployments[0].autoscaling_config.policy: unknown key 'policy_fnction'; "
            "did you mean 'policy_function'?",
        ),
        (
            lambda f: application(f)["args"].update(modle="x"),
            "args: unknown key 'modle'; did you mean 'model'?",
        ),
        (
            lambda f: application(f)["args"]["drafter"].update(placment="actor"),
            "args: unknown key 'drafter.placment'; did you mean 'placement'?",
        ),
        (
            lambda f: deployment(f, "Router")["user_config"].update(limit={}),
            "Router.user_config: unknown key 'limit'; did you mean 'limits'?",
        ),
        (
            lambda f: deployment(f, "Verifier")["user_config"].update(limits={}),
            "Verifier.user_config: unknown key 'limits'",
        ),
        (
            lambda f: deployment(f, "Drafter").update(name="Draftr"),
            "deployments: unknown deployment 'Draftr'; did you mean 'Drafter'?",
        ),
    ],
)
def test_an_unknown_key_is_found_at_every_level(
    edited: Edited, edit: Callable[[dict[str, Any]], None], expected: str
) -> None:
    (fault,) = edited(edit)
    assert expected in fault


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda f: f.pop("applications"), "applications: is missing"),
        (lambda f: f.update(applications={}), "applications: must be a list (got {})"),
        (lambda f: f.update(proxy_location="Nowhere"), "proxy_location: Input should be 'Disabled'"),
        (lambda f: f["http_options"].update(port="a"), "http_options.port: Input should be a valid integer"),
        (
            lambda f: application(f).update(deployments=["Router"]),
            "applications[0].deployments[0]: must be a mapping of keys to values (got 'Router')",
        ),
        (
            lambda f: deployment(f, "Router").update(user_config=7),
            "deployments[0].user_config: Input should be a valid dictionary (got 7)",
        ),
        (lambda f: application(f).update(port=1), "Port 1 is set in the config for application"),
        (
            lambda f: application(f)["args"].update(max_num_seqs=0),
            "args: max_num_seqs: Input should be greater than 0 (got 0)",
        ),
        (lambda f: application(f)["args"].pop("model"), "args: model is missing"),
        (
            lambda f: application(f)["args"].update(verifier={"num_gpus": 0.5}),
            "verifier.num_gpus is 0.5: two fractions may land on one GPU",
        ),
        (
            lambda f: application(f)["args"].update(device="cuda"),
            "args: device is cuda and verifier.num_gpus is 0: raise verifier.num_gpus to 1, or say",
        ),
        (
            lambda f: application(f)["args"].update(device="cuda:1", verifier={"num_gpus": 1}),
            "args: device is cuda:1 and verifier.num_gpus is 1: raise verifier.num_gpus to 2",
        ),
        (
            lambda f: application(f)["args"]["drafter"].update(device="tpu"),
            "args: drafter.device: String should match pattern",
        ),
        (
            lambda f: application(f)["args"]["drafter"].update(device="cuda"),
            "args: drafter.device is cuda and drafter.num_gpus is 0: raise drafter.num_gpus to 1",
        ),
        (
            lambda f: application(f)["args"].update(cpu_kernels="native", cpu_threads=2),
            "args: cpu_threads is 2, and cpu_kernels: native always use one",
        ),
        (
            lambda f: application(f)["args"].update(max_num_batched_tokens=64, max_num_seqs=65),
            "args: max_num_batched_tokens 64 is below max_num_seqs 65: every running sequence needs a row",
        ),
        (
            lambda f: application(f)["args"].update(num_kv_blocks=127, max_model_len=4096),
            "args: num_kv_blocks 127 of block_size 32 hold 4064 tokens and max_model_len is 4096",
        ),
        (
            lambda f: deployment(f, "Router")["user_config"].update(limits={"max_queued_requests": 2000}),
            "Router.user_config: limits.max_queued_requests 2000 does not fit",
        ),
        (
            lambda f: speculation(f, model="smollm2"),
            "Router.user_config: speculative_config: model 'smollm2' does nothing for method ngram",
        ),
        (
            lambda f: speculation(f, max_model_len=100),
            "Drafter.user_config: speculative_config: max_model_len 100 does nothing for method ngram",
        ),
        (
            lambda f: speculation(f, method="draft_model"),
            "Router.user_config.speculative_config: model is missing: method draft_model needs the folder",
        ),
        (
            lambda f: deployment(f, "Router").update(
                request_router_config={"request_router_class": "nowhere:X"}
            ),
            "Serve cannot read it: ModuleNotFoundError",
        ),
    ],
)
def test_a_wrong_value_is_found_wherever_it_stands(
    edited: Edited, edit: Callable[[dict[str, Any]], None], expected: str
) -> None:
    assert any(expected in fault for fault in edited(edit)), edited(edit)


def test_keys_that_do_not_fit_one_another_do_not_spell_the_whole_section(edited: Edited) -> None:
    (fault,) = edited(lambda f: application(f)["args"].update(device="cuda"))
    assert "args: device is cuda" in fault
    assert fault.endswith("or say device: cpu")


def test_the_drafts_of_a_round_must_fit_a_step(edited: Edited) -> None:
    def narrow(file: dict[str, Any], drafts: int) -> None:
        application(file)["args"]["max_num_batched_tokens"] = 16
        speculation(file, num_speculative_tokens=drafts)

    assert edited(lambda f: narrow(f, 15)) == []
    (fault,) = edited(lambda f: narrow(f, 16))
    assert "Router.user_config: num_speculative_tokens 16 and the newest token do not fit" in fault


def test_an_import_path_with_a_dot_is_linted_as_with_a_colon(edited: Edited) -> None:
    def dot_and_misspell(file: dict[str, Any]) -> None:
        application(file)["import_path"] = "outrider_serve.app.build"
        application(file)["args"]["dtpe"] = "auto"
        ServeDeploySchema.model_validate(copy.deepcopy(file))  # Serve takes both

    (fault,) = edited(dot_and_misspell)
    assert "args: unknown key 'dtpe'" in fault


@pytest.mark.parametrize("import_path", ["mine:app", "outrider_serve.ap:build"])
def test_a_file_without_an_application_of_ours_is_a_fault(edited: Edited, import_path: str) -> None:
    (fault,) = edited(lambda f: application(f).update(import_path=import_path))
    assert f"no application with import_path outrider_serve.app:build (got {import_path})" in fault


@pytest.mark.parametrize(
    ("name", "places", "key"),
    [
        ("Verifier", 32, "twice args.max_num_seqs"),
        ("Drafter", 128, "twice args.drafter.max_num_seqs"),
        ("Router", 1024, "args.router.max_ongoing_requests"),
    ],
)
def test_an_entry_must_hold_the_requests_that_args_need(
    edited: Edited, name: str, places: int, key: str
) -> None:
    assert edited(lambda f: deployment(f, name).update(max_ongoing_requests=places)) == []
    (fault,) = edited(lambda f: deployment(f, name).update(max_ongoing_requests=places - 1))
    assert f"{name}.max_ongoing_requests: {places - 1} is below {key}, {places}" in fault


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"num_gpus": 2}, "give 2 GPUs"),
        ({"num_cpus": 4}, "give 0 GPUs"),
        ({"num_gpus": 0.5}, "give 0.5 GPUs"),
    ],
)
def test_an_entry_may_not_give_other_gpus_than_args(
    edited: Edited, options: dict[str, float], given: str
) -> None:
    def override(file: dict[str, Any]) -> None:
        application(file)["args"].update(device="cuda", verifier={"num_gpus": 1})
        deployment(file, "Verifier")["ray_actor_options"] = options

    (fault,) = edited(override)
    assert f"Verifier.ray_actor_options: they replace what args say, and {given}" in fault
    assert "args.verifier.num_gpus is 1" in fault


def test_an_entry_with_the_gpus_of_args_is_fine(edited: Edited) -> None:
    def repeat(file: dict[str, Any]) -> None:
        application(file)["args"].update(device="cuda", verifier={"num_gpus": 1})
        deployment(file, "Verifier")["ray_actor_options"] = {"num_cpus": 4, "num_gpus": 1}
        deployment(file, "Router")["ray_actor_options"] = {"num_cpus": 1}

    assert edited(repeat) == []


@pytest.mark.parametrize("name", ["Verifier", "Drafter"])
@pytest.mark.parametrize(
    ("entry", "replicas"),
    [
        ({}, 2),
        ({"num_replicas": 3}, 3),
        ({"num_replicas": "auto"}, 100),
        ({"autoscaling_config": {"min_replicas": 1, "max_replicas": 4}}, 4),
        ({"num_replicas": "auto", "autoscaling_config": {"max_replicas": 5}}, 5),
    ],
)
def test_a_fixed_port_serves_one_replica_a_machine(
    edited: Edited, name: str, entry: dict[str, Any], replicas: int
) -> None:
    def fix(file: dict[str, Any], port: int, **more: Any) -> None:
        application(file)["args"].setdefault(name.lower(), {}).update(port=port, num_replicas=2)
        deployment(file, name).update(entry | more)

    (fault,) = edited(lambda f: fix(f, 7001))
    assert (
        f"args: {name.lower()}.port 7001 serves one replica a machine, and there may be {replicas}" in fault
    )
    assert "say port: 0" in fault
    assert edited(lambda f: fix(f, 0)) == []
    assert edited(lambda f: fix(f, 7001, max_replicas_per_node=1)) == []


def test_a_fixed_port_of_one_replica_is_fine(edited: Edited) -> None:
    def fix(file: dict[str, Any]) -> None:
        application(file)["args"]["verifier"] = {"port": 7001, "num_replicas": 2}
        deployment(file, "Verifier")["num_replicas"] = 1

    assert edited(fix) == []


@pytest.mark.parametrize(
    ("args", "device", "draft_device"),
    [
        ({}, "cpu", "cpu"),
        ({"verifier": {"num_gpus": 1}}, "cuda", "cpu"),
        ({"verifier": {"num_gpus": 1}, "device": "cpu"}, "cpu", "cpu"),
        ({"verifier": {"num_gpus": 2}, "device": "cuda:1"}, "cuda:1", "cpu"),
        ({"verifier": {"num_gpus": 0.5}, "placement": "colocated"}, "cuda", "cpu"),
        ({"verifier": {"num_gpus": 0.5}, "placement": "colocated", "device": "cuda"}, "cuda", "cpu"),
        ({"drafter": {"placement": "actor", "num_gpus": 0.5}}, "cpu", "cuda"),
        ({"drafter": {"placement": "actor", "num_gpus": 1, "device": "cuda"}}, "cpu", "cuda"),
        ({"drafter": {"num_gpus": 1}}, "cpu", "cpu"),  # there is no such actor: the router drafts
        ({"router": {"num_gpus": 0.25}}, "cpu", "cuda"),
        ({"router": {"num_gpus": 0.25}, "drafter": {"device": "cpu"}}, "cpu", "cpu"),
    ],
)
def test_the_gpus_of_a_pool_decide_its_device(args: dict[str, Any], device: str, draft_device: str) -> None:
    checked = parse(ServiceArgs, {"model": "m"} | args, where="args")
    assert (checked.device, checked.drafter.device) == (device, draft_device)
    # What Serve hands on to the replicas, and what it hands the builder a second time, is the same.
    assert pickle.loads(pickle.dumps(checked)) == checked
    assert ServiceArgs.model_validate(checked.model_dump()) == checked


def test_a_device_without_a_gpu_is_refused_also_where_verifiers_share_one() -> None:
    with pytest.raises(ConfigError, match=r"args: device is cuda and verifier\.num_gpus is 0"):
        parse(ServiceArgs, {"model": "m", "device": "cuda", "placement": "colocated"}, where="args")
    with pytest.raises(ConfigError, match=r"verifier.num_gpus is 0.5: two fractions may land on one GPU"):
        parse(ServiceArgs, {"model": "m", "device": "cuda", "verifier": {"num_gpus": 0.5}}, where="args")


def test_one_process_takes_the_limit_that_acts_there_and_no_other() -> None:
    config = parse(LocalConfig, {"model": "m", "request_timeout_s": 5}, where="config")
    assert config.limits.request_timeout_s == 5
    for key in ("max_queued_requests", "queue_timeout_s", "max_body_bytes", "default_max_tokens"):
        with pytest.raises(ConfigError, match=f"unknown key '{key}'"):
            parse(LocalConfig, {"model": "m", key: 5}, where="config")
    with pytest.raises(ConfigError, match="unknown key 'limits'"):
        parse(LocalConfig, {"model": "m", "limits": {"request_timeout_s": 5}}, where="config")


def test_one_process_refuses_drafts_that_do_not_fit_a_step() -> None:
    wide = {
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
        "speculative_config": {"num_speculative_tokens": 16},
    }
    with pytest.raises(
        ConfigError, match="config: num_speculative_tokens 16 and the newest token do not fit"
    ):
        parse(LocalConfig, {"model": "m"} | wide, where="config")


def test_a_fault_names_its_line(tmp_path: Path) -> None:
    lines = QUICKSTART.read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if "dtype:" in line)
    lines[at] = lines[at].replace("dtype", "dtpe")
    (fault,) = check_text(tmp_path, "\n".join(lines))
    assert fault == f"line {at + 1}: args: unknown key 'dtpe'; did you mean 'dtype'?"


def test_a_key_given_twice_is_found(tmp_path: Path) -> None:
    text = QUICKSTART.read_text().replace("  port: 8000", "  port: 8000\n  port: 8001")
    (fault,) = check_text(tmp_path, text)
    assert "http_options: 'port' is there twice, at lines" in fault


def test_a_deployment_given_twice_is_found(edited: Edited) -> None:
    (fault,) = edited(lambda f: application(f)["deployments"].append({"name": "Router"}))
    assert "'Router' is there twice" in fault


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "line 1: not a Serve config file"),
        ("- a", "line 1: not a Serve config file"),
        ("a: [1", "line 1: not YAML: expected ',' or ']'"),
        ("a:\n\t- 1", "line 2: not YAML: found character"),
        ("a: &x [*x]", "line 1: an anchor of this file contains itself"),
        ("a: \x07", "not YAML: unacceptable character"),
    ],
)
def test_what_is_not_a_service_file_gets_one_clear_line(tmp_path: Path, text: str, expected: str) -> None:
    (fault,) = check_text(tmp_path, text)
    assert fault.startswith(expected)


def test_a_file_that_cannot_be_read_is_a_fault(tmp_path: Path) -> None:
    assert check(tmp_path / "none.yaml") == ["cannot be read: No such file or directory"]
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    (fault,) = check(tmp_path / "latin.yaml")
    assert fault.startswith("not UTF-8 text")


def test_a_method_that_is_not_installed_is_found(edited: Edited) -> None:
    def misspell(file: dict[str, Any]) -> None:
        for name in ("Router", "Drafter"):
            deployment(file, name)["user_config"]["speculative_config"]["method"] = "ngrm"

    router, drafter = edited(misspell)
    assert "Router.user_config.speculative_config: unknown method 'ngrm'; did you mean 'ngram'?" in router
    assert "Drafter.user_config.speculative_config: unknown method 'ngrm'" in drafter


def test_router_and_drafter_must_speculate_alike(edited: Edited) -> None:
    config = "user_config", "speculative_config"
    (fault,) = edited(
        lambda f: deployment(f, "Drafter")[config[0]][config[1]].update(num_speculative_tokens=3)
    )
    assert "Drafter.user_config: speculative_config differs from the Router's in" in fault


@pytest.mark.parametrize(
    "change",
    [
        {"rejection_sample_method": "block"},
        {"draft_sample_method": "greedy"},
        {"rejection_sample_method": "rejection", "draft_probs_top_n": 8},
    ],
    ids=str,
)
def test_router_and_drafter_must_draw_and_judge_drafts_alike(edited: Edited, change: dict[str, Any]) -> None:
    (fault,) = edited(lambda f: deployment(f, "Drafter")["user_config"]["speculative_config"].update(change))
    assert all(key in fault.partition("differs from the Router's in ")[2] for key in change)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("drafts", [None, "probabilistic", "greedy"])
def test_a_ratio_rule_with_fitting_drafts_is_fine(edited: Edited, rule: str, drafts: str | None) -> None:
    assert edited(lambda f: speculation(f, rejection_sample_method=rule, draft_sample_method=drafts)) == []


@pytest.mark.parametrize(
    ("rule", "drafts"), [("coupled", "probabilistic"), ("rejection", "coupled"), ("block", "coupled")]
)
def test_drafts_that_a_rule_cannot_judge_are_refused(edited: Edited, rule: str, drafts: str) -> None:
    faults = edited(lambda f: speculation(f, rejection_sample_method=rule, draft_sample_method=drafts))
    assert len(faults) == 2, "said of the Router and of the Drafter"
    for fault in faults:
        assert f"draft_sample_method {drafts} does not go with rejection_sample_method {rule}" in fault


def test_a_rule_that_does_not_exist_is_refused_with_those_that_do(edited: Edited) -> None:
    fault, _ = edited(lambda f: speculation(f, rejection_sample_method="typical"))
    assert "'coupled', 'rejection' or 'block'" in fault


def test_a_number_of_probabilities_that_nobody_draws_from_is_refused(edited: Edited) -> None:
    for changes in ({}, {"rejection_sample_method": "block", "draft_sample_method": "greedy"}):
        fault, _ = edited(lambda f, changes=changes: speculation(f, draft_probs_top_n=8, **changes))  # type: ignore[misc]
        assert "draft_probs_top_n does nothing" in fault
    assert edited(lambda f: speculation(f, draft_probs_top_n=8, rejection_sample_method="block")) == []


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_a_verifier_that_waits_for_drafts_must_not_count_as_lost(edited: Edited, rule: str) -> None:
    def wait(file: dict[str, Any]) -> None:
        speculation(file, rejection_sample_method=rule)
        planner = {"draft_timeout_s": 30, "verdict_timeout_s": 20}
        deployment(file, "Router")["user_config"]["planner"] = planner

    faults = edited(wait)
    assert len(faults) == (rule != "coupled")
    assert all("planner.draft_timeout_s 30" in fault and "verdict_timeout_s 20" in fault for fault in faults)


def test_a_drafter_without_an_entry_must_fit_the_router_by_its_defaults(edited: Edited) -> None:
    def drop(file: dict[str, Any]) -> None:
        application(file)["deployments"].remove(deployment(file, "Drafter"))

    def drop_and_differ(file: dict[str, Any]) -> None:
        drop(file)
        deployment(file, "Router")["user_config"]["speculative_config"]["num_speculative_tokens"] = 7

    assert edited(drop) == []
    (fault,) = edited(drop_and_differ)
    assert "differs from the Router's" in fault


@pytest.mark.parametrize("placement", ["auto", "inprocess"])
def test_a_drafter_entry_needs_the_placement_that_makes_it(edited: Edited, placement: str) -> None:
    (fault,) = edited(lambda f: application(f)["args"]["drafter"].update(placement=placement))
    assert "the deployment Drafter exists only with drafter.placement: actor" in fault


@pytest.mark.parametrize("placement", ["auto", "inprocess"])
def test_a_method_that_needs_a_device_needs_an_actor(
    edited: Edited, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "needs_device", lambda method: True)

    def place(file: dict[str, Any]) -> None:
        application(file)["args"]["drafter"]["placement"] = placement
        application(file)["deployments"].remove(deployment(file, "Drafter"))

    (fault,) = edited(place)
    assert "the drafter 'ngram' needs a device of its own: say drafter.placement: actor" in fault


def test_prompt_lookup_in_the_router_is_fine(edited: Edited) -> None:
    def place(file: dict[str, Any]) -> None:
        application(file)["args"]["drafter"]["placement"] = "inprocess"
        application(file)["deployments"].remove(deployment(file, "Drafter"))

    assert edited(place) == []


def test_a_model_that_is_neither_a_folder_nor_known_is_found(edited: Edited) -> None:
    (fault,) = edited(lambda f: application(f)["args"].update(model="/no/such/folder"))
    assert "args: model '/no/such/folder' is neither a folder with a config.json nor one of: smollm2" in fault


def test_another_application_of_the_file_is_left_to_serve(edited: Edited) -> None:
    other = {"name": "other", "route_prefix": "/other", "import_path": "mine:app", "args": {"anything": 1}}
    assert edited(lambda f: f["applications"].append(other)) == []


def test_reading_a_faulty_file_raises_every_fault(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text("aplications: []\nhttp_options: {prt: 1}\n")
    with pytest.raises(ConfigError) as raised:
        service_file.read(path)
    assert len(str(raised.value).splitlines()) == 3  # two unknown keys, and no applications
    assert str(path) in str(raised.value)


def test_the_args_of_a_read_file_are_those_of_the_service() -> None:
    (args,) = service_file.service_args(service_file.read(QUICKSTART))
    assert (args.model, args.model_name, args.drafter.placement) == ("smollm2", "smollm2", "actor")
    assert args.router.num_cpus + args.verifier.num_cpus + args.drafter.num_cpus <= 2


DOCUMENTED: list[type[BaseModel]] = [
    ServiceArgs,
    RouterArgs,
    VerifierArgs,
    DrafterArgs,
    RouterOptions,
    SpeculativeConfig,
    LimitOptions,
    PlannerOptions,
    DrafterOptions,
]


@pytest.mark.parametrize("model", DOCUMENTED, ids=lambda model: model.__name__)
def test_every_key_stands_in_the_documentation_with_its_default(model: type[BaseModel]) -> None:
    page = (QUICKSTART.parents[1] / "docs" / "yaml.md").read_text()
    _, _, after = page.partition(f"<!-- keys: {model.__name__} -->\n")
    rows = [line.split(" | ") for line in after.split("\n\n")[0].splitlines()[2:]]
    documented = {cells[0].strip("|` "): cells[1].strip() for cells in rows}
    assert documented == {name: spelled_default(field) for name, field in model.model_fields.items()}


def spelled_default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is None:
        return "none"
    if isinstance(field.default, BaseModel):
        return ""  # a section with a table of its own
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def test_the_documented_example_is_fine(tmp_path: Path) -> None:
    page = (QUICKSTART.parents[1] / "docs" / "yaml.md").read_text()
    example = page.split("```yaml\n")[1].split("```")[0]
    assert check_text(tmp_path, example) == []
