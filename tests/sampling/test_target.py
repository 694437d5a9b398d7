"""Drawing the target's token: greedy, coupled, truncated; against exact distributions."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from outrider.messages import SamplingParams
from outrider.sampling.target import choose_tokens, finite_rows

LOGITS = torch.tensor([1.0, 0.5, 0.0, -0.5, -1.0, 2.0, -3.0, 0.25])
DRAWS = 20_000
CHI_SQUARE_LIMIT = 29.9  # 99.99 % quantile at 7 degrees of freedom


def draw(params: SamplingParams, count: int = DRAWS) -> Counter[int]:
    rows = LOGITS.expand(count, -1)
    return Counter(choose_tokens(rows, [params] * count, range(count), len(LOGITS)).tolist())


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
    together = choose_tokens(rows, [greedy, hot, cut], [10, 11, 12], 8).tolist()
    alone = [
        choose_tokens(LOGITS[None], [params], [position], 8).item()
        for params, position in ((greedy, 10), (hot, 11), (cut, 12))
    ]
    assert together == alone


def test_padding_ids_are_never_drawn() -> None:
    padded = torch.cat([LOGITS, torch.full((4,), 50.0)]).expand(500, -1)
    for params in (SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(top_k=5, seed=1)):
        assert choose_tokens(padded, [params] * 500, range(500), 8).max().item() < 8


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_with_a_number_that_is_none_is_found(bad: float) -> None:
    rows = LOGITS.repeat(3, 1)
    rows[1, 4] = bad
    rows[2] = -math.inf
    assert finite_rows(rows).tolist() == [True, False, False]
