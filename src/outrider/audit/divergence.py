"""Check (d): two texts part. Rounding, or a defect?

Both candidates are scored at the first position that differs, several ways: alone, in a verify block, as a
prefill of other cuts, beside other sequences. A score is what decides: the processed logit over the
temperature, plus the position's noise where the token is sampled. How far the ways differ is the deviation
measured *at this position*; it is a numeric tie when each candidate comes that close to winning. Where all
ways agree bit for bit, as they do under `numerics: strict`, nothing is a tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.audit.results import Divergence, Scored, Verdict, first_difference
from outrider.engine.engine import Engine
from outrider.engine.model import Batch, Span
from outrider.messages import SamplingParams
from outrider.sampling.noise import gumbel, row_key
from outrider.sampling.processors import Lane, process

END = "the end"
NEIGHBOURS = 7  # sequences beside the one that is looked at
ODD_CUT = 48  # rows of a prefill chunk: no multiple of most tiles

Ways = Mapping[str, Tensor]
"""Raw next-token logits (V,) float32 of one prefix, by how they were computed."""

ForeignWays = Callable[[Sequence[int]], Ways]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows of one forward; `logit_row` counts from its first."""

    begin: int
    end: int
    logit_row: int | None = None
    neighbours: int = 0


class Recomputed:
    """Logits of any prefix by the engine's own model and cache. The engine must be idle meanwhile."""

    def __init__(self, engine: Engine, *, most_rows: int = 512) -> None:
        self.vocab_size = engine.vocab_size
        self._engine = engine
        self._most_rows = most_rows

    @torch.inference_mode()
    def ways(self, prefix: Sequence[int], follow: Sequence[int]) -> dict[str, Tensor]:
        """Logits after `prefix`. `follow` are tokens to verify behind it, as drafts."""
        tokens = [*prefix, *follow[:4]]
        size, room = len(prefix), len(tokens)
        back = min(3, size - 1)  # rows of the block before the one that counts
        plans = {
            "one token alone": [*self._cut(0, size - 1, self._most_rows), _Chunk(size - 1, size, 0)],
            "prefill": self._last(self._cut(0, size, self._most_rows)),
            f"prefill in pieces of {ODD_CUT}": self._last(self._cut(0, size, ODD_CUT)),
            "first row of a verify block": [
                *self._cut(0, size - 1, self._most_rows),
                _Chunk(size - 1, room, 0),
            ],
            "inside a verify block": [
                *self._cut(0, size - 1 - back, self._most_rows),
                _Chunk(size - 1 - back, room, back),
            ],
            f"beside {NEIGHBOURS} others": [
                *self._cut(0, size - 1, self._most_rows),
                _Chunk(size - 1, size, 0, NEIGHBOURS),
            ],
        }
        return {way: self._run(tokens, chunks) for way, chunks in plans.items()}

    @staticmethod
    def _cut(begin: int, end: int, size: int) -> list[_Chunk]:
        return [_Chunk(at, min(at + size, end)) for at in range(begin, end, size)]

    @staticmethod
    def _last(chunks: list[_Chunk]) -> list[_Chunk]:
        last = chunks[-1]
        return [*chunks[:-1], _Chunk(last.begin, last.end, last.end - last.begin - 1)]

    def _run(self, tokens: Sequence[int], chunks: Sequence[_Chunk]) -> Tensor:
        pool, model = self._engine.pool, self._engine.model
        blocks = pool.allocate(pool.blocks_for(len(tokens)))
        beside = pool.allocate(max(chunk.neighbours for chunk in chunks))
        try:
            for chunk in chunks:
                rows = chunk.end - chunk.begin
                held = tuple(blocks[: pool.blocks_for(chunk.end)])
                spans = [Span(0, rows, chunk.end, held)]
                ids, positions = list(tokens[chunk.begin : chunk.end]), list(range(chunk.begin, chunk.end))
                for number in range(chunk.neighbours):  # texts of one token each, of which nothing is asked
                    spans.append(Span(len(ids), 1, 1, (beside[number],)))
                    ids.append(tokens[number % len(tokens)])
                    positions.append(0)
                wanted = [] if chunk.logit_row is None else [chunk.logit_row]
                wanted += [span.start for span in spans[1:]]
                logits = model.forward(
                    Batch(
                        torch.tensor(ids),
                        torch.tensor(positions),
                        tuple(spans),
                        torch.tensor(wanted, dtype=torch.int64),
                    )
                )
            return logits[0, : self.vocab_size].float().cpu()
        finally:
            pool.release(blocks)
            pool.release(beside)


def scores(
    logits: Tensor, sampling: SamplingParams, *, prompt: Sequence[int], output: Sequence[int]
) -> Tensor:
    """(V,) float64: what the token of this position is the argmax of. logits: (V,)."""
    position = len(prompt) + len(output)
    lane = Lane(sampling, position, prompt=prompt, output=output)
    processed = process(logits.unsqueeze(0), [lane], len(logits)).double()
    if sampling.greedy:
        return processed[0]
    noise = gumbel([row_key(sampling.seed, sampling.choice, position)], torch.arange(len(logits)))
    return (processed / sampling.temperature + noise)[0]


def score_candidates(
    ways: Ways,
    sampling: SamplingParams,
    candidates: tuple[int, int],
    *,
    prompt: Sequence[int],
    output: Sequence[int],
) -> tuple[Scored, ...]:
    """The reference's and the other's token, each way."""
    found = []
    for way, logits in ways.items():
        values = scores(logits, sampling, prompt=prompt, output=output)
        best = int(values.argmax())
        one, other = (float(values[token]) for token in candidates)
        found.append(Scored(way, one, other, float(values[best]), best))
    return tuple(found)


def judge(scored: Sequence[Scored], *, resolution: float = 0.0) -> tuple[Verdict, float, str]:
    """The verdict, the deviation measured, and the reason in words.

    resolution: epsilon of the dtype that logits are computed in, where another implementation is among the
    ways: its logits are rounded to that dtype, and two neighbours may both be right.
    """
    gaps = {
        "the reference's token": [one.best - one.reference for one in scored],
        "the other token": [one.best - one.found for one in scored],
    }
    margins = [_minus(one.reference, one.found) for one in scored]
    deviation = max(_spread(values) for values in [margins, *gaps.values()])
    if deviation and resolution:
        # Where ways differ, one of them rounds: by up to a unit in the last place of each of the two.
        largest = max(abs(one.best) for one in scored)
        deviation = max(deviation, 2 ** math.frexp(largest)[1] * resolution)
    if deviation == 0:
        reason = f"all {len(scored)} ways agree, to the bit, by how much one beats the other"
        return Verdict.DEFECT, deviation, f"{reason}: there is one right token"
    for name, values in gaps.items():
        if min(values) > deviation:
            reason = (
                f"{name} loses by {min(values):.3g} at least, and the ways differ by {deviation:.3g} at most"
            )
            return Verdict.DEFECT, deviation, reason
    return Verdict.TIE, deviation, f"each token wins within the {deviation:.3g} that the ways differ by"


def _minus(one: float, other: float) -> float:
    return 0.0 if one == other else one - other  # two tokens that are cut off are equal


def _spread(values: Sequence[float]) -> float:
    low, high = min(values), max(values)
    return 0.0 if low == high else high - low


@dataclass(frozen=True, slots=True)
class Explainer:
    """Explains differing texts of one model."""

    recomputed: Recomputed
    spell: Callable[[int], str]
    foreign: ForeignWays | None = None  # more ways, of another implementation
    resolution: float = 0.0  # epsilon of its dtype

    def explain(
        self,
        request: int,
        sampling: SamplingParams,
        prompt: Sequence[int],
        reference: Sequence[int],
        found: Sequence[int],
    ) -> Divergence | None:
        """Why `found` is not `reference`; None where it is."""
        at = first_difference(reference, found)
        if at is None:
            return None
        names = [
            f"{text[at]} {self.spell(text[at])!r}" if at < len(text) else END for text in (reference, found)
        ]
        if END in names:
            # Ends follow from the tokens before them, which are equal.
            reason = "one text ends where the other goes on, after equal tokens"
            return Divergence(request, at, names[0], names[1], Verdict.DEFECT, reason)
        output = list(reference[:at])
        prefix = [*prompt, *output]
        ways = dict(self.recomputed.ways(prefix, reference[at:]))
        if self.foreign is not None:
            ways.update(self.foreign(prefix))
        scored = score_candidates(ways, sampling, (reference[at], found[at]), prompt=prompt, output=output)
        verdict, deviation, reason = judge(scored, resolution=self.resolution)
        finite = deviation if math.isfinite(deviation) else None
        return Divergence(request, at, names[0], names[1], verdict, reason, finite, scored)
