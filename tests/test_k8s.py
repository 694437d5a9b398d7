"""The Kustomize base, as far as it can be proved without a cluster: it builds, and it fits the schemas.

Not covered: admission, scheduling, and what the KubeRay operator checks beyond its CRD.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from outrider_serve.service_file import check

ROOT = Path(__file__).parents[1]
CRD = ROOT.parent / "shared" / "data" / "kuberay" / "ray.io_rayservices.yaml"
"""KubeRay's own definition, about 1 MB, which is not copied here."""


@pytest.fixture(scope="module")
def built() -> list[dict[str, Any]]:
    """The objects of `kubectl kustomize k8s/base`."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(
        ["kubectl", "kustomize", ROOT / "k8s" / "base"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module")
def rayservice(built: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = (each for each in built if each["kind"] == "RayService")
    return found


@pytest.fixture(scope="module")
def crd() -> jsonschema.Draft202012Validator:
    """Validates a RayService v1, strictly: a key that the CRD does not declare is an error."""
    if not CRD.is_file():
        pytest.skip(f"the KubeRay CRD is not at {CRD}")
    definition = yaml.load(CRD.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = (each for each in definition["spec"]["versions"] if each["name"] == "v1")
    schema: dict[str, Any] = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # the API server's own, which a CRD leaves empty
    return jsonschema.Draft202012Validator(schema)


def strict(schema: Any) -> Any:
    """Kubernetes' dialect of OpenAPI as JSON Schema, with unknown keys refused."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items() if not key.startswith("x-kubernetes-")}
    if schema.get("x-kubernetes-int-or-string"):
        made = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    elif isinstance(properties := schema.get("properties"), dict):
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
        defaulted = {
            name for name, each in properties.items() if "default" in each
        }  # filled in before validation
        if required := [name for name in schema.get("required", []) if name not in defaulted]:
            made["required"] = required
        else:
            made.pop("required", None)
    return made


def pods(rayservice: dict[str, Any]) -> Iterator[dict[str, Any]]:
    cluster = rayservice["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield group["template"]["spec"]


def quickstart() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "manifests" / "quickstart.yaml").read_text())
    return found


def test_the_base_carries_a_namespace_an_account_and_the_service(built: list[dict[str, Any]]) -> None:
    assert [(each["kind"], each["metadata"]["name"]) for each in built] == [
        ("Namespace", "outrider"),
        ("ServiceAccount", "outrider"),
        ("RayService", "outrider"),
    ]


def test_the_service_is_the_quickstart_but_for_its_address(rayservice: dict[str, Any]) -> None:
    served = yaml.safe_load(rayservice["spec"]["serveConfigV2"])
    local = quickstart()
    assert served.pop("http_options") == {"host": "0.0.0.0", "port": 8000}
    assert local.pop("http_options") == {"host": "127.0.0.1", "port": 8000}
    assert served == local


def test_the_service_is_one_that_serve_and_the_linter_take(
    rayservice: dict[str, Any], tmp_path: Path
) -> None:
    text = rayservice["spec"]["serveConfigV2"]
    ServeDeploySchema.model_validate(yaml.safe_load(text))
    file = tmp_path / "service.yaml"
    file.write_text(text)
    assert check(file) == []


def test_the_object_fits_kuberays_schema_to_the_last_key(
    rayservice: dict[str, Any], crd: jsonschema.Draft202012Validator
) -> None:
    assert [error.message for error in crd.iter_errors(rayservice)] == []


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("spec", "rayClusterConfig", "rayVersin"), "2.60.0"),
        (("spec", "rayClusterConfig", "rayVersion"), 2.6),
        (("spec", "rayClusterConfig", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (
            ("spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "containers", 0, "imagee"),
            "outrider",
        ),
    ],
)
def test_the_schema_check_notices_a_mistake(
    rayservice: dict[str, Any],
    crd: jsonschema.Draft202012Validator,
    place: tuple[str | int, ...],
    value: object,
) -> None:
    broken = yaml.safe_load(yaml.safe_dump(rayservice))
    section = broken
    for part in place[:-1]:
        section = section[part]
    section[place[-1]] = value
    assert len(list(crd.iter_errors(broken))) == 1


def test_no_pod_runs_as_root_or_gains_privileges(rayservice: dict[str, Any]) -> None:
    for pod in pods(rayservice):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert pod["serviceAccountName"] == "outrider"
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


def test_every_container_has_the_image_limits_and_the_named_serve_port(rayservice: dict[str, Any]) -> None:
    for pod in pods(rayservice):
        for container in pod["containers"]:
            assert container["image"] == "outrider:0.1.0"
            assert container["resources"]["limits"].keys() == {"cpu", "memory"}
            # KubeRay's readiness probe and its Service look the port up by name.
            assert {"name": "serve", "containerPort": 8000} in container["ports"]


def test_the_replicas_fit_the_workers(rayservice: dict[str, Any]) -> None:
    args = quickstart()["applications"][0]["args"]
    asked = sum(args[pool]["num_cpus"] for pool in ("router", "verifier", "drafter"))
    cluster = rayservice["spec"]["rayClusterConfig"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    (group,) = cluster["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert asked <= int(limits["cpu"]) * group["replicas"]


def test_the_pinned_versions_are_the_same_everywhere(rayservice: dict[str, Any]) -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints-cpu.txt").read_text(), re.MULTILINE))
    assert rayservice["spec"]["rayClusterConfig"]["rayVersion"] == pins["ray"]
    assert "+" not in pins["torch"]
