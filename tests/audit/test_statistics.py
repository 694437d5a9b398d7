from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.audit.statistics import (
    bootstrap_mean,
    chi_square_critical,
    chi_square_power,
    chi_square_tail,
    goodness_of_fit,
    holm,
    smallest_tv,
)


@pytest.mark.parametrize(
    ("statistic", "freedom", "tail"),
    [  # published tables
        (3.841458820694124, 1, 0.05),
        (6.634896601021213, 1, 0.01),
        (18.307038053275146, 10, 0.05),
        (29.58829844507442, 10, 0.001),
        (124.34211340400408, 100, 0.05),
        (0.0, 5, 1.0),
    ],
)
def test_the_tail_of_chi_square_is_that_of_the_tables(statistic: float, freedom: int, tail: float) -> None:
    assert chi_square_tail(statistic, freedom) == pytest.approx(tail, rel=1e-9)


@given(st.floats(1e-6, 500), st.integers(1, 200))
def test_for_two_degrees_the_tail_is_an_exponential_and_it_only_falls(statistic: float, freedom: int) -> None:
    assert chi_square_tail(statistic, 2) == pytest.approx(math.exp(-statistic / 2), rel=1e-9)
    assert 0 <= chi_square_tail(statistic * 1.01, freedom) <= chi_square_tail(statistic, freedom) <= 1


@pytest.mark.parametrize("freedom", [1, 3, 40])
def test_the_critical_value_is_where_the_tail_has_the_level(freedom: int) -> None:
    assert chi_square_tail(chi_square_critical(0.001, freedom), freedom) == pytest.approx(0.001)


def test_power_without_any_difference_is_the_level_and_grows_with_it() -> None:
    critical = chi_square_critical(0.01, 5)
    assert chi_square_power(0.0, 5, critical) == pytest.approx(0.01)
    powers = [chi_square_power(n, 5, critical) for n in (1, 10, 40, 100)]
    assert powers == sorted(powers)
    assert powers[-1] > 0.999


@pytest.mark.parametrize("probs", [[0.5, 0.5], [0.1, 0.2, 0.3, 0.4]])
def test_the_smallest_tv_is_found_as_often_as_promised(probs: list[float]) -> None:
    draws, level = 20_000, 0.001
    tv = smallest_tv(draws, len(probs) - 1, level=level)
    # The hardest shape: a difference in proportion to the law, up in one half of it and down in the other.
    law = np.array(probs)
    sign = np.where(np.cumsum(law) <= 0.5 + 1e-9, 1.0, -1.0)
    biased = law + tv * np.where(sign > 0, law / law[sign > 0].sum(), -law / law[sign < 0].sum())
    rng = np.random.default_rng(0)
    found = [goodness_of_fit(rng.multinomial(draws, biased), law).p_value < level for _ in range(400)]
    assert sum(found) >= 0.97 * 400


def test_p_values_of_true_draws_are_even() -> None:
    law = np.array([0.4, 0.3, 0.2, 0.06, 0.03, 0.005, 0.004, 0.001])
    rng = np.random.default_rng(1)
    values = [goodness_of_fit(rng.multinomial(1000, law), law).p_value for _ in range(2000)]
    for level in (0.01, 0.1, 0.5, 0.9):
        assert np.mean(np.array(values) < level) == pytest.approx(level, abs=0.03)


def test_small_cells_are_pooled_and_their_draws_stay_counted() -> None:
    fit = goodness_of_fit([90, 4, 3, 3], [0.9, 0.04, 0.03, 0.03])
    assert (fit.cells, fit.statistic, fit.draws) == (2, 0.0, 100)


def test_a_pool_that_stays_small_joins_the_smallest_cell() -> None:
    assert goodness_of_fit([60, 39, 1], [0.6, 0.39, 0.01]).cells == 2


def test_a_draw_that_cannot_be_is_a_misfit_however_rare() -> None:
    fit = goodness_of_fit([5000, 5000, 1], [0.5, 0.5, 0.0])
    assert (fit.p_value, fit.impossible) == (0.0, 1)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=5, max_size=30))
def test_a_bootstrap_interval_holds_its_mean_and_stays_inside_the_sample(values: list[float]) -> None:
    interval = bootstrap_mean(values, confidence=0.99, resamples=1000)
    assert min(values) - 1e-9 <= interval.low <= interval.mean + 1e-9
    assert interval.mean - 1e-9 <= interval.high <= max(values) + 1e-9


def test_a_bootstrap_interval_tells_a_shift_from_none() -> None:
    noise = np.random.default_rng(2).normal(size=200).tolist()
    assert not bootstrap_mean(noise, confidence=0.99).excludes_zero
    assert bootstrap_mean([one + 1 for one in noise], confidence=0.99).excludes_zero
