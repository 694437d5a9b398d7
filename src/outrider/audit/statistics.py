"""The tests that decide: chi-square with pooling, Holm's correction, power, bootstrap. No scipy.

Letters: N draws, p a cell's probability, TV the total variation distance, half the sum of |difference|.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SMALLEST_EXPECTATION = 5.0
"""Cells that expect fewer draws are pooled: the chi-square law is an approximation for large counts."""


def chi_square_tail(statistic: float, freedom: float) -> float:
    """P(chi-square of `freedom` degrees > statistic): the regularised upper incomplete gamma function.

    By its series below freedom / 2 + 1, by Lentz's continued fraction above (Abramowitz and Stegun 6.5.29
    and 6.5.31).
    """
    if statistic <= 0:
        return 1.0
    a, x = freedom / 2, statistic / 2
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        n = a
        while term > total * 1e-16:
            n += 1
            term *= x / n
            total += term
        return max(0.0, 1 - scale * total)
    tiny = 1e-300
    b = x + 1 - a
    c, d = 1 / tiny, 1 / b
    fraction = d
    for i in range(1, 10_000):
        step = -i * (i - a)
        b += 2
        d = 1 / _away_from_zero(step * d + b, tiny)
        c = _away_from_zero(b + step / c, tiny)
        fraction *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return scale * fraction


def _away_from_zero(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny


def chi_square_critical(level: float, freedom: float) -> float:
    """The value that a chi-square exceeds with probability `level`, by bisection."""
    low, high = 0.0, freedom + 10.0
    while chi_square_tail(high, freedom) > level:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if chi_square_tail(middle, freedom) > level else (low, middle)
    return high


def chi_square_power(noncentrality: float, freedom: float, critical: float) -> float:
    """P(noncentral chi-square > critical): chi-squares of more degrees, weighted by a Poisson law.

    Each two degrees more add one term to the tail (Abramowitz and Stegun 26.4.8).
    """
    half, x = noncentrality / 2, critical / 2
    if not half:
        return chi_square_tail(critical, freedom)
    spread = 10 * math.sqrt(half) + 20
    first = max(0, int(half - spread))
    tail = chi_square_tail(critical, freedom + 2 * first)
    total = 0.0
    for j in range(first, int(half + spread)):
        total += math.exp(j * math.log(half) - half - math.lgamma(j + 1)) * tail
        a = freedom / 2 + j
        tail += math.exp(a * math.log(x) - x - math.lgamma(a + 1))
    return min(total, 1.0)


def smallest_tv(draws: int, freedom: int, *, level: float, power: float = 0.99) -> float:
    """The smallest TV, of the pooled cells, that `draws` find with probability `power` whatever its shape.

    A difference d of the cells moves the statistic by N * sum(d^2 / p), which is at least 4 N TV^2 by the
    inequality of Cauchy and Schwarz, and more where the difference sits in small cells.
    """
    critical = chi_square_critical(level, freedom)
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        found = chi_square_power(4 * draws * middle**2, freedom, critical) >= power
        low, high = (low, middle) if found else (middle, high)
    return high


@dataclass(frozen=True, slots=True)
class Fit:
    """One chi-square test of counts against a law."""

    draws: int
    cells: int  # after pooling
    statistic: float
    p_value: float
    impossible: int  # draws that the law gives no probability; one is a defect
    tv: float  # of the pooled cells, as observed; chance alone makes it about sqrt(cells / (8 N))

    @property
    def freedom(self) -> int:
        return max(self.cells - 1, 1)


def goodness_of_fit(counts: npt.ArrayLike, probs: npt.ArrayLike) -> Fit:
    """Pearson's test. counts, probs: (C,), the law sums to 1; cells of small expectation become one.

    Where even that one stays small it joins the smallest of the others.
    """
    observed = np.asarray(counts, dtype=np.float64)
    law = np.asarray(probs, dtype=np.float64)
    draws = float(observed.sum())
    impossible = int(observed[law <= 0].sum())
    if impossible:
        return Fit(int(draws), len(law), math.inf, 0.0, impossible, impossible / draws)
    observed, law = observed[law > 0], law[law > 0] / law.sum()
    expected = draws * law
    small = expected < SMALLEST_EXPECTATION
    if small.any():
        pooled_observed, pooled_expected = observed[small].sum(), expected[small].sum()
        observed, expected = observed[~small], expected[~small]
        if pooled_expected >= SMALLEST_EXPECTATION or not len(expected):
            observed = np.append(observed, pooled_observed)
            expected = np.append(expected, pooled_expected)
        else:
            least = int(expected.argmin())
            observed[least] += pooled_observed
            expected[least] += pooled_expected
    if len(expected) < 2:
        return Fit(int(draws), len(expected), 0.0, 1.0, 0, 0.0)
    statistic = float(((observed - expected) ** 2 / expected).sum())
    tv = float(np.abs(observed - expected).sum() / (2 * draws))
    return Fit(int(draws), len(expected), statistic, chi_square_tail(statistic, len(expected) - 1), 0, tv)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for being several (Holm 1979): below `level` means rejected at that level overall."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [1.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and where it may be."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def bootstrap_mean(
    values: Sequence[float], *, confidence: float, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Percentile bootstrap of a mean (Efron 1979). values: at least one."""
    sample = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means = np.empty(resamples)
    for begin in range(0, resamples, 500):  # 500 resamples at once: memory stays small for any sample
        size = min(500, resamples - begin)
        means[begin : begin + size] = rng.choice(sample, (size, len(sample))).mean(axis=1)
    edge = (1 - confidence) / 2
    low, high = np.quantile(means, [edge, 1 - edge])
    return Interval(float(sample.mean()), float(low), float(high))
