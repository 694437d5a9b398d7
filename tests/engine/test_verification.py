"""What a batch of rows becomes: rules side by side, the law of the ratio rules after every processor, numbers
that are none."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.engine.verification import NOT_FINITE, NOTHING_LEFT, Block, Outcome, verify
from outrider.messages import AcceptanceRule, SamplingParams
from outrider.sampling.draft_probs import CheckedProbs, certain, check, pack
from outrider.sampling.processors import Lane, process
from outrider.sampling.target import target_probs

VOCAB = 8
WIDTH = VOCAB + 3  # the model's head is padded: the last ids are likeliest, and must never be drawn
RATIO_RULES = [AcceptanceRule.REJECTION, AcceptanceRule.BLOCK]


def random_logits(rows: int, generator: torch.Generator) -> Tensor:
    logits = torch.randn(rows, WIDTH, generator=generator) * 2
    logits[:, VOCAB:] = 30
    return logits


def block_of(
    sampling: SamplingParams, drafts: tuple[int, ...], probs: CheckedProbs | None = None, **lane: Any
) -> Block:
    return Block(Lane(sampling, lane.pop("position", 7), drafts, **lane), probs, logprobs=2)


@st.composite
def random_blocks(draw: st.DrawFn) -> Block:
    """A lane of any rule, with sound draft_probs where its rule needs them."""
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
        top_k=draw(st.sampled_from([None, 3])),
        top_p=draw(st.sampled_from([1.0, 0.9])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5])),
        seed=draw(st.integers(0, 2**40)),
        rule=draw(st.sampled_from(list(AcceptanceRule))),
    )
    drafts = tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=5)))
    width = draw(st.integers(1, VOCAB))
    probs = None
    if sampling.needs_draft_probs:
        rows = np.random.default_rng(len(drafts)).dirichlet(np.ones(width), len(drafts)).astype(np.float32)
        ids = np.array([[(token + i) % VOCAB for i in range(width)] for token in drafts], np.int64)
        probs = CheckedProbs(ids.reshape(len(drafts), width), rows.reshape(len(drafts), width))
    return block_of(sampling, drafts, probs, position=draw(st.integers(1, 500)), output=(1, 2, 1))


@settings(max_examples=80, deadline=None)
@given(st.lists(random_blocks(), min_size=1, max_size=6), st.integers(0, 2**32))
def test_a_sequence_is_judged_alike_alone_and_beside_any_others(blocks: list[Block], seed: int) -> None:
    """Public report 11: greedy, coupled, rejection and block in one batch, every one as if it were alone."""
    generator = torch.Generator().manual_seed(seed)
    logits = [random_logits(block.lane.rows, generator) for block in blocks]
    together = verify(torch.cat(logits), blocks, VOCAB)
    alone = [verify(rows, [block], VOCAB)[0] for rows, block in zip(logits, blocks, strict=True)]
    assert together == alone
    for outcome, block in zip(together, blocks, strict=True):
        assert outcome.tokens[: outcome.accepted] == list(block.lane.drafts[: outcome.accepted])
        assert len(outcome.tokens) == outcome.accepted + 1 == len(outcome.logprobs)
        assert max(outcome.tokens) < VOCAB


def test_a_mixed_step_has_one_transfer_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers = []
    for name in ("tolist", "item", "__int__", "__bool__", "numpy"):
        own = getattr(Tensor, name)

        def counted(self: Tensor, *args: Any, _own: Any = own, _name: str = name) -> Any:
            transfers.append(_name)
            return _own(self, *args)

        monkeypatch.setattr(Tensor, name, counted)
    drafts = (1, 2)
    probs = check(certain(drafts), drafts, VOCAB)
    rules = [SamplingParams(temperature=0), *(SamplingParams(seed=3, rule=rule) for rule in AcceptanceRule)]
    blocks = [
        replace(block_of(one, drafts, probs if one.needs_draft_probs else None), logprobs=None)
        for one in rules
    ]
    verify(random_logits(12, torch.Generator().manual_seed(0)), blocks, VOCAB)
    assert transfers == ["tolist"]


# ---- the law

LANES = 5_000
SHAPED = SamplingParams(
    temperature=0.8, top_k=5, top_p=0.95, presence_penalty=0.6, logit_bias=((3, 1.0),), repetition_penalty=1.2
)
PROMPT, OUTPUT = (0, 1), (2,)
MASK = torch.tensor([0b1110_1111], dtype=torch.int32)  # token 4 is not the grammar's


def lane_for(sampling: SamplingParams, drafts: tuple[int, ...]) -> Lane:
    grammar = MASK.expand(1 + len(drafts), 1)
    return Lane(sampling, 3, drafts, PROMPT, OUTPUT, banned=(5,), banned_rows=1, grammar=grammar)


def shares(logits: Tensor, sampling: SamplingParams, before: tuple[int, ...]) -> Tensor:
    """(V,) what is drawn from after `before`, by every processor; logits: (1 + len(before), WIDTH)."""
    lane = lane_for(sampling, before)
    return target_probs(process(logits, [lane], VOCAB), [lane])[-1]


def two_tokens(rule: AcceptanceRule, drafting: str) -> tuple[Tensor, Tensor, float]:
    """How often each pair comes first over many seeds, its law, and the share of drafts accepted.

    Two drafts of a drafter with logits of its own; a text that was cut after one token goes on in a round
    of its own, without drafts. `drafting` says how drafts are drawn, and what is shipped of it.
    """
    generator = torch.Generator().manual_seed(11)
    first, after = random_logits(1, generator), random_logits(VOCAB, generator)
    guess, guess_after = first * 0.6, after * 0.6

    def rows(table: Tensor, head: Tensor, *tokens: int) -> Tensor:
        return torch.cat([head, *(table[token : token + 1] for token in tokens)])

    def guesses(before: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """The draft after `before`: ids, what it is drawn with, and the probabilities that are shipped."""
        raw = rows(guess_after, guess, *before)
        width = {"argmax": 1, "two likeliest": 2}.get(drafting, VOCAB)
        best, ids = shares(raw, SHAPED, before).topk(width)
        best = best / best.sum()
        return ids, best, raw[-1, ids].softmax(-1) if drafting == "before the processors" else best

    tables = {before: guesses(before) for before in ((), *((token,) for token in range(VOCAB)))}
    blocks = []
    for seed in range(LANES):
        drafts: tuple[int, ...] = ()
        for _ in range(2):
            ids, probs, _ = tables[drafts]
            drafts += (int(ids[probs.multinomial(1, generator=generator)]),)
        both = [tables[drafts[:i]] for i in range(2)]
        packed = pack(
            torch.stack([ids for ids, _, _ in both]), torch.stack([shipped for *_, shipped in both])
        )
        sampling = replace(SHAPED, seed=seed, rule=rule)
        blocks.append(Block(lane_for(sampling, drafts), check(packed, drafts, VOCAB)))
    logits = torch.cat([rows(after, first, *block.lane.drafts) for block in blocks])
    outcomes = verify(logits, blocks, VOCAB)
    assert all(outcome.error is None for outcome in outcomes)
    short = [i for i, outcome in enumerate(outcomes) if len(outcome.tokens) < 2]
    again = [continued(blocks[i], outcomes[i]) for i in short]
    more = verify(torch.cat([after[outcomes[i].tokens[0]][None] for i in short]), again, VOCAB)
    pairs = [outcome.tokens[:2] for outcome in outcomes]
    for i, outcome in zip(short, more, strict=True):
        pairs[i] = pairs[i] + outcome.tokens
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for one, two in pairs:
        counts[one, two] += 1
    law = torch.stack(
        [
            shares(first, SHAPED, ())[token].double() * shares(rows(after, first, token), SHAPED, (token,))
            for token in range(VOCAB)
        ]
    )
    return counts, law, sum(outcome.accepted for outcome in outcomes) / (2 * LANES)


def continued(block: Block, outcome: Outcome) -> Block:
    """The next round of a text that has one token more, without drafts."""
    lane = block.lane
    (token,) = outcome.tokens
    return Block(
        replace(lane, position=4, drafts=(), output=(*OUTPUT, token), banned_rows=0, grammar=MASK[None])
    )


def excess(counts: Tensor, law: Tensor) -> float:
    """The chi-square statistic over a bound that the true law exceeds once in about 10,000 runs
    (Wilson-Hilferty); rare cells are pooled."""
    seen, expected = counts.flatten(), law.double().flatten() * counts.sum()
    assert seen[expected == 0].sum() == 0, "what cannot be drawn was drawn"
    often = expected > 8
    seen = torch.cat([seen[often], seen[~often].sum()[None]])
    expected = torch.cat([expected[often], expected[~often].sum()[None]])
    seen, expected = seen[expected > 8], expected[expected > 8]
    freedom = len(expected) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    return float(((seen - expected) ** 2 / expected).sum() / bound)


@pytest.mark.parametrize("drafting", ["draws", "two likeliest", "argmax"])
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_two_tokens_of_a_block_follow_the_target_s_law_after_every_processor(
    rule: AcceptanceRule, drafting: str
) -> None:
    """Public reports 4 to 7: temperature, cuts, penalties, bias, mask and minimum length in both
    distributions, drafts drawn from the likeliest alone, and a certain draft that was no draw."""
    counts, law, accepted = two_tokens(rule, drafting)
    assert excess(counts, law) < 1
    assert 0.1 < accepted < 0.95


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_the_statistic_sees_draft_probs_from_before_the_processors_public_report_4(
    rule: AcceptanceRule,
) -> None:
    """Public report 4 as a negative control: what is shipped is not what was drawn from."""
    counts, law, _ = two_tokens(rule, "before the processors")
    assert excess(counts, law) > 1


def test_a_position_that_is_judged_again_is_drawn_anew() -> None:
    """Noise is keyed by the round as well: position 8 behind a draft at 7, and as the next round's first."""
    logits = torch.zeros(2, WIDTH)
    kept = check(pack(torch.arange(VOCAB)[None], torch.full((1, VOCAB), 1 / VOCAB)), (3,), VOCAB)
    same = 0
    for seed in range(400):
        sampling = SamplingParams(seed=seed, rule=AcceptanceRule.BLOCK)
        (behind,) = verify(logits, [block_of(sampling, (3,), kept, position=7)], VOCAB)
        (anew,) = verify(logits[:1], [block_of(sampling, (), position=8)], VOCAB)
        assert behind.accepted == 1
        same += behind.tokens[1] == anew.tokens[0]
    assert 20 < same < 90  # 50 of 400 where they know nothing of each other


# ---- rows that cannot be drawn from


@pytest.mark.parametrize("rule", [*AcceptanceRule, None])
def test_a_nan_behind_a_draft_that_is_not_taken_is_no_fault_of_the_request_public_report_8(
    rule: AcceptanceRule | None,
) -> None:
    """Public report 8. The target never draws the draft that leads to the row, so no rule may keep it."""
    sampling = SamplingParams(temperature=0) if rule is None else SamplingParams(seed=1, rule=rule)
    for bad in (1, 2, 3):
        logits = random_logits(4, torch.Generator().manual_seed(bad))
        logits[bad] = math.nan
        logits[bad - 1, 6] = -math.inf
        drafts = tuple(6 if i == bad - 1 else int(logits[i, :VOCAB].argmax()) for i in range(3))
        probs = check(certain(drafts), drafts, VOCAB) if sampling.needs_draft_probs else None
        (outcome,) = verify(logits, [block_of(sampling, drafts, probs)], VOCAB)
        assert (outcome.error, outcome.poisoned) == (None, True)
        assert outcome.accepted < bad


@pytest.mark.parametrize("rule", [*AcceptanceRule, None])
def test_a_nan_that_the_text_leads_to_ends_its_request_and_no_other_public_report_8(
    rule: AcceptanceRule | None,
) -> None:
    sampling = SamplingParams(temperature=0) if rule is None else SamplingParams(seed=1, rule=rule)
    logits = random_logits(3, torch.Generator().manual_seed(4))
    logits[0, 2] = 90.0  # the only token that can be drawn
    logits[1, 5] = math.nan
    drafts = (2, 0)
    probs = check(certain(drafts), drafts, VOCAB) if sampling.needs_draft_probs else None
    healthy = random_logits(3, torch.Generator().manual_seed(5))
    blocks = [block_of(sampling, drafts, probs), block_of(sampling, drafts, probs)]
    sick, other = verify(torch.cat([logits, healthy]), blocks, VOCAB)
    assert sick.error == NOT_FINITE
    assert other == verify(healthy, blocks[1:], VOCAB)[0]
    assert other.error is None


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_row_without_a_number_biases_nothing_before_it(rule: AcceptanceRule) -> None:
    """The row behind one of the drafts is a NaN: whatever that draft is, the first token keeps its law."""
    generator = torch.Generator().manual_seed(2)
    target, guess = torch.randn(VOCAB, generator=generator), torch.randn(VOCAB, generator=generator)
    target[4] = -math.inf  # and so the text never gets to the row
    rows = torch.zeros(3, WIDTH)
    rows[0] = torch.cat([target, rows[0, VOCAB:]])
    probs = guess.softmax(-1)
    blocks, logits = [], []
    for seed in range(LANES):
        drafts = tuple(probs.multinomial(2, replacement=True, generator=generator).tolist())
        packed = pack(torch.arange(VOCAB).expand(2, -1), probs.expand(2, -1))
        sampling = SamplingParams(seed=seed, rule=rule)
        blocks.append(Block(Lane(sampling, 7, drafts), check(packed, drafts, VOCAB)))
        logits.append(rows if drafts[0] != 4 else rows.index_fill(0, torch.tensor([1, 2]), math.nan))
    outcomes = verify(torch.cat(logits), blocks, VOCAB)
    assert all(outcome.error is None for outcome in outcomes)
    assert sum(outcome.poisoned for outcome in outcomes) > LANES / 50
    counts = torch.bincount(torch.tensor([outcome.tokens[0] for outcome in outcomes]), minlength=VOCAB)
    assert excess(counts.double(), target.softmax(-1)) < 1


def test_a_request_that_leaves_no_token_ends_with_the_reason_and_no_other() -> None:
    """A grammar whose only continuation is banned, or that no token of the vocabulary can continue."""
    sampling = SamplingParams(seed=1)
    logits = random_logits(4, torch.Generator().manual_seed(3))
    nothing = torch.tensor([[0b1], [0]], dtype=torch.int32)
    blocks = [
        block_of(sampling, (0,), grammar=nothing),
        block_of(sampling, (), banned=(0,), banned_rows=1, grammar=nothing[:1]),
        block_of(sampling, ()),
    ]
    outcomes = verify(logits, blocks, VOCAB)
    assert [outcome.error for outcome in outcomes] == [NOTHING_LEFT, NOTHING_LEFT, None]
