"""Drawing the target's token: greedy, coupled, truncated; against exact distributions."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from outrider.messages import SamplingParams
from outrider.sampling.processors import Lane, process
from outrider.sampling.target import choose_tokens, finite_rows, target_probs

LOGITS = torch.tensor([1.0, 0.5, 0.0, -0.5, -1.0, 2.0, -3.0, 0.25])
DRAWS = 20_000
CHI_SQUARE_LIMIT = 29.9  # 99.99 % quantile at 7 degrees of freedom


def tokens(rows: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> list[int]:
    lanes = [Lane(one, position) for one, position in zip(params, positions, strict=True)]
    drawn: list[int] = choose_tokens(process(rows, lanes, len(LOGITS)), lanes).tolist()
    return drawn


def draw(params: SamplingParams, count: int = DRAWS) -> Counter[int]:
    return Counter(tokens(LOGITS.expand(count, -1), [params] * count, list(range(count))))


def chi_square(seen: Counter[int], probs: list[float]) -> float:
    return sum((seen[i] - DRAWS * p) ** 2 / (DRAWS * p) for i, p in enumerate(probs) if p > 0)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_sampled_tokens_follow_the_softmax_at_their_temperature(temperature: float) -> None:
    seen = draw(SamplingParams(temperature=temperature, seed=3))
    assert chi_square(seen, (LOGITS / temperature).softmax(-1).tolist()) < CHI_SQUARE_LIMIT


def test_top_k_keeps_the_k_likeliest_and_renormalises() -> None:
    seen = draw(SamplingParams(top_k=3, seed=4))
    kept = LOGITS.masked_fill(LOGITS < 0.5, -math.inf).softmax(-1).tolist()
    assert set(seen) == {5, 0, 1}
    assert chi_square(seen, kept) < CHI_SQUARE_LIMIT


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    probs = LOGITS.softmax(-1)
    top_two = probs[5] + probs[0]
    assert set(draw(SamplingParams(top_p=top_two.item() - 0.01, seed=5), 2000)) == {5, 0}
    assert set(draw(SamplingParams(top_p=top_two.item() + 0.01, seed=5), 2000)) == {5, 0, 1}
    assert set(draw(SamplingParams(top_p=1e-6, seed=5), 100)) == {5}


def test_min_p_cuts_below_its_share_of_the_likeliest() -> None:
    share = math.exp(0.5 - 2.0)  # what token 1 has of token 5's probability
    assert set(draw(SamplingParams(min_p=share * 0.99, seed=6), 3000)) == {5, 0, 1}
    assert set(draw(SamplingParams(min_p=share * 1.01, seed=6), 3000)) == {5, 0}
    assert set(draw(SamplingParams(min_p=1.0, seed=6), 100)) == {5}


def test_target_probs_are_what_is_drawn_from() -> None:
    sampling = [
        SamplingParams(temperature=0.7, top_k=4),
        SamplingParams(temperature=0.0),
        SamplingParams(top_p=0.8, min_p=0.1, temperature=1.3),
    ]
    lanes = [Lane(params, 3) for params in sampling]
    probs = target_probs(process(LOGITS.expand(3, -1), lanes, len(LOGITS)), lanes)
    assert probs[1].tolist() == [0, 0, 0, 0, 0, 1, 0, 0]
    for row in (0, 2):
        seen = draw(replace(sampling[row], seed=11))
        assert set(seen) == {i for i, p in enumerate(probs[row].tolist()) if p > 0}
        assert chi_square(seen, probs[row].tolist()) < CHI_SQUARE_LIMIT


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-46, 1e-6, 1e-4])
def test_temperatures_next_to_nothing_are_greedy(temperature: float) -> None:
    for params in (SamplingParams(temperature, seed=1), SamplingParams(temperature, top_p=0.9, seed=1)):
        assert set(draw(params, 50)) == {5}


def test_a_row_draws_the_same_whatever_the_rows_beside_it() -> None:
    greedy, hot, cut = (
        SamplingParams(temperature=0.0),
        SamplingParams(seed=8),
        SamplingParams(top_k=4, seed=9),
    )
    rows = LOGITS.expand(3, -1)
    together = tokens(rows, [greedy, hot, cut], [10, 11, 12])
    alone = [
        *tokens(LOGITS[None], [greedy], [10]),
        *tokens(LOGITS[None], [hot], [11]),
        *tokens(LOGITS[None], [cut], [12]),
    ]
    assert together == alone


def test_padding_ids_are_never_drawn() -> None:
    padded = torch.cat([LOGITS, torch.full((4,), 50.0)]).expand(500, -1)
    for params in (SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(top_k=5, seed=1)):
        assert max(tokens(padded, [params] * 500, list(range(500)))) < 8


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_with_a_number_that_is_none_is_found(bad: float) -> None:
    rows = LOGITS.repeat(3, 1)
    rows[1, 4] = bad
    rows[2] = -math.inf
    assert finite_rows(rows).tolist() == [True, False, False]
