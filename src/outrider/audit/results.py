"""What the checks find: small frozen values that the report shows and JSON keeps."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Status(enum.StrEnum):
    """Of one result. Only a defect makes the audit fail."""

    FINE = "fine"
    TIES = "numeric ties"  # texts differ where two tokens score alike within the machine's rounding
    UNDECIDED = "undecided"  # texts differ, and what would tell ties from defects cannot be seen from here
    NOTHING = "nothing seen"  # the check had nothing to look at
    DEFECT = "defect"


class Verdict(enum.StrEnum):
    """Of one pair of texts that part."""

    TIE = "numeric tie"
    UNDECIDED = "undecided"
    DEFECT = "defect"


class Result(Protocol):
    """A line of the report."""

    @property
    def check(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def status(self) -> Status: ...
    @property
    def summary(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Scored:
    """One way of computing the position where two texts part: scores are logit / temperature + noise."""

    way: str
    reference: float  # of the reference's token; -inf: cut off
    found: float  # of the other's
    best: float  # of the token that wins this way
    best_token: int


@dataclass(frozen=True, slots=True)
class Divergence:
    """Two texts that part, and why."""

    request: int  # index of the prompt
    position: int  # generated tokens before the first that differs
    reference: str  # the candidates: id and text, or "the end"
    found: str
    verdict: Verdict
    reason: str
    deviation: float | None = None  # measured at this position
    scores: tuple[Scored, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """Texts against reference texts, token by token."""

    check: str
    name: str
    compared: int
    tokens: int  # of the reference
    divergences: tuple[Divergence, ...]
    drafted: int = 0
    accepted: int = 0
    drafts_expected: bool = False  # a comparison that speculates and drafts nothing proves nothing

    @property
    def identical(self) -> int:
        return self.compared - len(self.divergences)

    @property
    def status(self) -> Status:
        verdicts = {one.verdict for one in self.divergences}
        if Verdict.DEFECT in verdicts:
            return Status.DEFECT
        if Verdict.UNDECIDED in verdicts:
            return Status.UNDECIDED
        if verdicts:
            return Status.TIES
        if not self.compared or (self.drafts_expected and not self.drafted):
            return Status.NOTHING
        return Status.FINE

    @property
    def summary(self) -> str:
        line = f"{self.identical} of {self.compared} identical ({self.tokens} tokens)"
        if self.drafted:
            line += f", {self.accepted} of {self.drafted} drafts accepted"
        elif self.drafts_expected:
            line += ", nothing was drafted"
        if self.divergences:
            counts = dict.fromkeys(Verdict, 0)
            for one in self.divergences:
                counts[one.verdict] += 1
            line += "; " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        return line


def first_difference(reference: Sequence[object], found: Sequence[object]) -> int | None:
    """Index of the first item that differs, one of the ends included; None where both are equal."""
    for index, (one, other) in enumerate(zip(reference, found, strict=False)):
        if one != other:
            return index
    shortest = min(len(reference), len(found))
    return None if len(reference) == len(found) else shortest
