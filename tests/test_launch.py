"""Starting a local Ray where the machine is slow, with Ray itself scripted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from outrider_serve.launch import RAY_STARTS, LaunchError, local_ray


def scripted(monkeypatch: pytest.MonkeyPatch, failures: int) -> list[dict[str, Any]]:
    """Let `ray.init` fail so many times; what it was called with."""
    calls: list[dict[str, Any]] = []

    def init(**options: Any) -> SimpleNamespace:
        calls.append(options)
        if len(calls) <= failures:
            raise Exception("The current node timed out during startup.")
        return SimpleNamespace(dashboard_url="127.0.0.1:1")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    return calls


def test_a_ray_that_starts_too_slowly_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = scripted(monkeypatch, failures=RAY_STARTS - 1)
    with local_ray() as cluster:
        assert cluster.dashboard == "http://127.0.0.1:1"
    assert len(calls) == RAY_STARTS


def test_a_ray_that_never_starts_is_an_error_that_names_the_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = scripted(monkeypatch, failures=RAY_STARTS)
    with (
        pytest.raises(LaunchError, match=r"did not start in 3 attempts .*timed out.* logs are in /"),
        local_ray(),
    ):
        pass
    assert len(calls) == RAY_STARTS
