"""Accepting drafts: a whole batch at once, on the device.

Words, used everywhere: a *draft* token is a drafter's guess; a rule *accepts* the first few of a round's
drafts and *rejects* the next. The target's token at the first rejected position is the *recovered* token;
when every draft was accepted, the target's token after them is the *bonus* token. Each verified block commits
accepted drafts + one recovered or bonus token.

Accepting while equal (greedy: Stern et al. 2018; with shared noise: Daliri et al. 2024, arXiv 2408.07978) is
lossless for any draft: what is emitted is always the target's own token. The two ratio rules emit the drafts
themselves and are lossless for drafts that were drawn from the `draft_probs` they come with, by noise that
the target's own draws know nothing of.

Shapes: S sequences, K drafts (padded), V vocabulary, N tokens that a drafter's distribution lists. The
papers' p is `target_probs`, their q `draft_probs`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.messages import AcceptanceRule


def count_accepted(target_tokens: Tensor, draft_tokens: Tensor, num_drafted: Tensor) -> Tensor:
    """How many leading drafts of each sequence equal what the target draws.

    target_tokens: (S, K + 1) int64, what the target draws at each position; draft_tokens: (S, K) int64,
    padded with anything; num_drafted: (S,) int64, drafts that are real. Returns (S,) int64.
    """
    equal = (draft_tokens == target_tokens[:, : draft_tokens.shape[1]]) & _real(draft_tokens, num_drafted)
    return equal.long().cumprod(dim=1).sum(dim=1)


@dataclass(frozen=True, slots=True)
class Drafts:
    """A batch of drafts with the distributions that they were drawn from."""

    tokens: Tensor  # (S, K) int64, padded with any valid id
    count: Tensor  # (S,) int64, drafts that are real
    ids: Tensor  # (S, K, N) int64, tokens of each distribution, no token twice with a probability
    probs: Tensor  # (S, K, N), of the ids; what is not listed has none


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a ratio rule makes of a batch."""

    accepted: Tensor  # (S,) int64, leading drafts that are kept
    extra_probs: Tensor  # (S, V), what the recovered or bonus token is to be drawn from


def judge(rule: AcceptanceRule, target_probs: Tensor, drafts: Drafts, uniforms: Tensor) -> Judgement:
    """Apply `rejection` or `block`. target_probs: (S, K + 1, V); uniforms: (S, K), one a draft, in [0, 1).

    Rows of `target_probs` behind a sequence's real drafts may hold anything.
    """
    if not drafts.tokens.shape[1]:
        return Judgement(torch.zeros_like(drafts.count), target_probs[:, 0])
    weights = _weights(rule, target_probs, drafts)
    if rule is AcceptanceRule.BLOCK:
        accepted = _accept_block(target_probs, drafts, weights, uniforms)
    else:
        hits = (uniforms < weights[:, 1:]) & _real(drafts.tokens, drafts.count)
        accepted = hits.long().cumprod(dim=1).sum(dim=1)
        weights = torch.ones_like(weights)  # the residual after a rejection is max(p - q, 0)
    return Judgement(accepted, _extra_probs(target_probs, drafts, weights, accepted))


def _weights(rule: AcceptanceRule, target_probs: Tensor, drafts: Drafts) -> Tensor:
    """(S, K + 1) float64, the first 1: what each draft's prefix is worth.

    rejection: min(1, p / q) of the draft alone (Leviathan et al. 2023, arXiv 2211.17192, Algorithm 1; Chen et
    al. 2023, arXiv 2302.01318, Algorithm 2). block: w_i = min(1, w_{i-1} p / q) (Sun et al. 2024,
    arXiv 2403.10444), which is L_i - max(0, L_1, ..., L_i) in logarithms, L the running sum of log(p / q).
    """
    of_draft = drafts.tokens.unsqueeze(2)
    given = torch.where(drafts.ids == of_draft, drafts.probs.double(), 0.0).sum(dim=2)
    wanted = target_probs[:, :-1].gather(2, of_draft).squeeze(2).double()
    ratio = torch.where(given > 0, wanted / given, 0.0)
    if rule is AcceptanceRule.BLOCK:
        walk = ratio.log().cumsum(dim=1)
        weights = (walk - walk.cummax(dim=1).values.clamp(min=0)).exp()
    else:
        weights = ratio.clamp(max=1)
    return torch.nn.functional.pad(weights, (1, 0), value=1.0)


def _accept_block(target_probs: Tensor, drafts: Drafts, weights: Tensor, uniforms: Tensor) -> Tensor:
    """Block verification: the longest prefix i with u_i < h_i; a miss does not end the search. (S,) int64.

    h_i = S_i / (S_i + 1 - w_i) with S_i the sum of max(w_i p - q, 0) over the tokens after prefix i, which is
    w_i less the sum of min(w_i p, q) over the listed ones; h = w at the last draft.
    """
    width = drafts.tokens.shape[1]
    at_ids = target_probs[:, 1:width].gather(2, drafts.ids[:, 1:]).double()
    inner = weights[:, 1:-1]  # w_1 .. w_{K-1}
    overlap = torch.minimum(inner.unsqueeze(2) * at_ids, drafts.probs[:, 1:].double()).sum(dim=2)
    left = (inner - overlap).clamp(min=0)
    room = left + 1 - inner
    inside = torch.where(room > 0, left / room, 1.0)
    thresholds = torch.nn.functional.pad(inside, (0, 1))
    place = torch.arange(1, width + 1, device=uniforms.device)
    last = place == drafts.count.unsqueeze(1)
    thresholds = torch.where(last, weights[:, 1:], thresholds)
    hits = (uniforms < thresholds) & _real(drafts.tokens, drafts.count)
    return (hits * place).amax(dim=1)


def _extra_probs(target_probs: Tensor, drafts: Drafts, weights: Tensor, accepted: Tensor) -> Tensor:
    """(S, V): max(w p - q, 0), renormalised, after a rejection; the target's own after the last draft."""
    sequence = torch.arange(len(accepted), device=accepted.device)
    own = target_probs[sequence, accepted]
    rejected = accepted.clamp(max=drafts.tokens.shape[1] - 1)
    weight = weights[sequence, accepted].to(own.dtype).unsqueeze(1)
    guessed = drafts.probs[sequence, rejected].to(own.dtype)
    residual = (weight * own).scatter_add(1, drafts.ids[sequence, rejected], -guessed).clamp(min=0)
    total = residual.sum(dim=1, keepdim=True)
    # Nothing is left only where both are equal, and then the draft could not be rejected but by rounding.
    residual = torch.where(total > 0, residual / total, own)
    return torch.where((accepted < drafts.count).unsqueeze(1), residual, own)


def _real(tokens: Tensor, count: Tensor) -> Tensor:
    """(S, K) bool: which of the padded drafts are there."""
    return torch.arange(tokens.shape[1], device=tokens.device) < count.unsqueeze(1)
