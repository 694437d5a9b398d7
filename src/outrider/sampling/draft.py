"""A drafter's draws: with the target's noise under the coupled rule, with noise of its own under the others.

Under a ratio test a draft is judged by the distribution that it was drawn from, so it is drawn from exactly
what is shipped: the N likeliest tokens after every processor, renormalised in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outrider.sampling.noise import Purpose, draw, row_key
from outrider.sampling.processors import Lane, process
from outrider.sampling.target import choose_tokens


@dataclass(frozen=True, slots=True)
class DraftDraws:
    """One draft a row. L rows, N tokens of each distribution."""

    tokens: Tensor  # (L,) int64
    ids: Tensor | None  # (L, N) int64, where any row needs draft_probs
    probs: Tensor | None  # (L, N) float32; rows sum to 1, what is not among the N has no probability


def draw_drafts(
    logits: Tensor,
    lanes: Sequence[Lane],
    *,
    vocab_size: int,
    rounds: Sequence[int],
    drafting: Literal["coupled", "probabilistic", "greedy"],
    top_n: int,
) -> DraftDraws:
    """Draw a draft for every row.

    logits: (L, W) float32, the drafter's own; each of the L lanes has one row. `rounds[i]` is the committed
    length at which lane i's round began: a position that is drafted again is drawn anew.
    """
    processed = process(logits, lanes, vocab_size)
    needs = [lane.sampling.needs_draft_probs for lane in lanes]
    certain = drafting == "greedy"
    tokens = processed.argmax(dim=-1) if certain else choose_tokens(processed, lanes)
    if not any(needs):
        return DraftDraws(tokens, None, None)
    width = min(top_n, processed.shape[1])
    best, ids = processed.topk(width, dim=-1)
    if certain:
        probs = torch.zeros_like(best)
        probs[:, 0] = 1.0
        ids[:, 0] = tokens  # of equal logits argmax and topk may name different ones
        return DraftDraws(tokens, ids, probs)
    heat = torch.tensor([lane.temperature for lane in lanes], device=logits.device)
    probs = (best / heat.unsqueeze(1)).softmax(dim=-1)
    probs = probs / probs.sum(dim=-1, keepdim=True)
    drawn = [row for row, needed in enumerate(needs) if needed]
    at = torch.tensor(drawn, device=logits.device)
    keys = [
        row_key(
            lanes[row].sampling.seed,
            lanes[row].sampling.choice,
            lanes[row].position,
            Purpose.DRAFT,
            rounds[row],
        )
        for row in drawn
    ]
    picked = draw(probs[at].log(), [1.0] * len(drawn), keys)
    tokens = tokens.index_copy(0, at, ids[at].gather(1, picked.unsqueeze(1)).squeeze(1))
    return DraftDraws(tokens, ids, probs)
