"""Drafts: with the target's own noise under the coupled rule, else drawn from exactly what is shipped."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from outrider.messages import AcceptanceRule, SamplingParams
from outrider.sampling.draft import DraftDraws, draw_drafts
from outrider.sampling.draft_probs import check, pack
from outrider.sampling.processors import Lane, process
from outrider.sampling.target import choose_tokens

VOCAB = 50
LOGITS = torch.randn(VOCAB + 6, generator=torch.Generator().manual_seed(3)) * 2
RATIO_RULES = [AcceptanceRule.REJECTION, AcceptanceRule.BLOCK]


def drafts(lanes: list[Lane], drafting: str = "probabilistic", top_n: int = 8, round: int = 0) -> DraftDraws:
    return draw_drafts(
        LOGITS.expand(len(lanes), -1),
        lanes,
        vocab_size=VOCAB,
        rounds=[round] * len(lanes),
        drafting=drafting,  # type: ignore[arg-type]
        top_n=top_n,
    )


def test_coupled_drafts_are_the_target_s_tokens_where_both_have_the_same_logits() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=5)
    lanes = [Lane(params, position) for position in range(200)]
    drawn = drafts(lanes, "coupled")
    target = choose_tokens(process(LOGITS.expand(200, -1), lanes, VOCAB), lanes)
    assert torch.equal(drawn.tokens, target)
    assert drawn.ids is None
    assert drawn.probs is None


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_drafts_follow_the_distribution_they_are_shipped_with(rule: AcceptanceRule) -> None:
    params = SamplingParams(temperature=1.2, seed=7, rule=rule)
    count = 20_000
    drawn = drafts([Lane(params, position) for position in range(count)])
    assert drawn.ids is not None
    assert drawn.probs is not None
    best, ids = (LOGITS[:VOCAB] / 1.2).topk(8)
    assert drawn.ids[0].tolist() == ids.tolist()
    assert drawn.probs[0].tolist() == pytest.approx(best.softmax(-1).tolist(), rel=1e-5)
    seen = Counter(drawn.tokens.tolist())
    expected = {i: count * p for i, p in zip(ids.tolist(), drawn.probs[0].tolist(), strict=True)}
    assert set(seen) <= set(expected)
    chi_square = sum((seen[i] - e) ** 2 / e for i, e in expected.items())
    assert chi_square < 29.9  # 99.99 % quantile at 7 degrees of freedom


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize("drafting", ["coupled", "probabilistic", "greedy"])
def test_what_is_shipped_passes_the_verifier_s_check(rule: AcceptanceRule, drafting: str) -> None:
    cut = SamplingParams(temperature=0.6, top_k=3, top_p=0.8, seed=1, rule=rule)
    drawn = drafts([Lane(cut, position) for position in range(64)], drafting)
    assert drawn.ids is not None
    assert drawn.probs is not None
    assert drawn.probs.dtype == torch.float32
    assert check(pack(drawn.ids, drawn.probs), drawn.tokens.tolist(), VOCAB).rows == 64


def test_drafts_of_ratio_rules_know_nothing_of_the_target_s_noise_and_rounds_draw_anew() -> None:
    params = SamplingParams(seed=9, rule=AcceptanceRule.BLOCK)
    lanes = [Lane(params, position) for position in range(400)]
    target = choose_tokens(process(LOGITS.expand(400, -1), lanes, VOCAB), lanes)
    first, again, later = (drafts(lanes, top_n=VOCAB, round=round) for round in (3, 3, 4))
    assert torch.equal(first.tokens, again.tokens)
    chance = LOGITS[:VOCAB].softmax(-1).square().sum().item()  # two independent draws agree
    spread = 4.5 * math.sqrt(chance * (1 - chance) / 400)
    for other in (target, later.tokens):
        agreed = (first.tokens == other).double().mean().item()
        assert abs(agreed - chance) < spread


@pytest.mark.parametrize("drafting", ["coupled", "probabilistic", "greedy"])
def test_greedy_requests_draft_the_likeliest_token(drafting: str) -> None:
    lanes = [Lane(SamplingParams(temperature=0, rule=rule), 4) for rule in AcceptanceRule]
    drawn = drafts(lanes, drafting)
    assert drawn.tokens.tolist() == [int(LOGITS[:VOCAB].argmax())] * len(lanes)
    assert drawn.ids is None


def test_greedy_drafting_is_certain_of_the_lowest_of_equal_tokens() -> None:
    lanes = [Lane(SamplingParams(seed=2, rule=AcceptanceRule.REJECTION), 4)]
    level = torch.zeros(1, VOCAB)
    drawn = draw_drafts(level, lanes, vocab_size=VOCAB, rounds=[0], drafting="greedy", top_n=4)
    assert drawn.tokens.tolist() == [0]
    assert drawn.ids is not None
    assert drawn.probs is not None
    assert check(pack(drawn.ids, drawn.probs), [0], VOCAB).rows == 1
    assert drawn.probs.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_a_lane_drafts_the_same_whatever_lanes_are_beside_it() -> None:
    base = SamplingParams(seed=4, temperature=0.9)
    kinds = [
        base,
        replace(base, temperature=0.0),
        replace(base, rule=AcceptanceRule.BLOCK),
        replace(base, rule=AcceptanceRule.REJECTION, top_k=5, logit_bias=((7, -100.0),)),
    ]
    together = drafts([Lane(kind, 30 + i) for i, kind in enumerate(kinds)])
    for i, kind in enumerate(kinds):
        alone = drafts([Lane(kind, 30 + i)])
        assert alone.tokens[0] == together.tokens[i]
        if kind.needs_draft_probs:
            assert alone.probs is not None
            assert together.probs is not None
            assert torch.equal(alone.probs[0], together.probs[i])
