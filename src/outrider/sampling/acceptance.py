"""Accepting drafts: a whole batch at once, on the device.

Words, used everywhere: a *draft* token is a drafter's guess; it is *accepted* when it equals the token that
the target draws at its position and all drafts before it were accepted, else *rejected*. The target's token
at the first rejected position is the *recovered* token; when every draft was accepted, the target's token
after them is the *bonus* token. Each verified block commits accepted drafts + one recovered or bonus token.

Accepting while equal is lossless for any draft: what is emitted is always the target's own token (greedy:
Stern et al. 2018; with shared Gumbel noise: Daliri et al. 2024, arXiv 2408.07978).
"""

from __future__ import annotations

import torch
from torch import Tensor


def count_accepted(target_tokens: Tensor, draft_tokens: Tensor, num_drafted: Tensor) -> Tensor:
    """How many leading drafts of each sequence are accepted.

    target_tokens: (S, K + 1) int64, what the target draws at each position; draft_tokens: (S, K) int64,
    padded with anything; num_drafted: (S,) int64, drafts that are real. Returns (S,) int64.
    """
    width = draft_tokens.shape[1]
    real = torch.arange(width, device=draft_tokens.device) < num_drafted.unsqueeze(1)
    equal = (draft_tokens == target_tokens[:, :width]) & real
    return equal.long().cumprod(dim=1).sum(dim=1)
