"""Check (d): two texts part. Rounding, or a defect?

Both candidates are scored at the first position that differs, several ways: alone, in a verify block, as a
prefill of other cuts, beside other sequences. A score is what decides: the processed logit over the
temperature, plus the position's noise where the token is sampled. How far the ways differ is the deviation
measured *at this position*; it is a numeric tie when each candidate wins once logits may be off by that much,
by its score or because a rival falls to a cut. Where all ways agree bit for bit, as they do under
`numerics: strict`, nothing is a tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

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
LIKELY = 64  # tokens whose logits are compared between ways
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


@dataclass(frozen=True, slots=True)
class Position:
    """Where a token is drawn: how, and after what."""

    sampling: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]

    def scores(self, logits: Tensor, *, cut: bool = True) -> Tensor:
        """(V,) float64: what the token of this position is the argmax of. logits: (V,)."""
        sampling = self.sampling if cut else replace(self.sampling, top_k=None, top_p=1.0, min_p=0.0)
        position = len(self.prompt) + len(self.output)
        lane = Lane(sampling, position, prompt=self.prompt, output=self.output)
        processed = process(logits.unsqueeze(0), [lane], len(logits)).double()
        if sampling.greedy:
            return processed[0]
        noise = gumbel([row_key(sampling.seed, sampling.choice, position)], torch.arange(len(logits)))
        return (processed / sampling.temperature + noise)[0]


def score_candidates(ways: Ways, candidates: tuple[int, int], position: Position) -> tuple[Scored, ...]:
    """The reference's and the other's token, each way."""
    found = []
    for way, logits in ways.items():
        values = position.scores(logits)
        best = int(values.argmax())
        one, other = (float(values[token]) for token in candidates)
        found.append(Scored(way, one, other, float(values[best]), best))
    return tuple(found)


def deviation_of(ways: Ways, *, resolution: float = 0.0) -> float:
    """How far the ways differ at this position: the largest spread of a likely token's logit.

    What all of them share is no difference: logits are taken relative to their mean over the likely tokens.
    resolution: epsilon of the dtype that another implementation rounds its logits to; where the ways differ
    at all, that much may have been rounded away.
    """
    rows = torch.stack(list(ways.values())).double()
    likely = rows[:, rows[0].topk(min(LIKELY, rows.shape[1])).indices]
    centred = likely - likely.mean(dim=1, keepdim=True)
    deviation = float((centred.amax(dim=0) - centred.amin(dim=0)).max())
    if deviation and resolution:
        deviation = max(deviation, 2.0 ** math.frexp(float(likely.abs().max()))[1] * resolution)
    return deviation


def can_win(logits: Tensor, token: int, deviation: float, position: Position) -> bool:
    """Whether `token` is drawn once every logit may be off by `deviation`: its rivals down, the others up.

    The others, too: a rival may be cut by top_k, top_p or min_p because of them.
    """
    values = position.scores(logits, cut=False)
    rivals = values > values[token]
    moved = logits + torch.where(rivals, -deviation, deviation).to(logits.dtype)
    return int(position.scores(moved).argmax()) == token


def judge(
    ways: Ways, candidates: tuple[int, int], position: Position, *, resolution: float = 0.0
) -> tuple[Verdict, float, str]:
    """The verdict, the deviation measured, and the reason in words. candidates: reference, other."""
    deviation = deviation_of(ways, resolution=resolution)
    if deviation == 0:
        reason = f"all {len(ways)} ways agree to the bit: there is one right token"
        return Verdict.DEFECT, deviation, reason
    for name, token in zip(("the reference's token", "the other token"), candidates, strict=True):
        if not any(can_win(logits, token, deviation, position) for logits in ways.values()):
            reason = f"{name} cannot win, and the ways differ by {deviation:.3g} a logit at most"
            return Verdict.DEFECT, deviation, reason
    return (
        Verdict.TIE,
        deviation,
        f"each token wins within the {deviation:.3g} a logit that the ways differ by",
    )


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
        at_position = Position(sampling, prompt, output)
        candidates = (reference[at], found[at])
        verdict, deviation, reason = judge(ways, candidates, at_position, resolution=self.resolution)
        scored = score_candidates(ways, candidates, at_position)
        return Divergence(request, at, names[0], names[1], verdict, reason, deviation, scored)
