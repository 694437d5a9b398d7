"""Two texts of one request that differ: do two tokens weigh the same there, or is something wrong?

The position's logits are computed anew in several ways that should agree: the newest token alone, in a verify
block, in one prefill. The spread of the two candidates' difference over these ways is the deviation that this
service has at this position. It is a numeric tie when each candidate wins within that deviation, and a defect
when the difference is larger than any deviation explains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.audit.report import Finding, Outcome
from outrider.engine.engine import Engine
from outrider.engine.model import Batch, Span
from outrider.messages import SamplingParams
from outrider.sampling.noise import gumbel, row_key

LAST_ROWS = (1, 2, 5, 9)
"""Verify blocks of these sizes end at the position."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two texts part, and what was measured there."""

    position: int  # index among the generated tokens
    first: int  # token of the reference; -1: it had ended
    second: int
    gaps: tuple[float, ...]  # score of the first less that of the second, one a way of computing
    beaten_by: float  # how far the best token of all is above the better of the two, at least

    @property
    def deviation(self) -> float:
        return max(self.gaps) - min(self.gaps) if self.gaps else 0.0

    @property
    def is_tie(self) -> bool:
        """Each of the two wins within the deviation."""
        return (
            bool(self.gaps)
            and min(map(abs, self.gaps)) <= self.deviation
            and self.beaten_by <= self.deviation
        )

    def __str__(self) -> str:
        verdict = "numeric tie" if self.is_tie else "defect"
        gaps = ", ".join(f"{gap:+.4g}" for gap in self.gaps)
        return (
            f"token {self.position}: {self.first} or {self.second}, scores apart by {gaps}; "
            f"deviation {self.deviation:.4g}: {verdict}"
        )


def finding(check: str, subject: str, compared: int, found: Sequence[Divergence], note: str = "") -> Finding:
    """One line for many pairs of texts: identical, or what the first divergence is."""
    ties = [one for one in found if one.is_tie]
    defects = [one for one in found if not one.is_tie]
    identical = compared - len(found)
    detail = f"{identical} of {compared} identical{note}"
    outcome = Outcome.FINE
    if found:
        outcome = Outcome.DEFECT if defects else Outcome.TIE
        detail += f"; {len(ties)} numeric ties, {len(defects)} defects; first: {(defects or ties)[0]}"
    figures = (
        ("identical", float(identical)),
        ("ties", float(len(ties))),
        ("defects", float(len(defects))),
    )
    return Finding(check, subject, outcome, detail, figures)


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Index of the first token that differs; None where the texts are equal."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return None if len(first) == len(second) else min(len(first), len(second))


def explain(
    engine: Engine,
    prompt: Sequence[int],
    first: Sequence[int],
    second: Sequence[int],
    sampling: SamplingParams,
    *,
    also: Sequence[Tensor] = (),
) -> Divergence | None:
    """Where two continuations of a prompt part, and whether numbers explain it. None: they are equal.

    `engine` must be idle. `also`: logits (V,) of the first differing position, computed elsewhere.
    """
    at = first_difference(first, second)
    if at is None:
        return None
    if at >= len(first) or at >= len(second):  # one ended where the other went on: no number explains that
        return Divergence(at, _token(first, at), _token(second, at), (), 0.0)
    known = [*prompt, *first[:at]]
    ways = [logits_after(engine, known, rows) for rows in LAST_ROWS if rows <= len(known)]
    ways += [logits_after(engine, known, len(known)), *also]
    gaps, beaten = [], []
    for logits in ways:
        scores = _scores(logits[: engine.vocab_size], sampling, len(known))
        a, b = scores[first[at]].item(), scores[second[at]].item()
        gaps.append(a - b)
        beaten.append(scores.max().item() - max(a, b))
    return Divergence(at, first[at], second[at], tuple(gaps), min(beaten))


def _token(text: Sequence[int], at: int) -> int:
    return text[at] if at < len(text) else -1


def _scores(logits: Tensor, sampling: SamplingParams, position: int) -> Tensor:
    """What the token is the argmax of, truncation left out."""
    if sampling.greedy:
        return logits.double()
    key = row_key(sampling.seed, sampling.choice, position)
    return logits.double() / sampling.temperature + gumbel([key], torch.arange(len(logits)))[0]


def logits_after(engine: Engine, tokens: Sequence[int], last_rows: int) -> Tensor:
    """Logits (V,) after `tokens`, of which the last `last_rows` are computed in one step of their own."""
    blocks = engine.pool.allocate(engine.pool.blocks_for(len(tokens)))
    try:
        split = len(tokens) - last_rows
        if split:
            _step(engine, tokens[:split], 0, blocks)
        return _step(engine, tokens[split:], split, blocks)
    finally:
        engine.pool.release(blocks)


def _step(engine: Engine, tokens: Sequence[int], begin: int, blocks: Sequence[int]) -> Tensor:
    end = begin + len(tokens)
    span = Span(0, len(tokens), end, tuple(blocks[: engine.pool.blocks_for(end)]))
    batch = Batch(
        torch.tensor(list(tokens)),
        torch.arange(begin, end),
        (span,),
        torch.tensor([len(tokens) - 1]),
    )
    return engine.model.forward(batch)[0].clone()
