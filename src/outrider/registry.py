"""Drafters by name, through the entry points of the group `outrider.drafters`: ours and anybody's."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TypeAlias, cast

from outrider.config import SpeculativeConfig
from outrider.contracts import Drafter, TargetInfo
from outrider.errors import ConfigError

GROUP = "outrider.drafters"

DrafterFactory: TypeAlias = Callable[[SpeculativeConfig, TargetInfo], Drafter]


def drafter_names() -> list[str]:
    """Every method that `speculative_config.method` may name on this machine."""
    return sorted(entry.name for entry in entry_points(group=GROUP))


def drafter_factory(method: str) -> DrafterFactory:
    """The class behind a method; `ConfigError` lists the known ones."""
    for entry in entry_points(group=GROUP, name=method):
        return cast(DrafterFactory, entry.load())
    raise ConfigError(
        f"speculative_config.method {method!r} is not installed; known: {', '.join(drafter_names())}"
    )


def needs_device(method: str) -> bool:
    """Whether a method's drafter wants a deployment of its own by default."""
    return bool(getattr(drafter_factory(method), "needs_device", True))
