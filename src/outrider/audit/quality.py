"""Check (e): what a reader would notice. Target log-likelihood, length, repetition and how texts end.

Speculative and plain text answer the same prompts; each figure is a mean of differences with a bootstrap
interval, wide enough that all figures of an audit together are wrong once in a hundred lossless services.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.audit.results import Status
from outrider.audit.statistics import Interval, bootstrap_mean

ERROR = 0.01
"""Chance that any interval of an audit misses its mean, shared by all of them."""

REPEATED = 4  # tokens of a piece that counts as repeated when it was there before
FEWEST = 5  # pairs, below which a bootstrap says nothing


@dataclass(frozen=True, slots=True)
class Text:
    """A generated text, as far as quality asks."""

    tokens: Sequence[object]  # ids, or spellings where ids are not known
    logprobs: Sequence[float]  # the target's raw ones, one a token; empty: not known
    finish: str

    @property
    def log_likelihood(self) -> float | None:
        """Mean a token."""
        return sum(self.logprobs) / len(self.logprobs) if self.logprobs else None

    @property
    def repetition(self) -> float:
        """Share of pieces of REPEATED tokens that were there before."""
        pieces = [tuple(self.tokens[i : i + REPEATED]) for i in range(len(self.tokens) - REPEATED + 1)]
        return 1 - len(set(pieces)) / len(pieces) if pieces else 0.0


@dataclass(frozen=True, slots=True)
class Quality:
    """One figure of speculative text less the same of plain text."""

    name: str
    figure: str
    pairs: int
    plain: float
    difference: Interval | None  # None: too few pairs
    confidence: float
    check: str = "quality"

    @property
    def status(self) -> Status:
        if self.difference is None:
            return Status.NOTHING
        return Status.DEFECT if self.difference.excludes_zero else Status.FINE

    @property
    def summary(self) -> str:
        if self.difference is None:
            return f"{self.figure}: {self.pairs} pairs are too few"
        one = self.difference
        return (
            f"{self.figure}: plain {self.plain:.4g}, difference {one.mean:+.3g} "
            f"[{one.low:+.3g}, {one.high:+.3g}] at {self.confidence:.2%}"
        )


def compare(pairs: dict[str, tuple[Sequence[Text], Sequence[Text]]]) -> list[Quality]:
    """pairs: by name, plain texts and the speculative ones of the same prompts."""
    figures: list[tuple[str, str, list[float], list[float]]] = []
    for name, (plain, speculative) in pairs.items():
        both = list(zip(plain, speculative, strict=True))
        likely = [
            (one.log_likelihood, other.log_likelihood)
            for one, other in both
            if one.log_likelihood is not None and other.log_likelihood is not None
        ]
        figures += [
            (name, "log-likelihood a token", [a for a, _ in likely], [b for _, b in likely]),
            (
                name,
                "tokens",
                [float(len(a.tokens)) for a, _ in both],
                [float(len(b.tokens)) for _, b in both],
            ),
            (name, "repetition", [a.repetition for a, _ in both], [b.repetition for _, b in both]),
            (
                name,
                "share that ends by itself",
                [float(a.finish == "stop") for a, _ in both],
                [float(b.finish == "stop") for _, b in both],
            ),
        ]
    confidence = 1 - ERROR / max(len(figures), 1)
    return [_figure(*figure, confidence) for figure in figures]


def _figure(
    name: str, figure: str, plain: Sequence[float], speculative: Sequence[float], confidence: float
) -> Quality:
    mean = sum(plain) / len(plain) if plain else 0.0
    if len(plain) < FEWEST:
        return Quality(name, figure, len(plain), mean, None, confidence)
    differences = [b - a for a, b in zip(plain, speculative, strict=True)]
    return Quality(
        name, figure, len(plain), mean, bootstrap_mean(differences, confidence=confidence), confidence
    )
