"""From processed logits to the target's token at each row, or to its probabilities.

Under the coupled rule the token at a position is `argmax(log probs + noise(seed, choice, position, token))`,
for the target and for a drafter alike; greedy is the same without noise. Shapes: L rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.sampling.noise import draw, row_key
from outrider.sampling.processors import Lane


def finite_rows(logits: Tensor) -> Tensor:
    """(L,) bool: rows whose largest logit is a finite number. A NaN anywhere makes the maximum NaN."""
    return torch.isfinite(logits.amax(dim=-1))


def choose_tokens(processed: Tensor, lanes: Sequence[Lane]) -> Tensor:
    """The token each row draws: (L,) int64, on the logits' device.

    processed: (L, V) float32, what `processors.process` leaves of the lanes' rows.
    """
    rows = [(lane, offset) for lane in lanes for offset in range(lane.rows)]
    sampled = [row for row, (lane, _) in enumerate(rows) if not lane.sampling.greedy]
    if not sampled:
        return processed.argmax(dim=-1)
    temperatures = [rows[row][0].temperature for row in sampled]
    keys = [
        row_key(lane.sampling.seed, lane.sampling.choice, lane.position + offset)
        for lane, offset in (rows[row] for row in sampled)
    ]
    if len(sampled) == len(rows):
        return draw(processed, temperatures, keys)
    at = torch.tensor(sampled, device=processed.device)
    return processed.argmax(dim=-1).index_copy(0, at, draw(processed[at], temperatures, keys))


def target_probs(processed: Tensor, lanes: Sequence[Lane]) -> Tensor:
    """The distribution each row draws from: (L, V) float32; all mass on the likeliest token where greedy."""
    heat = [lane.temperature for lane in lanes for _ in range(lane.rows)]
    temperature = torch.tensor(heat, dtype=torch.float64, device=processed.device)
    probs = (processed.double() / temperature.unsqueeze(1)).softmax(dim=-1).float()
    greedy = [lane.sampling.greedy for lane in lanes for _ in range(lane.rows)]
    if any(greedy):
        certain = torch.zeros_like(probs).scatter_(1, processed.argmax(dim=-1, keepdim=True), 1.0)
        probs = torch.where(torch.tensor(greedy, device=probs.device).unsqueeze(1), certain, probs)
    return probs
