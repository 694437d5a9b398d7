"""The noise is a function of its key and the token, the same in C and in torch, and stable across
releases."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.native import library
from outrider.sampling.noise import Purpose, draw, draw_torch, gumbel, row_key, uniform

KEYS = {
    (0, 0, 0, Purpose.TARGET, 0): 2391539541053276776,
    (42, 1, 7, Purpose.TARGET, 0): -8131103827538546915,
    (-1, 0, 100_000, Purpose.DRAFT, 99_996): 7246330089855394098,
    (2**63 - 1, 3, 5, Purpose.ACCEPT, 4): -8864589046335305247,
    (7, 0, 12, Purpose.RESIDUAL, 12): 1523182878208307263,
}
NOISE = [
    "-0x1.2b68a6baf9b09p-1",
    "0x1.23d2e374d8f12p-2",
    "-0x1.578e16cfdac83p+0",
    "-0x1.f340cdb31455fp-4",
    "0x1.142117e618becp+0",
    "0x1.288fa1eae6fc7p-3",
    "0x1.31565930b75a6p+1",
    "0x1.bd3c5687fc73ep-1",
    "0x1.cb05ada2c9d56p-3",
    "0x1.052255c535d2cp+2",
    "-0x1.7c7701886dddbp-2",
    "0x1.eaadf999e4da9p+0",
    "0x1.1b50dd2523b61p-2",
    "0x1.9ee9b55eacf1ep-1",
    "0x1.2764986cd5919p-3",
]
UNIFORMS = [
    "0x1.545d60128154cp-3",
    "0x1.4ae8c6935887ap-2",
    "0x1.d2f9bc5fc55d7p-1",
    "0x1.f76b03b7a7ab3p-1",
    "0x1.dfb47d08bca42p-2",
]


def test_keys_do_not_change_between_releases() -> None:
    assert {parts: row_key(*parts) for parts in KEYS} == KEYS


def test_noise_vectors_are_the_same_bit_for_bit() -> None:
    noise = gumbel(list(KEYS.values()), torch.tensor([0, 1, 49_151]))
    assert [value.hex() for value in noise.flatten().tolist()] == NOISE
    assert [value.hex() for value in uniform(list(KEYS.values())).tolist()] == UNIFORMS


def test_every_part_of_a_key_gives_other_noise() -> None:
    parts = itertools.product((1, 2), (0, 1), (5, 6), Purpose, (0, 5))
    keys = [row_key(*part) for part in parts]
    assert len(set(keys)) == len(keys)
    noise = gumbel(keys, torch.arange(4000))
    correlation = torch.corrcoef(noise)
    off_diagonal = correlation[~torch.eye(len(keys), dtype=torch.bool)]
    assert off_diagonal.abs().max().item() < 0.08  # standard error 0.016, 2,016 pairs


def test_noise_of_a_token_does_not_depend_on_its_neighbours() -> None:
    alone = gumbel([row_key(5, 0, 9)], torch.tensor([1234]))
    beside = gumbel([row_key(5, 0, 8), row_key(5, 0, 9)], torch.arange(2000))
    assert alone[0, 0] == beside[1, 1234]


def test_noise_has_the_gumbel_distribution() -> None:
    noise = gumbel([row_key(1, 0, position) for position in range(50)], torch.arange(4000)).flatten()
    # Mean is Euler's constant, variance pi^2 / 6; 200,000 draws give standard errors of 0.003 and 0.01.
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.015)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.05)


def test_the_written_logarithm_is_the_logarithm() -> None:
    keys = [row_key(3, 0, position) for position in range(2000)]
    u = uniform(keys)
    expected = -torch.log(-torch.log(u))
    assert torch.allclose(gumbel(keys, torch.tensor([0])).flatten(), expected, rtol=1e-13, atol=1e-13)
    assert 0 < u.min().item() < u.max().item() < 1


@st.composite
def rows_to_draw_from(draw_: st.DrawFn) -> tuple[torch.Tensor, list[float], list[int]]:
    """Logits with ties, holes and far outliers; sharp and flat temperatures."""
    rows, vocab = draw_(st.integers(1, 5)), draw_(st.integers(1, 300))
    generator = torch.Generator().manual_seed(draw_(st.integers(0, 2**32)))
    logits = torch.randn(rows, vocab, generator=generator) * draw_(st.sampled_from([0.0, 0.1, 3.0, 40.0]))
    holes = torch.rand(rows, vocab, generator=generator) < draw_(st.sampled_from([0.0, 0.5, 0.98]))
    logits = logits.masked_fill(holes, -math.inf)
    heat = draw_(st.lists(st.sampled_from([1e-5, 0.1, 0.7, 1.0, 2.0]), min_size=rows, max_size=rows))
    seed = draw_(st.integers(-(2**63), 2**63 - 1))
    return logits, heat, [row_key(seed, 0, position) for position in range(rows)]


def by_definition(logits: torch.Tensor, heat: list[float], keys: list[int]) -> list[int]:
    """Noise for every token, then the argmax."""
    scaled = logits.double() / torch.tensor(heat, dtype=torch.float64).unsqueeze(1)
    scores = scaled + gumbel(keys, torch.arange(logits.shape[1]))
    return [0 if row.max() == -math.inf else int((row == row.max()).nonzero()[0]) for row in scores]


@settings(max_examples=150, deadline=None)
@given(rows_to_draw_from())
def test_c_and_torch_draw_what_the_definition_says(case: tuple[torch.Tensor, list[float], list[int]]) -> None:
    expected = by_definition(*case)
    assert draw_torch(*case).tolist() == expected
    assert library.load_draw() is not None, "the tests run where there is a C compiler"
    assert draw(*case).tolist() == expected


def test_large_vocabularies_draw_the_same_in_c_and_torch() -> None:
    logits = torch.randn(6, 152_064, generator=torch.Generator().manual_seed(0)) * 4
    keys = [row_key(9, 0, position) for position in range(6)]
    expected = by_definition(logits, [1.0] * 6, keys)
    assert draw(logits, [1.0] * 6, keys).tolist() == expected
    assert draw_torch(logits, [1.0] * 6, keys).tolist() == expected


def test_rows_of_a_wider_tensor_are_read_where_they_are() -> None:
    wide = torch.randn(4, 700)
    keys = [row_key(2, 0, position) for position in range(4)]
    assert (
        draw(wide[:, :600], [1.0] * 4, keys).tolist() == draw(wide[:, :600].clone(), [1.0] * 4, keys).tolist()
    )
