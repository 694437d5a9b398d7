"""From logits to the token that a distribution draws at a position.

Under the coupled rule the token at a position is `argmax(log probs + noise(seed, position, token))`, for the
target and for a drafter alike; greedy is the same without noise. Shapes: L rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.messages import SamplingParams
from outrider.sampling.noise import gumbel, row_key


def finite_rows(logits: Tensor) -> Tensor:
    """(L,) bool: rows whose largest logit is a finite number. A NaN anywhere makes the maximum NaN."""
    return torch.isfinite(logits.amax(dim=-1))


def choose_tokens(
    logits: Tensor, sampling: Sequence[SamplingParams], positions: Sequence[int], vocab_size: int
) -> Tensor:
    """The token each row draws: (L,) int64, on the logits' device.

    logits: (L, V) float32; `positions[i]` is the absolute index of the token that row i draws; ids from
    `vocab_size` on are padding and are never drawn. Processors in the order users know from transformers
    and vLLM: temperature, top_k, top_p.
    """
    logits = logits[:, :vocab_size]
    chosen = logits.argmax(dim=-1)
    sampled = [row for row, params in enumerate(sampling) if not params.greedy]
    if sampled:
        rows = torch.tensor(sampled, device=logits.device)
        chosen[rows] = _draw(
            logits[rows], [sampling[row] for row in sampled], [positions[row] for row in sampled]
        )
    return chosen


def _draw(logits: Tensor, sampling: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    temperature = torch.tensor(
        [params.temperature for params in sampling], dtype=torch.float64, device=logits.device
    )
    log_weights = logits.double() / temperature.unsqueeze(1)
    keys = [row_key(params.seed, position) for params, position in zip(sampling, positions, strict=True)]
    if all(params.top_k is None and params.top_p >= 1.0 for params in sampling):
        tokens = torch.arange(logits.shape[1], device=logits.device)
        return (log_weights + gumbel(keys, tokens)).argmax(dim=-1)
    kept, tokens = _truncated(log_weights, sampling)
    winner = (kept + gumbel(keys, tokens)).argmax(dim=-1, keepdim=True)
    return tokens.gather(1, winner).squeeze(1)


def _truncated(log_weights: Tensor, sampling: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Sort, and cut by top_k, then by top_p. Returns kept log weights (-inf where cut) and their ids."""
    width = log_weights.shape[1]
    limits = [min(params.top_k or width, width) for params in sampling]
    kept, tokens = log_weights.topk(max(limits), dim=-1)
    rank = torch.arange(kept.shape[1], device=kept.device)
    kept = kept.masked_fill(rank >= torch.tensor(limits, device=kept.device).unsqueeze(1), -math.inf)
    top_p = torch.tensor([params.top_p for params in sampling], dtype=kept.dtype, device=kept.device)
    probs = kept.softmax(dim=-1)
    # A token stays while the mass before it is below top_p: the first one always does.
    before = probs.cumsum(dim=-1) - probs
    return kept.masked_fill((before >= top_p.unsqueeze(1)) & (rank > 0), -math.inf), tokens
