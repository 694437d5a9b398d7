"""What every request field does to the target's logits, row by row, before a token is drawn.

A verify block has a row for the newest token and one for each draft, and each row sees the tokens before it:
counts for penalties include the drafts that lead to the row, minimum lengths and grammar masks move along. So
a row gets exactly what plain decoding would have given it. A drafter runs its own logits through the same.

Shapes: L rows (all lanes, one after the other), V vocabulary (the tokenizer's; padding is cut off).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class Lane:
    """One sequence's rows in a batch: row i draws the token at `position + i`, after `drafts[:i]`."""

    sampling: SamplingParams
    position: int  # absolute index of the token that the first row draws
    drafts: tuple[int, ...] = ()  # so there are 1 + len(drafts) rows
    prompt: Sequence[int] = ()  # read only where sampling.penalised
    output: Sequence[int] = ()  # generated before the first row; read only where sampling.penalised
    banned: tuple[int, ...] = ()  # tokens that cannot be drawn by the first `banned_rows` rows (min_tokens)
    banned_rows: int = 0
    grammar: Tensor | None = None  # (rows, ceil(V / 32)) int32 bitmask, bit set: allowed

    @property
    def rows(self) -> int:
        return 1 + len(self.drafts)

    @property
    def temperature(self) -> float:
        """What the rows' logits are divided by; 1 where nothing is drawn."""
        return 1.0 if self.sampling.greedy else self.sampling.temperature

    @property
    def cut(self) -> bool:
        """Whether unlikely tokens are cut off; a greedy row needs no cut to take the likeliest."""
        params = self.sampling
        truncated = params.top_k is not None or params.top_p < 1.0 or params.min_p > 0.0
        return truncated and not params.greedy


def process(logits: Tensor, lanes: Sequence[Lane], vocab_size: int) -> Tensor:
    """What is left to draw from: (L, V) float32, -inf where a token cannot be drawn; not yet divided by the
    temperature.

    logits: (L, W) float32 with W >= vocab_size, left as they are. In vLLM's order: grammar, min_tokens,
    logit_bias, penalties, then by the probabilities at the row's temperature min_p, top_k, top_p. Equal
    logits share their fate at every cut, so that no sort order decides.
    """
    logits = logits[:, :vocab_size]
    if not any(
        lane.grammar is not None or lane.banned_rows or lane.sampling.logit_bias or lane.sampling.penalised
        for lane in lanes
    ):
        return _cut(logits, lanes)
    logits = logits.clone()
    end = 0
    for lane in lanes:
        begin, end = end, end + lane.rows
        rows = logits[begin:end]
        if lane.grammar is not None:
            rows.masked_fill_(~allowed_tokens(lane.grammar, vocab_size).to(rows.device), -math.inf)
        if lane.banned_rows:
            rows[: lane.banned_rows, list(lane.banned)] = -math.inf
        if lane.sampling.logit_bias:
            ids, added = zip(*lane.sampling.logit_bias, strict=True)
            rows[:, list(ids)] += torch.tensor(added, dtype=rows.dtype, device=rows.device)
        if lane.sampling.penalised:
            _penalise(rows, lane)
    return _cut(logits, lanes)


def allowed_tokens(mask: Tensor, vocab_size: int) -> Tensor:
    """A bitmask (rows, words) int32 as booleans (rows, V)."""
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    return ((mask.unsqueeze(-1) >> bits) & 1).bool().flatten(1)[:, :vocab_size]


def _penalise(rows: Tensor, lane: Lane) -> None:
    """Penalties in place on one lane's rows (n, V), by the formulas of vLLM and transformers.

    Only tokens that were there before are touched: U of them.
    """
    params, device = lane.sampling, rows.device
    history = [*lane.prompt, *lane.output, *lane.drafts]
    seen = torch.tensor(history, dtype=torch.int64, device=device)
    ids, place = torch.unique(seen, return_inverse=True)
    prompt, output, drafts = place.split([len(lane.prompt), len(lane.output), len(lane.drafts)])
    in_prompt = torch.zeros(len(ids), dtype=torch.bool, device=device)
    in_prompt[prompt] = True
    # counts[i]: how often each token is in the output when row i draws, the drafts before it included.
    counts = torch.zeros(lane.rows, len(ids), dtype=rows.dtype, device=device)
    counts[0] = torch.bincount(output, minlength=len(ids)).to(rows.dtype)
    counts[torch.arange(1, lane.rows, device=device), drafts] = 1
    counts = counts.cumsum(dim=0)
    there = counts > 0
    values = rows[:, ids]
    factor = params.repetition_penalty
    repeated = torch.where(values > 0, values / factor, values * factor)
    values = torch.where(there | in_prompt, repeated, values)
    values = values - counts * params.frequency_penalty - there.to(rows.dtype) * params.presence_penalty
    rows[:, ids] = values


def _cut(logits: Tensor, lanes: Sequence[Lane]) -> Tensor:
    """min_p, top_k and top_p for the rows that have any; the others are handed through."""
    if not any(lane.cut for lane in lanes):
        return logits
    params = [lane.sampling for lane in lanes for _ in range(lane.rows)]
    wanted = [row for row, lane in enumerate(lane for lane in lanes for _ in range(lane.rows)) if lane.cut]
    whole = len(wanted) == len(params)
    at = torch.tensor(wanted, device=logits.device)
    rows = logits if whole else logits[at]
    lowest = _lowest_kept(rows, [params[row] for row in wanted])
    kept = rows.masked_fill(rows < lowest.unsqueeze(1), -math.inf)
    return kept if whole else logits.index_copy(0, at, kept)


def _lowest_kept(rows: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The smallest logit of each row that no cut takes: (n,) float32. Every cut keeps the likeliest token."""
    device = rows.device
    top = rows.amax(dim=1)
    lowest = torch.full_like(top, -math.inf)
    heat = torch.tensor([one.temperature for one in params], dtype=rows.dtype, device=device)
    if any(one.min_p > 0 for one in params):
        share = [math.log(one.min_p) if one.min_p > 0 else -math.inf for one in params]
        lowest = torch.minimum(top, top + torch.tensor(share, dtype=rows.dtype, device=device) * heat)
    if any(one.top_k is not None for one in params):
        limits = [min(one.top_k or rows.shape[1], rows.shape[1]) for one in params]
        counted = [limit for limit in limits if limit < rows.shape[1]]
        if counted:
            best = rows.topk(max(counted), dim=1).values
            last = torch.tensor([min(limit, best.shape[1]) - 1 for limit in limits], device=device)
            kth = best.gather(1, last.unsqueeze(1)).squeeze(1)
            off = torch.tensor([limit == rows.shape[1] for limit in limits], device=device)
            lowest = torch.maximum(lowest, kth.masked_fill(off, -math.inf))
    nucleus = [row for row, one in enumerate(params) if one.top_p < 1.0]
    if nucleus:
        at = torch.tensor(nucleus, device=device)
        share = [params[row].top_p for row in nucleus]
        floor = lowest[at]
        kept = rows[at].masked_fill(rows[at] < floor.unsqueeze(1), -math.inf)
        smallest = _nucleus(kept, heat[at], torch.tensor(share, dtype=torch.float64, device=device))
        lowest = lowest.index_copy(0, at, torch.maximum(floor, smallest))
    return lowest


FIRST_LOOK = 256
"""Tokens that are sorted first for top_p; where their mass is too small, sixteen times as many."""


def _nucleus(rows: Tensor, heat: Tensor, share: Tensor) -> Tensor:
    """The smallest logit of the smallest set of likeliest tokens whose mass reaches `share`: (n,) float32.

    rows: (n, V) with -inf for what is cut already; heat, share: (n,).
    """
    top = rows.amax(dim=1, keepdim=True)
    mass = torch.exp((rows - top) / heat.unsqueeze(1))
    wanted = share * _fixed_order_sum(mass)
    answer = torch.empty_like(heat)
    open_rows = torch.arange(len(rows), device=rows.device)
    look = FIRST_LOOK
    while len(open_rows):
        look = min(look, rows.shape[1])
        best = rows[open_rows].topk(look, dim=1).values
        share_of = torch.exp((best - top[open_rows]) / heat[open_rows].unsqueeze(1)).double()
        # A token stays while the mass before it is below the share: the first one always does.
        before = share_of.cumsum(dim=1) - share_of
        stays = before < wanted[open_rows].unsqueeze(1)
        count = stays.sum(dim=1).clamp(min=1)
        answer[open_rows] = best.gather(1, count.unsqueeze(1) - 1).squeeze(1)
        if look == rows.shape[1]:
            break
        open_rows = open_rows[count == look]
        look *= 16
    return answer


def _fixed_order_sum(mass: Tensor) -> Tensor:
    """Row sums in float64, (n, V) to (n,), grouped the same however many rows and threads there are."""
    padded = torch.nn.functional.pad(mass, (0, -mass.shape[1] % 256))
    groups = padded.view(len(mass), -1, 256).sum(dim=2, dtype=torch.float64)
    return groups.cumsum(dim=1)[:, -1]
