"""Which requests the comparisons make: every prompt once, greedy and sampled in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 1.0, "top_k": 40, "frequency_penalty": 0.5},
    {"temperature": 1.3, "min_p": 0.05, "presence_penalty": 0.5},
)
"""Request fields, one set a prompt in turn; the names are the same over HTTP."""

GROUPS = (1, 8, 3, 16, 2, 5)
"""Requests at once, in turn: a sequence meets all kinds of company."""


def options(index: int) -> dict[str, Any]:
    """Sampling of the prompt with this index, with a seed of its own."""
    return {**SAMPLINGS[index % len(SAMPLINGS)], "seed": 1000 + index}


def in_groups(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Mixed concurrency."""
    begin = turn = 0
    while begin < len(items):
        size = GROUPS[turn % len(GROUPS)]
        yield items[begin : begin + size]
        begin, turn = begin + size, turn + 1
