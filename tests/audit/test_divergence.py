from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from outrider.audit.divergence import Explainer, Recomputed, judge, score_candidates, scores
from outrider.audit.results import Comparison, Divergence, Scored, Status, Verdict, first_difference
from outrider.config import EngineArgs
from outrider.engine.engine import Engine, drive
from outrider.engine.loading import load_engine
from outrider.messages import Limits, Open, Plan, SamplingParams
from outrider.messages import Verdict as StepVerdict

PROMPT = tuple(range(20, 90))


def way(reference: float, found: float, best: float | None = None) -> Scored:
    return Scored("way", reference, found, max(reference, found) if best is None else best, 0)


def test_two_candidates_that_change_places_between_ways_are_a_tie() -> None:
    verdict, deviation, _ = judge([way(1.00, 1.01), way(1.02, 1.00)])
    assert verdict is Verdict.TIE
    assert deviation == pytest.approx(0.03)


def test_ways_that_agree_bit_for_bit_leave_no_tie() -> None:
    verdict, deviation, reason = judge([way(1.0, 1.0 + 1e-7), way(1.0, 1.0 + 1e-7)])
    assert (verdict, deviation) == (Verdict.DEFECT, 0.0)
    assert "one right token" in reason


@pytest.mark.parametrize(
    "scored",
    [
        [way(5.0, 1.0), way(5.1, 1.0)],  # the other loses by more than the ways differ
        [way(5.0, 5.01, best=9.0), way(5.1, 5.0, best=9.0)],  # both lose to a third
        [way(5.0, -math.inf), way(5.1, -math.inf)],  # the other is cut off, whichever way
    ],
)
def test_a_candidate_that_wins_no_way_is_a_defect(scored: list[Scored]) -> None:
    assert judge(scored)[0] is Verdict.DEFECT


def test_a_token_that_only_some_ways_cut_off_is_a_tie() -> None:
    verdict, deviation, _ = judge([way(1.0, -math.inf), way(1.0, 1.2)])
    assert (verdict, deviation) == (Verdict.TIE, math.inf)


def test_another_implementation_may_be_off_by_a_unit_in_the_last_place() -> None:
    scored = [way(18.25, 18.375), way(18.30, 18.375)]
    assert judge(scored)[0] is Verdict.DEFECT
    assert judge(scored, resolution=2.0**-8)[0] is Verdict.TIE
    agreed = [way(18.25, 18.375)] * 2
    assert judge(agreed, resolution=2.0**-8)[0] is Verdict.DEFECT


def test_the_first_difference_of_texts_counts_their_ends() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_a_comparison_is_as_bad_as_its_worst_pair() -> None:
    def compared(*verdicts: Verdict, drafted: int = 1) -> Status:
        parted = tuple(Divergence(0, 0, "a", "b", verdict, "") for verdict in verdicts)
        return Comparison("identity", "x", 5, 100, parted, drafted=drafted, drafts_expected=True).status

    assert compared() is Status.FINE
    assert compared(drafted=0) is Status.NOTHING
    assert compared(Verdict.TIE) is Status.TIES
    assert compared(Verdict.TIE, Verdict.UNDECIDED) is Status.UNDECIDED
    assert compared(Verdict.UNDECIDED, Verdict.DEFECT) is Status.DEFECT


# ---- a real engine


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Engine:
    args = EngineArgs(model=str(tiny_llama), dtype="float32", cpu_kernels="torch", num_kv_blocks=64)
    return load_engine(args)


@pytest.fixture(scope="module")
def explainer(engine: Engine) -> Explainer:
    return Explainer(Recomputed(engine), str)


def text_of(engine: Engine, sampling: SamplingParams, tokens: int) -> list[int]:
    opening = Open("a", 0, PROMPT, (), sampling, Limits(tokens), Plan("a", 0))
    events = drive(engine, [opening])
    return [token for event in events if isinstance(event, StepVerdict) for token in event.tokens]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.1, seed=7),
        SamplingParams(temperature=0.9, top_k=9, top_p=0.9, seed=-3, choice=2, repetition_penalty=1.3),
        SamplingParams(temperature=0.7, min_p=0.01, frequency_penalty=0.8, presence_penalty=0.2, seed=5),
    ],
)
def test_every_way_of_computing_a_position_draws_what_the_engine_drew(
    engine: Engine, explainer: Explainer, sampling: SamplingParams
) -> None:
    text = text_of(engine, sampling, 12)
    for at in (0, 1, 7):
        ways = explainer.recomputed.ways([*PROMPT, *text[:at]], text[at:])
        assert len(ways) == 6
        for logits in ways.values():
            values = scores(logits, sampling, prompt=PROMPT, output=text[:at])
            assert int(values.argmax()) == text[at]


def test_recomputing_leaves_no_block_behind(engine: Engine, explainer: Explainer) -> None:
    free = engine.pool.num_free
    explainer.recomputed.ways(PROMPT, (1, 2, 3))
    assert engine.pool.num_free == free


def test_a_wrong_token_is_a_defect_with_both_candidates_and_their_scores(
    engine: Engine, explainer: Explainer
) -> None:
    sampling = SamplingParams(temperature=1.0, seed=11)
    text = text_of(engine, sampling, 8)
    wrong = [*text[:5], (text[5] + 1) % 300, *text[6:]]
    found = explainer.explain(3, sampling, PROMPT, text, wrong)
    assert found is not None
    assert (found.request, found.position, found.verdict) == (3, 5, Verdict.DEFECT)
    assert found.reference.startswith(f"{text[5]} ")
    assert all(one.best_token == text[5] and one.reference == one.best > one.found for one in found.scores)
    assert explainer.explain(3, sampling, PROMPT, text, text) is None


def test_a_text_that_ends_early_after_equal_tokens_is_a_defect(explainer: Explainer) -> None:
    found = explainer.explain(0, SamplingParams(), PROMPT, (5, 6, 7), (5, 6))
    assert found is not None
    assert (found.verdict, found.found) == (Verdict.DEFECT, "the end")


def test_near_equal_logits_that_another_implementation_turns_round_are_a_tie() -> None:
    one, other = torch.tensor([1.0, 1.001, -5.0]), torch.tensor([1.002, 1.0, -5.0])
    scored = score_candidates(
        {"one": one, "other": other}, SamplingParams(temperature=0.0), (0, 1), prompt=(2,), output=()
    )
    assert judge(scored)[0] is Verdict.TIE
