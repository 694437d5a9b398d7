"""The rows of a step judged: what each sequence commits, and how much of it were drafts.

    logits → processors → greedy and coupled: the target's token for each row, accept while equal
                        → rejection and block: target_probs against draft_probs, then a draw of what is left

Shapes: L logit rows, S sequences, K drafts of the longest, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.messages import AcceptanceRule, TokenLogprobs
from outrider.sampling.acceptance import Drafts, count_accepted, judge
from outrider.sampling.draft_probs import CheckedProbs
from outrider.sampling.noise import Purpose, draw, row_key, uniform
from outrider.sampling.processors import Lane, process
from outrider.sampling.target import choose_tokens, finite_rows, target_probs

NOT_FINITE = "the model's logits are not finite numbers"
NOTHING_LEFT = "what the request asks of the text leaves no token that could follow"


@dataclass(frozen=True, slots=True)
class Block:
    """One sequence's rows: the lane, and the distributions of its drafts where the rule needs them."""

    lane: Lane
    draft_probs: CheckedProbs | None = None
    logprobs: int | None = None  # report each emitted token's, and so many alternatives


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one sequence's rows gave."""

    tokens: list[int]  # the accepted drafts, then the recovered or bonus token
    accepted: int
    error: str | None  # why a row that counts gave no token; the others count for nothing then
    poisoned: bool  # some row's logits are not finite: a rejected draft may have left a NaN in the cache
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class _Verified:
    """A group's outcome on the device."""

    tokens: Tensor  # (S, K + 1) int64: accepted drafts, then the extra token, then anything
    accepted: Tensor  # (S,) int64


def verify(logits: Tensor, blocks: Sequence[Block], vocab_size: int) -> list[Outcome]:
    """Judge all blocks at once and bring the outcome over in one transfer from the device.

    logits: (L, W) float32, the rows of all lanes one after the other.
    """
    lanes = [block.lane for block in blocks]
    width = max(lane.rows for lane in lanes)
    rows = _row_table(lanes, width, logits.device)
    processed = process(logits, lanes, vocab_size)
    finite = finite_rows(logits[:, :vocab_size])[rows]
    drawable = finite
    if any(lane.grammar is not None or lane.banned_rows for lane in lanes):
        drawable = finite & finite_rows(processed)[rows]  # nothing may be left
    verified = _verify_groups(processed, blocks, rows, drawable)
    # What a rejected draft did to the rows behind it is no fault of the request.
    behind = torch.arange(width, device=logits.device) > verified.accepted.unsqueeze(1)
    checks = [(drawable | behind).all(dim=1), (finite | behind).all(dim=1), finite.all(dim=1)]
    outcome = torch.stack([verified.accepted, *(check.long() for check in checks)], dim=1)
    outcomes = []
    end = 0
    for block, row in zip(blocks, torch.cat([verified.tokens, outcome], dim=1).tolist(), strict=True):
        begin, end = end, end + block.lane.rows
        accepted, drawn, sound, clean = row[width:]
        tokens = row[: accepted + 1]
        error = None if drawn else NOTHING_LEFT if sound else NOT_FINITE
        reported: tuple[TokenLogprobs, ...] = ()
        if block.logprobs is not None and error is None:
            reported = _logprobs(logits[begin : begin + len(tokens), :vocab_size], tokens, block.logprobs)
        outcomes.append(Outcome(tokens, accepted, error, not clean, reported))
    return outcomes


def _row_table(lanes: Sequence[Lane], width: int, device: torch.device) -> Tensor:
    """(S, K + 1): which row each position of a sequence is; short ones repeat their last as padding."""
    counts = torch.tensor([lane.rows for lane in lanes], device=device)
    ends = counts.cumsum(0)
    table = (ends - counts).unsqueeze(1) + torch.arange(width, device=device)
    return table.minimum((ends - 1).unsqueeze(1))


def _verify_groups(processed: Tensor, blocks: Sequence[Block], rows: Tensor, drawable: Tensor) -> _Verified:
    """Every rule's sequences together; nearly always there is one group. drawable: (S, K + 1) bool."""
    ends = list(itertools.accumulate(block.lane.rows for block in blocks))
    groups: dict[AcceptanceRule, list[int]] = {}
    for index, block in enumerate(blocks):
        params = block.lane.sampling
        rule = params.rule if params.needs_draft_probs else AcceptanceRule.COUPLED
        groups.setdefault(rule, []).append(index)
    tokens = torch.empty_like(rows)
    accepted = torch.empty_like(rows[:, 0])
    for rule, members in groups.items():
        at = torch.tensor(members, device=rows.device)
        chosen = [blocks[index] for index in members]
        own = processed
        table = rows
        if len(members) < len(blocks):
            # The group's rows one after the other, as its lanes have them.
            own = torch.cat([processed[ends[i] - blocks[i].lane.rows : ends[i]] for i in members])
            table = _row_table([block.lane for block in chosen], rows.shape[1], rows.device)
        if rule is AcceptanceRule.COUPLED:
            verified = _while_equal(own, chosen, table)
        else:
            verified = _by_ratio(rule, own, chosen, table, drawable[at])
        tokens[at], accepted[at] = verified.tokens, verified.accepted
    return _Verified(tokens, accepted)


def _while_equal(processed: Tensor, blocks: Sequence[Block], rows: Tensor) -> _Verified:
    """Greedy and coupled: the target's own tokens, kept as far as the drafts lead to them."""
    lanes = [block.lane for block in blocks]
    targets = choose_tokens(processed, lanes)[rows]
    drafts, count = _padded_drafts(lanes, rows.shape[1] - 1, rows.device)
    return _Verified(targets, count_accepted(targets, drafts, count))


def _by_ratio(
    rule: AcceptanceRule, processed: Tensor, blocks: Sequence[Block], rows: Tensor, drawable: Tensor
) -> _Verified:
    """Rejection and block. Every number drawn has a key of its own: by purpose, position and round.

    A row that cannot be drawn from ends the draft before it, which biases nothing: whether it can follows
    from the drafts that lead to it. Only if all of them are accepted does its fault become the request's.
    """
    lanes = [block.lane for block in blocks]
    width, device = rows.shape[1] - 1, rows.device
    tokens, count = _padded_drafts(lanes, width, device)
    count = count.minimum(drawable.long().cumprod(dim=1).sum(dim=1))
    drafts = Drafts(tokens, count, *_padded_probs(blocks, width, device))

    def keys(purpose: Purpose, positions: int) -> list[int]:
        return [
            row_key(lane.sampling.seed, lane.sampling.choice, lane.position + i, purpose, lane.position)
            for lane in lanes
            for i in range(positions)
        ]

    uniforms = uniform(keys(Purpose.ACCEPT, width), device).view(len(lanes), width)
    judged = judge(rule, target_probs(processed, lanes)[rows], drafts, uniforms)
    residual_keys = torch.tensor(keys(Purpose.RESIDUAL, width + 1), device=device).view(len(lanes), width + 1)
    accepted = judged.accepted.unsqueeze(1)
    extra = draw(judged.extra_probs.log(), [1.0] * len(lanes), residual_keys.gather(1, accepted).squeeze(1))
    padded = torch.cat([tokens, torch.zeros_like(accepted)], dim=1)
    return _Verified(padded.scatter(1, accepted, extra.unsqueeze(1)), judged.accepted)


def _padded_drafts(lanes: Sequence[Lane], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(S, K) tokens padded with 0, and (S,) how many are real."""
    padded = [list(lane.drafts) + [0] * (width - len(lane.drafts)) for lane in lanes]
    tokens = torch.tensor(padded, dtype=torch.int64, device=device).view(len(lanes), width)
    return tokens, torch.tensor([len(lane.drafts) for lane in lanes], device=device)


def _padded_probs(blocks: Sequence[Block], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(S, K, N) ids and probabilities, padded with token 0 at probability 0."""
    rows = [block.draft_probs for block in blocks]
    most = max((row.ids.shape[1] for row in rows if row is not None), default=1)
    ids = np.zeros((len(blocks), width, most), np.int64)
    probs = np.zeros((len(blocks), width, most), np.float32)
    for index, (block, row) in enumerate(zip(blocks, rows, strict=True)):
        if row is not None:
            used = len(block.lane.drafts)  # the scheduler may have left some out
            ids[index, :used, : row.ids.shape[1]] = row.ids[:used]
            probs[index, :used, : row.ids.shape[1]] = row.probs[:used]
    return torch.from_numpy(ids).to(device), torch.from_numpy(probs).to(device)


def _logprobs(logits: Tensor, tokens: Sequence[int], alternatives: int) -> tuple[TokenLogprobs, ...]:
    """The target's raw log-probabilities of the emitted tokens; logits: (rows, V), one a token."""
    logprobs = logits.log_softmax(dim=-1)
    emitted = logprobs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1)).squeeze(1)
    best = logprobs.topk(min(alternatives, logits.shape[1]), dim=-1)
    return tuple(
        TokenLogprobs(own, tuple(zip(ids, values, strict=True)))
        for own, ids, values in zip(
            emitted.tolist(), best.indices.tolist(), best.values.tolist(), strict=True
        )
    )
