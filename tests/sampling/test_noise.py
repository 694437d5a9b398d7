"""The noise is a function of (seed, position, token), uniform underneath, and stable across releases."""

from __future__ import annotations

import math

import pytest
import torch

from outrider.sampling.noise import gumbel, row_key

VECTOR_KEYS = [-2152535657050944081, 2820384354626331986, -3797418632778236843]
VECTOR_NOISE = [
    -0.23641116871242837,
    0.8509171899612388,
    1.065607319654764,
    -1.0450992271019972,
    1.575137658481384,
    -0.27550164624858164,
    0.5033314750809773,
    -0.6896290207782765,
    -1.589535438913989,
]


def test_noise_vectors_do_not_change_between_releases() -> None:
    keys = [row_key(0, 0), row_key(42, 7), row_key(-1, 100_000)]
    assert keys == VECTOR_KEYS
    noise = gumbel(keys, torch.tensor([0, 1, 49_151]))
    assert noise.flatten().tolist() == pytest.approx(VECTOR_NOISE, rel=1e-12)


def test_noise_of_a_token_does_not_depend_on_its_neighbours() -> None:
    alone = gumbel([row_key(5, 9)], torch.tensor([1234]))
    beside = gumbel([row_key(5, 8), row_key(5, 9)], torch.arange(2000))
    assert alone[0, 0] == beside[1, 1234]


def test_noise_has_the_gumbel_distribution() -> None:
    noise = gumbel([row_key(1, position) for position in range(50)], torch.arange(4000)).flatten()
    # Mean is Euler's constant, variance pi^2 / 6; 200,000 draws give standard errors of 0.003 and 0.01.
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.015)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.05)


def test_neighbouring_positions_and_seeds_draw_independently() -> None:
    noise = gumbel([row_key(1, 0), row_key(1, 1), row_key(2, 0)], torch.arange(20_000))
    correlation = torch.corrcoef(noise)
    off_diagonal = correlation[~torch.eye(3, dtype=torch.bool)]
    assert off_diagonal.abs().max().item() < 0.03  # standard error 0.007
