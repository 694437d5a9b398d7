"""What the deployments are built with, and that the Kubernetes base agrees with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.config import LimitOptions, ServiceArgs
from outrider_serve.app import build

BASE = Path(__file__).parents[2] / "k8s" / "base" / "rayservice.yaml"


def deployments(args: ServiceArgs) -> dict[str, Any]:
    """The options of each deployment of the application, by its name."""
    bound = build(args)._bound_deployment
    found = {bound.name: bound}
    for argument in bound.init_args:
        inner = getattr(argument, "_bound_deployment", None)
        if inner is not None:
            found[inner.name] = inner
    return found


@pytest.fixture
def args() -> ServiceArgs:
    return ServiceArgs.model_validate({"model": "any", "drafter": {"placement": "actor"}})


def test_a_router_has_room_for_every_running_and_queued_request_and_for_probes(args: ServiceArgs) -> None:
    router = deployments(args)["Router"]
    running = args.verifier.num_replicas * args.max_num_seqs

    assert router.max_ongoing_requests >= running + LimitOptions().max_queued_requests + 64


def test_what_finds_no_place_in_a_router_is_bounded_and_answered_429(args: ServiceArgs) -> None:
    router = deployments(args)["Router"]

    assert 0 < router.max_queued_requests <= router.max_ongoing_requests
    backpressure = router._deployment_config.backpressure_config
    assert (backpressure.status_code, backpressure.retry_after_s) == (429, 1.0)


@pytest.mark.parametrize("drain_s", [660.0, 1300.0])
def test_every_pool_drains_as_long_as_the_longest_request_may_take(drain_s: float) -> None:
    args = ServiceArgs.model_validate(
        {
            "model": "any",
            "drafter": {"placement": "actor"},
            "router": {"graceful_shutdown_timeout_s": drain_s},
        }
    )
    built = deployments(args)

    assert set(built) == {"Router", "Verifier", "Drafter"}
    for deployment in built.values():
        assert deployment._deployment_config.graceful_shutdown_timeout_s == drain_s
    args.router.check(LimitOptions(request_timeout_s=drain_s), sequences=1)


def test_kubernetes_waits_longer_for_a_pod_than_serve_for_its_replicas() -> None:
    service = yaml.safe_load(BASE.read_text(encoding="utf-8"))["spec"]
    application = yaml.safe_load(service["serveConfigV2"])["applications"][0]
    drain_s = ServiceArgs.model_validate(application["args"]).router.graceful_shutdown_timeout_s

    for group in service["rayClusterConfig"]["workerGroupSpecs"]:
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > drain_s
    assert service["rayClusterDeletionDelaySeconds"] > drain_s
