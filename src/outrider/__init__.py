"""Speculative decoding as a first-class citizen of Ray Serve: the core, without Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.inprocess import local

__all__ = ["local"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`outrider.local(config)` imports torch only when it is asked for."""
    if name == "local":
        from outrider.inprocess import local

        return local
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")
