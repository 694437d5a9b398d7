"""The bytes of draft_probs, and which rows of them count."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.messages import AcceptanceRule, DraftProbs, SamplingParams
from outrider.sampling.draft_probs import certain, check, guess, pack

IDS = torch.tensor([[4, 7, 1], [0, 2, 9], [5, 3, 6]])
PROBS = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125], [0.0, 0.5, 0.5]])
DRAFTS = (7, 2, 6)
VOCAB = 10


def packed(ids: torch.Tensor = IDS, probs: torch.Tensor = PROBS) -> DraftProbs:
    return pack(ids, probs)


def test_what_is_packed_is_read_bit_for_bit() -> None:
    checked = check(packed(), DRAFTS, VOCAB)
    assert checked.rows == 3
    assert torch.equal(torch.from_numpy(checked.probs), PROBS)
    assert checked.ids[:2].tolist() == IDS[:2].tolist()


def with_row(row: int, ids: list[int], probs: list[float]) -> DraftProbs:
    changed_ids, changed = IDS.clone(), PROBS.clone()
    changed_ids[row], changed[row] = torch.tensor(ids), torch.tensor(probs)
    return pack(changed_ids, changed)


@pytest.mark.parametrize(
    ("ids", "probs"),
    [
        ([0, 2, 9], [math.nan, 0.75, 0.125]),
        ([0, 2, 9], [math.inf, 0.75, 0.125]),
        ([0, 2, 9], [-0.125, 1.0, 0.125]),
        ([0, 2, 9], [0.125, 0.75, 0.5]),
        ([0, 2, 9], [0.0, 0.0, 0.0]),
        ([0, 2, 10], [0.125, 0.75, 0.125]),
        ([-1, 2, 9], [0.125, 0.75, 0.125]),
        ([2, 2, 9], [0.5, 0.25, 0.25]),
        ([0, 3, 9], [0.125, 0.75, 0.125]),
        ([0, 2, 9], [0.5, 0.0, 0.5]),
    ],
    ids=[
        "nan", "inf", "negative", "too much", "nothing", "no token", "negative id", "twice", "no own draft",
        "own draft impossible",
    ],
)  # fmt: skip
def test_a_bad_row_ends_the_draft_and_keeps_what_is_before_it(ids: list[int], probs: list[float]) -> None:
    assert check(with_row(1, ids, probs), DRAFTS, VOCAB).rows == 1
    assert check(with_row(2, ids, probs), (*DRAFTS[:2], 2), VOCAB).rows == 2


def test_ids_without_a_probability_may_be_anything() -> None:
    assert check(with_row(1, [-5, 2, 99], [0.0, 1.0, 0.0]), DRAFTS, VOCAB).rows == 3
    assert check(with_row(1, [2, 2, 2], [0.0, 1.0, 0.0]), DRAFTS, VOCAB).rows == 3


@pytest.mark.parametrize(
    "given",
    [
        None,
        DraftProbs(0, b"", b""),
        DraftProbs(-3, b"", b""),
        DraftProbs(2**40, b"1234", b"1234"),
        DraftProbs(3, b"", b""),
    ],
)
def test_missing_distributions_leave_no_draft_public_report_10(given: DraftProbs | None) -> None:
    """Public report 10: a missing row was judged by another rule in silence."""
    assert check(given, DRAFTS, VOCAB).rows == 0


def test_half_a_row_is_no_row() -> None:
    whole = packed()
    assert check(replace(whole, probs=whole.probs[:-1]), DRAFTS, VOCAB).rows == 2
    assert check(replace(whole, token_ids=whole.token_ids[:5]), DRAFTS, VOCAB).rows == 0


def test_a_guess_is_certain_of_itself_where_the_rule_asks() -> None:
    ratio = SamplingParams(rule=AcceptanceRule.BLOCK)
    draft = guess((7, 2), ratio)
    checked = check(draft.probs, (7, 2), VOCAB)
    assert (checked.ids.tolist(), checked.probs.tolist()) == ([[7], [2]], [[1.0], [1.0]])
    assert guess((7, 2), SamplingParams()).probs is None
    assert guess((7, 2), replace(ratio, temperature=0)).probs is None
    assert check(certain(()), (), VOCAB).rows == 0


def test_float32_numbers_keep_their_bits() -> None:
    probs = torch.rand(4, 5).softmax(-1)
    shipped = np.frombuffer(pack(torch.arange(20).view(4, 5), probs).probs, "<f4")
    assert torch.equal(torch.from_numpy(shipped.copy()), probs.flatten())


def test_rows_that_are_a_little_off_are_read_as_shares() -> None:
    """Public report 6: who draws from numbers that sum to 0.9995 draws from their shares."""
    off = PROBS * 0.9995
    checked = check(packed(probs=off), DRAFTS, VOCAB)
    assert checked.rows == 3
    assert np.abs(checked.probs.sum(axis=1) - 1).max() < 1e-6
    assert np.allclose(checked.probs, PROBS.numpy(), rtol=1e-6)
    assert check(packed(probs=PROBS * 0.998), DRAFTS, VOCAB).rows == 0
