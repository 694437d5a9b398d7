"""The linter of a service file: one YAML for Serve, checked as a whole before anything starts.

Serve ignores every key it does not know. `check` finds those, whatever Serve's own schema would refuse, and
what only Outrider can know: `args`, each deployment's `user_config`, and whether they fit one another.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeAlias, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingPolicy
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from outrider import models, registry
from outrider.config import (
    DrafterArgs,
    DrafterOptions,
    RouterOptions,
    ServiceArgs,
    SpeculativeConfig,
    VerifierArgs,
    VerifierOptions,
    explain,
)
from outrider.errors import ConfigError
from outrider.messages import AcceptanceRule
from outrider_serve.desk import LEASES_PER_PLACE

IMPORT_PATH = "outrider_serve.app:build"
"""What the application of an Outrider service names; other applications of the file are Serve's affair."""

AUTO_MAX_REPLICAS = 100
"""What Serve makes of `num_replicas: auto` without a bound."""

OPTIONS: dict[str, type[BaseModel]] = {
    "Router": RouterOptions,
    "Verifier": VerifierOptions,
    "Drafter": DrafterOptions,
}
"""The deployments of the application, and what the `user_config` of each may say."""

Place: TypeAlias = tuple[str | int, ...]
"""Keys and indices from the top of the file down to a value."""

M = TypeVar("M", bound=BaseModel)

# Serve declares this one as a bare dict, and reads it as a model.
_DECLARED_AS_DICT: dict[tuple[type[BaseModel], str], type[BaseModel]] = {
    (ServeApplicationSchema, "autoscaling_policy"): AutoscalingPolicy,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong. `place` finds its line; `message` names the place in the user's words."""

    place: Place
    message: str


@dataclass(frozen=True, slots=True)
class Entry:
    """What a deployment's entry says beside `user_config`; it wins over `args`. None: nothing, or a fault."""

    place: Place
    replicas: int | None  # at most
    one_a_node: bool
    max_ongoing_requests: int | None
    num_gpus: float | None  # 0 where `ray_actor_options` are there without it: they replace those of `args`

    @classmethod
    def read(cls, place: Place, deployment: dict[str, Any]) -> Entry:
        """Serve's schema has said what is of a wrong type."""
        replicas = deployment.get("num_replicas")
        scaling, options = deployment.get("autoscaling_config"), deployment.get("ray_actor_options")
        if isinstance(scaling, dict) or replicas == "auto":
            bound = scaling.get("max_replicas") if isinstance(scaling, dict) else None
            replicas = bound or (AUTO_MAX_REPLICAS if replicas == "auto" else 1)
        ongoing = deployment.get("max_ongoing_requests")
        gpus = (options.get("num_gpus") or 0) if isinstance(options, dict) else None
        return cls(
            place=place,
            replicas=replicas if isinstance(replicas, int) else None,
            one_a_node=deployment.get("max_replicas_per_node") == 1,
            max_ongoing_requests=ongoing if isinstance(ongoing, int) else None,
            num_gpus=gpus if isinstance(gpus, int | float) else None,
        )


@dataclass(frozen=True, slots=True)
class Service:
    """One Outrider application of the file, as far as it could be read: None is a part with faults."""

    place: Place
    entries: dict[str, Entry]  # by the deployment's name, those that the file mentions
    args: ServiceArgs | None
    router: RouterOptions | None
    drafter: DrafterOptions | None


def check(path: Path) -> list[str]:
    """What is wrong with a service file, one line a fault, in the order of the file. Empty: it is fine.

    A line reads `line 12: args: unknown key 'modle'; did you mean 'model'?`. Whether a known model was
    added to this machine's cache is not asked: that is the machine's affair, not the file's.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        return [f"cannot be read: {error.strerror}"]
    except UnicodeDecodeError as error:
        return [f"not UTF-8 text: {error.reason} at byte {error.start}"]
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        return [f"{line}not YAML: {error.problem or error.context}"]
    except yaml.YAMLError as error:  # a character that YAML forbids has no line
        return [f"not YAML: {error}"]
    if root is None or not isinstance(data, dict):
        return ["line 1: not a Serve config file: it must be a mapping with the key 'applications'"]

    try:
        lines = _lines(root)
    except RecursionError:
        return ["line 1: an anchor of this file contains itself"]
    faults = [*_doubled_keys(root), *_serve_faults(data), *_without_ours(data)]
    for place, application in _outrider_applications(data):
        service, own = _read_service(place, application)
        faults += own
        if service is not None:
            faults += _cross_faults(service)
    numbered = sorted(((_line_of(lines, fault.place), fault) for fault in faults), key=lambda pair: pair[0])
    return [f"line {line}: {fault.message}" for line, fault in numbered]


def read(path: Path) -> dict[str, Any]:
    """The file as Serve takes it; `ConfigError` with every fault, a line each, when there are some."""
    if faults := check(path):
        raise ConfigError("\n".join(f"{path}: {fault}" for fault in faults))
    data: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return data


def service_args(data: dict[str, Any]) -> list[ServiceArgs]:
    """The `args` of each Outrider application of a file that `read` has let pass."""
    return [
        ServiceArgs.model_validate(application.get("args") or {})
        for _, application in _outrider_applications(data)
    ]


# ── Serve's part ──────────────────────────────────────────────────────────────────────────────────────


def _serve_faults(data: dict[str, Any]) -> Iterator[Fault]:
    found = list(_shape_faults(ServeDeploySchema, data, ()))
    yield from found
    places = {fault.place for fault in found}
    try:
        ServeDeploySchema.model_validate(copy.deepcopy(data))  # its validators write into what they get
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            place = fault["loc"]
            # Said already, and better: unknown keys, and shapes that make Serve's validators stumble.
            if fault["type"] != "extra_forbidden" and not any(place[: len(p)] == p for p in places):
                sentence = _sentence(fault["msg"], fault["input"], fault["type"])
                yield Fault(place, f"{_path(place)}: {sentence}")
    except (ImportError, AttributeError, TypeError) as error:
        # Serve imports policies and request routers named by import path, and expects mappings throughout.
        if not found:
            yield Fault((), f"Serve cannot read it: {type(error).__name__}: {error}")


def _shape_faults(model: type[BaseModel], value: dict[Any, Any], place: Place) -> Iterator[Fault]:
    """Unknown keys, and scalars where a section belongs, at every level that Serve declares as a model."""
    known = {name: field.annotation for name, field in model.model_fields.items()}
    for key, inner in value.items():
        if key not in known:
            yield Fault((*place, str(key)), f"{_path(place)}: {_unknown(str(key), known)}")
            continue
        section = _DECLARED_AS_DICT.get((model, key)) or _section(known[key])
        if section is None or inner is None:
            continue
        listed = _is_list(known[key])
        if listed and not isinstance(inner, list):
            yield Fault((*place, key), f"{_path((*place, key))}: must be a list (got {inner!r})")
            continue
        for index, item in enumerate(inner) if listed else [(None, inner)]:
            there = (*place, key) if index is None else (*place, key, index)
            if isinstance(item, dict):
                yield from _shape_faults(section, item, there)
            else:
                yield Fault(there, f"{_path(there)}: must be a mapping of keys to values (got {item!r})")


def _section(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model inside an annotation such as `Optional[Union[Dict, AutoscalingConfig]]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType, list):
        return next((found for part in get_args(annotation) if (found := _section(part))), None)
    return None


def _is_list(annotation: Any) -> bool:
    if get_origin(annotation) in (Union, UnionType):
        return any(_is_list(part) for part in get_args(annotation))
    return get_origin(annotation) is list


# ── Outrider's part ───────────────────────────────────────────────────────────────────────────────────


def _outrider_applications(data: dict[str, Any]) -> Iterator[tuple[Place, dict[str, Any]]]:
    applications = data.get("applications")
    for index, application in enumerate(applications if isinstance(applications, list) else []):
        # Serve takes a dot for the colon.
        if isinstance(application, dict) and _dotted(application.get("import_path")) == _dotted(IMPORT_PATH):
            yield ("applications", index), application


def _dotted(import_path: Any) -> str:
    return str(import_path).replace(":", ".")


def _without_ours(data: dict[str, Any]) -> Iterator[Fault]:
    applications = data.get("applications")
    if not isinstance(applications, list) or any(True for _ in _outrider_applications(data)):
        return
    others = [str(each.get("import_path")) for each in applications if isinstance(each, dict)]
    yield Fault(
        ("applications",),
        f"applications: no application with import_path {IMPORT_PATH} (got {', '.join(others) or 'none'})",
    )


def _read_service(place: Place, application: dict[str, Any]) -> tuple[Service | None, list[Fault]]:
    faults: list[Fault] = []
    args = _section_of_ours(ServiceArgs, application.get("args"), "args", (*place, "args"), faults)
    options: dict[str, BaseModel | None] = {name: model() for name, model in OPTIONS.items()}
    entries: dict[str, Entry] = {}
    deployments = application.get("deployments")
    for index, deployment in enumerate(deployments if isinstance(deployments, list) else []):
        name = deployment.get("name") if isinstance(deployment, dict) else None
        if not isinstance(name, str):
            continue  # Serve's schema has said so
        there = (*place, "deployments", index)
        if name not in OPTIONS:
            unknown = _unknown(name, OPTIONS, what="deployment")
            faults.append(Fault((*there, "name"), f"deployments: {unknown}"))
        elif name in entries:
            faults.append(Fault((*there, "name"), f"deployments: {name!r} is there twice: merge the two"))
        else:
            entries[name] = Entry.read(there, deployment)
            config = deployment.get("user_config")
            options[name] = _section_of_ours(
                OPTIONS[name], config, f"{name}.user_config", (*there, "user_config"), faults
            )
    router, drafter = options["Router"], options["Drafter"]
    assert router is None or isinstance(router, RouterOptions)
    assert drafter is None or isinstance(drafter, DrafterOptions)
    return Service(place=place, entries=entries, args=args, router=router, drafter=drafter), faults


def _section_of_ours(model: type[M], value: Any, where: str, place: Place, faults: list[Fault]) -> M | None:
    """Validate one of Outrider's sections; None, and `faults` grown, when it is wrong."""
    if value is not None and not isinstance(value, dict):
        return None  # Serve's schema has said so
    try:
        return model.model_validate(value or {})
    except ValidationError as error:
        for fault, line in zip(error.errors(include_url=False), explain(model, error), strict=True):
            faults.append(Fault((*place, *fault["loc"]), f"{where}: {line}"))
        return None


def _cross_faults(service: Service) -> Iterator[Fault]:
    """What is right by itself and wrong together."""
    if service.args is not None:
        yield from _model_faults(service.args.model, "args", (*service.place, "args", "model"))
        yield from _placement_faults(service, service.args)
        yield from _router_faults(service, service.args)
        for name, entry in service.entries.items():
            yield from _entry_faults(name, entry, service.args)
        yield from _port_faults(service, service.args)
    for name, options in (("Router", service.router), ("Drafter", service.drafter)):
        if name in service.entries and options is not None and options.speculative_config is not None:
            place = (*service.entries[name].place, "user_config", "speculative_config")
            where = f"{name}.user_config.speculative_config"
            yield from _drafting_faults(options.speculative_config, where, place)
    yield from _waiting_faults(service)


def _drafting_faults(config: SpeculativeConfig, where: str, place: Place) -> Iterator[Fault]:
    if config.method not in (names := registry.drafter_names()):
        yield Fault((*place, "method"), f"{where}: {_unknown(config.method, names, what='method')}")
    if config.model is not None:
        yield from _model_faults(config.model, where, (*place, "model"))
    elif config.method == "draft_model":
        yield Fault(
            (*place, "method"),
            f"{where}: model is missing: method draft_model needs the folder of a smaller model with the "
            "target's tokenizer, or a name of `outrider models list`",
        )

    if "draft_probs_top_n" in config.model_fields_set and config.drafting != "probabilistic":
        yield Fault(
            (*place, "draft_probs_top_n"),
            f"{where}: draft_probs_top_n does nothing where drafts are drawn {config.drafting}: remove it, "
            "or say rejection_sample_method: rejection (or block)",
        )


def _waiting_faults(service: Service) -> Iterator[Fault]:
    """Under the ratio rules a step waits for drafts, and a verifier that waits must not count as lost."""
    router = service.router
    if router is None or router.speculative_config is None:
        return
    rule, planner = router.speculative_config.rejection_sample_method, router.planner
    if rule is AcceptanceRule.COUPLED or planner.draft_timeout_s < planner.verdict_timeout_s:
        return
    place = service.entries["Router"].place if "Router" in service.entries else service.place
    yield Fault(
        (*place, "user_config", "planner"),
        f"Router.user_config: under rejection_sample_method {rule} a verifier may wait "
        f"planner.draft_timeout_s {planner.draft_timeout_s:g} for drafts, and counts as lost after "
        f"planner.verdict_timeout_s {planner.verdict_timeout_s:g}: lower the first or raise the second",
    )


def _model_faults(model: str, where: str, place: Place) -> Iterator[Fault]:
    if models.is_known(model):
        return
    try:
        models.resolve(model)
    except ConfigError as error:
        yield Fault(place, f"{where}: {error}")


def _placement_faults(service: Service, args: ServiceArgs) -> Iterator[Fault]:
    """The Drafter deployment exists exactly when `args` ask for it, and serves what the Router plans."""
    placement = args.drafter.placement
    where = (*service.place, "args", "drafter", "placement")
    if placement != "actor" and "Drafter" in service.entries:
        yield Fault(
            where,
            f"args: the deployment Drafter exists only with drafter.placement: actor (got {placement!r}): "
            "say that, or remove the deployment",
        )
        return
    wanted = service.router.speculative_config if service.router is not None else None
    if wanted is None:
        return
    if placement != "actor":
        yield from _inprocess_faults(wanted.method, placement, where)
    elif service.drafter is not None and service.drafter.speculative_config != wanted:
        place = service.entries["Drafter"].place if "Drafter" in service.entries else service.place
        yield Fault(
            (*place, "user_config", "speculative_config"),
            f"Drafter.user_config: speculative_config differs from the Router's in "
            f"{_differing(service.drafter.speculative_config, wanted)}: give both the same, by a YAML anchor "
            "(`&speculation` at the Router, `*speculation` here)",
        )


def _differing(one: SpeculativeConfig, other: SpeculativeConfig) -> str:
    keys = type(one).model_fields
    return ", ".join(key for key in keys if getattr(one, key) != getattr(other, key))


def _router_faults(service: Service, args: ServiceArgs) -> Iterator[Fault]:
    """The Router's hot options against what `args` fixed."""
    if service.router is None:
        return
    place = service.entries["Router"].place if "Router" in service.entries else service.place
    if fault := args.drafts_do_not_fit(service.router.speculative_config):
        yield Fault((*place, "user_config", "speculative_config"), f"Router.user_config: {fault}")
    try:
        args.router.check(service.router.limits, sequences=args.verifier.num_replicas * args.max_num_seqs)
    except ConfigError as error:
        yield Fault((*place, "user_config", "limits"), f"Router.user_config: {error}")


def _entry_faults(name: str, entry: Entry, args: ServiceArgs) -> Iterator[Fault]:
    """What an entry says instead of `args`, where the service needs what `args` say."""
    pool, key, needed = {
        "Router": (args.router, "args.router.max_ongoing_requests", args.router.max_ongoing_requests),
        "Verifier": (args.verifier, "twice args.max_num_seqs", LEASES_PER_PLACE * args.max_num_seqs),
        "Drafter": (
            args.drafter,
            "twice args.drafter.max_num_seqs",
            LEASES_PER_PLACE * args.drafter.max_num_seqs,
        ),
    }[name]
    if entry.max_ongoing_requests is not None and entry.max_ongoing_requests < needed:
        yield Fault(
            (*entry.place, "max_ongoing_requests"),
            f"{name}.max_ongoing_requests: {entry.max_ongoing_requests} is below {key}, {needed}: requests "
            "would wait in Serve, where no limit acts; remove it, and set that key",
        )
    if entry.num_gpus is not None and entry.num_gpus != pool.num_gpus:
        yield Fault(
            (*entry.place, "ray_actor_options"),
            f"{name}.ray_actor_options: they replace what args say, and give {entry.num_gpus:g} GPUs where "
            f"args.{name.lower()}.num_gpus is {pool.num_gpus:g}: say the same number in both",
        )


def _port_faults(service: Service, args: ServiceArgs) -> Iterator[Fault]:
    """Two replicas on one machine cannot listen on one port."""
    pools: dict[str, VerifierArgs | DrafterArgs] = {"Verifier": args.verifier, "Drafter": args.drafter}
    for name, pool in pools.items():
        entry = service.entries.get(name)
        replicas = entry.replicas if entry is not None and entry.replicas is not None else pool.num_replicas
        if pool.port and replicas > 1 and not (entry is not None and entry.one_a_node):
            yield Fault(
                (*service.place, "args", name.lower(), "port"),
                f"args: {name.lower()}.port {pool.port} serves one replica a machine, and there may be "
                f"{replicas}: say port: 0, which picks a free one (or max_replicas_per_node: 1 in the entry "
                f"of {name})",
            )


def _inprocess_faults(method: str, placement: str, place: Place) -> Iterator[Fault]:
    if method not in registry.drafter_names():
        return  # said at the method
    try:
        needs_device = registry.needs_device(method)
    except (ImportError, AttributeError) as error:
        yield Fault(place, f"args: the drafter {method!r} is installed and cannot be loaded: {error}")
        return
    if needs_device:
        yield Fault(
            place,
            f"args: the drafter {method!r} needs a device of its own: say drafter.placement: actor "
            f"(got {placement!r})",
        )


# ── Words and lines ───────────────────────────────────────────────────────────────────────────────────


def _unknown(name: str, known: Sequence[str] | dict[str, Any], *, what: str = "key") -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    cure = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
    return f"unknown {what} {name!r}; {cure}"


def _sentence(message: str, value: Any, kind: str) -> str:
    if kind == "missing":
        return "is missing"
    message = message.removeprefix("Value error, ")
    # A whole section as the offending value says nothing that the line number does not.
    return message if isinstance(value, dict | list) else f"{message} (got {value!r})"


def _path(place: Place) -> str:
    """`applications[0].deployments[1].name`; the top of the file has no name."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return path.removeprefix(".") or "the file"


def _lines(root: yaml.Node) -> dict[Place, int]:
    """The line, from 1, at which each value's key (or, in a list, the value) starts."""
    lines: dict[Place, int] = {}

    def enter(node: yaml.Node, place: Place) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                lines[(*place, key.value)] = key.start_mark.line + 1
                enter(value, (*place, key.value))
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                lines[(*place, index)] = value.start_mark.line + 1
                enter(value, (*place, index))

    lines[()] = root.start_mark.line + 1
    enter(root, ())
    return lines


def _line_of(lines: dict[Place, int], place: Place) -> int:
    """The line of a place, or of the nearest section above it that the file has."""
    while place not in lines:
        place = place[:-1]
    return lines[place]


def _doubled_keys(root: yaml.Node) -> Iterator[Fault]:
    """YAML forbids a key twice in one mapping; the reader takes the last one and says nothing."""
    pending: list[tuple[yaml.Node, Place]] = [(root, ())]
    while pending:
        node, place = pending.pop()
        if isinstance(node, yaml.MappingNode):
            first: dict[str, int] = {}
            for key, value in node.value:
                line = key.start_mark.line + 1
                if key.value in first:
                    twice = f"lines {first[key.value]} and {line}"
                    yield Fault(
                        (*place, key.value), f"{_path(place)}: {key.value!r} is there twice, at {twice}"
                    )
                first.setdefault(key.value, line)
                pending.append((value, (*place, key.value)))
        elif isinstance(node, yaml.SequenceNode):
            pending += [(value, (*place, index)) for index, value in enumerate(node.value)]
