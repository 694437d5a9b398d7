from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.audit.divergence import Explainer, Position, Recomputed, judge
from outrider.audit.results import Comparison, Divergence, Status, Verdict, first_difference
from outrider.config import EngineArgs
from outrider.engine.engine import Engine, drive
from outrider.engine.loading import load_engine
from outrider.messages import Limits, Open, Plan, SamplingParams
from outrider.messages import Verdict as StepVerdict

PROMPT = tuple(range(20, 90))


GREEDY = Position(SamplingParams(temperature=0.0), (2,), ())


def verdict_of(
    *rows: list[float],
    position: Position = GREEDY,
    candidates: tuple[int, int] = (0, 1),
    resolution: float = 0.0,
) -> Verdict:
    """Of tokens 0 and 1, with the logits of each way."""
    ways = {str(number): torch.tensor(row) for number, row in enumerate(rows)}
    return judge(ways, candidates, position, resolution=resolution)[0]


def test_two_candidates_that_change_places_between_ways_are_a_tie() -> None:
    assert verdict_of([1.00, 1.01, -5.0], [1.02, 1.00, -5.0]) is Verdict.TIE


def test_ways_that_agree_bit_for_bit_leave_no_tie() -> None:
    row = [1.0, 1.0 + 1e-6, -5.0]
    assert verdict_of(row, row) is Verdict.DEFECT


def test_what_all_logits_of_a_way_share_is_no_deviation() -> None:
    assert verdict_of([1.0, 1.5, -4.0], [3.0, 3.5, -2.0]) is Verdict.DEFECT


@pytest.mark.parametrize(
    "rows",
    [
        [[5.0, 1.0, 0.0], [5.1, 1.0, 0.0]],  # the other loses by more than the ways differ
        [[5.0, 5.01, 9.0], [5.1, 5.0, 9.0]],  # both lose to a third
    ],
)
def test_a_candidate_that_wins_no_way_is_a_defect(rows: list[list[float]]) -> None:
    assert verdict_of(*rows) is Verdict.DEFECT


def test_a_rival_at_the_edge_of_a_cut_is_a_tie_and_one_far_from_it_a_defect() -> None:
    """The noise favours token 1; whether it is there at all hangs on min_p."""
    seed = next(
        seed
        for seed in range(1000)
        if int(Position(SamplingParams(seed=seed), (2,), ()).scores(torch.tensor([3.0, 0.7, 0.0])).argmax())
        == 1
    )
    edge = Position(SamplingParams(seed=seed, min_p=0.1), (2,), ())  # log 0.1 = -2.303
    assert verdict_of([3.0, 0.70, 0.0], [3.0, 0.71, 0.0], position=edge) is Verdict.TIE
    far = Position(SamplingParams(seed=seed, min_p=0.05), (2,), ())
    assert verdict_of([3.0, 0.70, 0.0], [3.0, 0.71, 0.0], position=far) is Verdict.DEFECT


def test_another_implementation_may_be_off_by_a_unit_in_the_last_place() -> None:
    rows = [[18.25, 18.375, 0.0], [18.26, 18.375, 0.0]]
    assert verdict_of(*rows) is Verdict.DEFECT
    assert verdict_of(*rows, resolution=2.0**-8) is Verdict.TIE
    assert verdict_of(rows[0], rows[0], resolution=2.0**-8) is Verdict.DEFECT


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
            values = Position(sampling, PROMPT, text[:at]).scores(logits)
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
