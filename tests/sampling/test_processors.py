"""Every processor against a plain loop over rows and tokens, and what a block's rows must agree with."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.messages import SamplingParams
from outrider.sampling import processors
from outrider.sampling.processors import Lane, process

VOCAB = 40


def bitmask(allowed: list[set[int]]) -> Tensor:
    rows = torch.zeros(len(allowed), -(-VOCAB // 32), dtype=torch.int64)
    for row, ids in enumerate(allowed):
        for token in ids:
            rows[row, token // 32] |= 1 << (token % 32)
    return torch.where(rows >= 1 << 31, rows - (1 << 32), rows).int()


def by_hand(row: Tensor, lane: Lane, offset: int) -> list[float]:
    """The definition, one token at a time, in float64."""
    params = lane.sampling
    values = row.double().tolist()[:VOCAB]
    if lane.grammar is not None:
        mask = lane.grammar[offset].tolist()
        values = [v if mask[i // 32] >> (i % 32) & 1 else -math.inf for i, v in enumerate(values)]
    if offset < lane.banned_rows:
        values = [-math.inf if i in lane.banned else v for i, v in enumerate(values)]
    for token, bias in params.logit_bias:
        values[token] += bias
    output = [*lane.output, *lane.drafts[:offset]]
    for token in {*lane.prompt, *output} if params.penalised else set():
        value = values[token]
        values[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token, count in Counter(output).items() if params.penalised else ():
        values[token] -= params.frequency_penalty * count + params.presence_penalty
    if params.greedy:
        return values
    scaled = [v / params.temperature for v in values]
    if params.min_p:
        floor = max(scaled) + math.log(params.min_p)
        values = [v if s >= floor else -math.inf for v, s in zip(values, scaled, strict=True)]
    if params.top_k is not None and params.top_k < VOCAB:
        kth = sorted(values, reverse=True)[params.top_k - 1]
        values = [v if v >= kth else -math.inf for v in values]
    if params.top_p < 1:
        top = max(values)
        mass = [math.exp((v - top) / params.temperature) for v in values]
        before, floor = 0.0, top
        for value, share in sorted(zip(values, mass, strict=True), reverse=True):
            if before < params.top_p * sum(mass):
                floor = value
            before += share
        values = [v if v >= floor else -math.inf for v in values]
    return values


@st.composite
def lanes(draw: st.DrawFn) -> Lane:
    token = st.integers(0, VOCAB - 1)
    drafts = tuple(draw(st.lists(token, max_size=4)))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 1.7])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.35, 0.01])),
        top_k=draw(st.sampled_from([None, 1, 5, 39, 40, 1000])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.4])),
        presence_penalty=draw(st.sampled_from([0.0, -1.5, 2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.5, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        logit_bias=tuple(
            draw(st.dictionaries(token, st.sampled_from([-100.0, 3.0, 100.0]), max_size=3)).items()
        ),
    )
    grammar = None
    if draw(st.booleans()):
        grammar = bitmask([draw(st.sets(token, min_size=1, max_size=30)) for _ in range(1 + len(drafts))])
    banned = tuple(draw(st.sets(token, max_size=2)))
    return Lane(
        params,
        position=7,
        drafts=drafts,
        prompt=draw(st.lists(token, max_size=6)),
        output=draw(st.lists(token, max_size=6)),
        banned=banned,
        banned_rows=draw(st.integers(0, 1 + len(drafts))) if banned and grammar is None else 0,
        grammar=grammar,
    )


@settings(max_examples=200, deadline=None)
@given(st.lists(lanes(), min_size=1, max_size=4), st.integers(0, 2**32))
def test_every_row_is_what_the_definition_says(batch: list[Lane], seed: int) -> None:
    rows = sum(lane.rows for lane in batch)
    logits = torch.randn(rows, VOCAB + 8, generator=torch.Generator().manual_seed(seed)) * 3
    before = logits.clone()
    together = process(logits, batch, VOCAB)
    assert torch.equal(logits, before), "the caller's logits are left alone"
    begin = 0
    for lane in batch:
        for offset in range(lane.rows):
            row, wanted = together[begin + offset], by_hand(logits[begin + offset], lane, offset)
            assert row.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-5)
        alone = process(logits[begin : begin + lane.rows], [lane], VOCAB)
        assert torch.equal(alone, together[begin : begin + lane.rows]), "the company changes no bit"
        begin += lane.rows


@settings(max_examples=100, deadline=None)
@given(lanes(), st.integers(0, 2**32))
def test_a_block_s_rows_are_those_of_plain_decoding_public_report_22(lane: Lane, seed: int) -> None:
    """Public report 22: only the last accepted token of a round entered the counts."""
    logits = torch.randn(lane.rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    block = process(logits, [lane], VOCAB)
    for offset in range(lane.rows):
        plain = replace(
            lane,
            position=lane.position + offset,
            drafts=(),
            output=[*lane.output, *lane.drafts[:offset]],
            banned_rows=min(1, max(0, lane.banned_rows - offset)),
            grammar=None if lane.grammar is None else lane.grammar[offset : offset + 1],
        )
        assert torch.equal(process(logits[offset : offset + 1], [plain], VOCAB)[0], block[offset])


def test_frequency_penalties_of_both_signs_differ_public_report_21() -> None:
    logits = torch.zeros(1, VOCAB)
    for penalty in (-2.0, 2.0):
        lane = Lane(SamplingParams(frequency_penalty=penalty), 3, output=[5, 5, 9])
        row = process(logits, [lane], VOCAB)[0]
        assert (row[5].item(), row[9].item(), row[0].item()) == (-2 * penalty, -penalty, 0.0)


def test_repetition_counts_the_prompt_and_the_other_penalties_do_not_public_report_23() -> None:
    logits = torch.full((1, VOCAB), 2.0)
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    row = process(logits, [Lane(params, 3, prompt=[1], output=[2])], VOCAB)[0]
    assert (row[1].item(), row[2].item(), row[3].item()) == (1.0, 0.25, 2.0)


def test_a_bias_holds_at_every_position_of_a_block_public_report_24() -> None:
    lane = Lane(SamplingParams(temperature=0, logit_bias=((7, -100.0),)), 3, drafts=(1, 2, 3))
    logits = torch.zeros(4, VOCAB)
    logits[:, 7] = 50
    assert (process(logits, [lane], VOCAB).argmax(1) != 7).all()


def test_without_processors_nothing_is_copied() -> None:
    logits = torch.randn(3, VOCAB + 8)
    lanes = [Lane(SamplingParams(seed=1), 3), Lane(SamplingParams(temperature=0, top_p=0.5), 4, drafts=(1,))]
    assert process(logits, lanes, VOCAB).data_ptr() == logits.data_ptr()


def test_a_row_that_is_no_number_does_not_touch_its_neighbours_public_report_8() -> None:
    params = SamplingParams(top_p=0.9, top_k=12, min_p=0.01)
    lanes = [Lane(params, 3), Lane(params, 3)]
    logits = torch.randn(2, VOCAB)
    alone = process(logits[1:], lanes[1:], VOCAB)
    logits[0, 3] = math.nan
    assert torch.equal(process(logits, lanes, VOCAB)[1:], alone)


def test_top_p_is_the_same_however_far_it_must_look(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(1))
    lanes = [Lane(SamplingParams(top_p=p), 3) for p in (0.05, 0.3, 0.6, 0.9, 0.99, 0.9999)]
    looked_far = process(logits, lanes, 5000)
    monkeypatch.setattr(processors, "FIRST_LOOK", 5000)
    assert torch.equal(process(logits, lanes, 5000), looked_far)
    kept = torch.isfinite(looked_far).sum(1).tolist()
    assert kept == sorted(kept)
    assert kept[-1] > 4096, "the last look was at all tokens"
