"""The reference schedule without any loop: one message in, these messages out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

from outrider.contracts import Draft, DraftContext
from outrider.generation import GenerationRequest, GenerationStats
from outrider.messages import (
    AcceptanceRule,
    Close,
    DraftOrder,
    FinishReason,
    Limits,
    Open,
    Plan,
    Proposal,
    Resync,
    SamplingParams,
    Verdict,
    VerifyOrder,
)
from outrider.sampling.draft_probs import certain
from outrider.speculation.sequential import (
    MISSED_GATES_ALLOWED,
    PAUSE_TOKENS,
    TIMEOUTS_ALLOWED,
    Committed,
    SequentialRounds,
)

PROMPT = (1, 2, 3)
K = 4
GATE_S = 0.5
GATED = Plan("s", 0, K, GATE_S)
FREE = Plan("s", 0)
GREEDY = SamplingParams(temperature=0.0)
BLOCK = SamplingParams(rule=AcceptanceRule.BLOCK)


class RecordingLeg:
    """Keeps what it is told to send."""

    replica = "recorder"

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def take(self) -> list[Any]:
        """What was sent since the last look."""
        taken, self.sent = self.sent, []
        return taken


class Plugin:
    """An in-process drafter that answers with `answer(context)`."""

    needs_device = False

    def __init__(self, answer: Callable[[DraftContext], Iterable[Any]]) -> None:
        self._answer = answer
        self.contexts: list[tuple[int, ...]] = []
        self.forgotten: list[str] = []

    def propose(self, contexts: Sequence[DraftContext]) -> list[Any]:
        self.contexts += [tuple(context.tokens) for context in contexts]
        return [Draft(self._answer(context)) for context in contexts]  # type: ignore[arg-type]

    def forget(self, sequence: str) -> None:
        self.forgotten.append(sequence)


def make(
    drafter: Plugin | None = None,
    *,
    num_tokens: int = K,
    sampling: SamplingParams = GREEDY,
    prediction: tuple[int, ...] = (),
) -> tuple[SequentialRounds, GenerationStats]:
    stats = GenerationStats()
    request = GenerationRequest(PROMPT, max_tokens=100, sampling=sampling, prediction=prediction)
    rounds = SequentialRounds(
        "s", request, num_tokens=num_tokens, gate_s=GATE_S, drafter=drafter, stats=stats
    )
    return rounds, stats


def opening(committed: tuple[int, ...] = (), epoch: int = 0) -> Open:
    return Open("s", epoch, PROMPT, committed, SamplingParams(), Limits(100), FREE)


def with_drafter(**given: Any) -> tuple[SequentialRounds, GenerationStats, RecordingLeg, RecordingLeg]:
    """Rounds with both legs attached, before the first verdict; what attaching sent is taken."""
    rounds, stats = make(**given)
    verifier, drafter = RecordingLeg(), RecordingLeg()
    rounds.attach_verifier(verifier, rounds.plan)
    rounds.attach_drafter(drafter, opening())
    verifier.take()
    drafter.take()
    return rounds, stats, verifier, drafter


def verdict(base_len: int, *tokens: int, drafted: int = 0, accepted: int = 0, **fields: Any) -> Verdict:
    """A step's verdict; `batch=0` makes it a replay."""
    given = {"epoch": 0, "batch": 1} | fields
    return Verdict("s", base_len=base_len, tokens=tokens, drafted=drafted, accepted=accepted, **given)


def order(base_len: int, *tokens: int, epoch: int = 0) -> VerifyOrder:
    return VerifyOrder("s", epoch, base_len, tokens)


def ask(base_len: int, *committed_since: int, epoch: int = 0) -> DraftOrder:
    return DraftOrder("s", epoch, base_len, committed_since, K)


def close(epoch: int = 0, *, cancelled: bool = False) -> Close:
    return Close("s", epoch, cancelled=cancelled)


# ---- legs


def test_without_a_drafter_a_verdict_is_answered_with_nothing() -> None:
    rounds, _ = make()
    verifier = RecordingLeg()
    assert rounds.plan == FREE
    rounds.attach_verifier(verifier, rounds.plan)
    assert rounds.on_verdict(verdict(3, 4)) == Committed((4,), (False,))
    assert verifier.sent == []


def test_an_attached_drafter_gates_the_verifier_and_is_asked_at_once() -> None:
    rounds, _ = make()
    verifier, drafter = RecordingLeg(), RecordingLeg()
    rounds.attach_verifier(verifier, rounds.plan)
    rounds.on_verdict(verdict(3, 4, 5))
    rounds.attach_drafter(drafter, opening())
    assert verifier.take() == [GATED]
    assert drafter.take() == [ask(5, 4, 5)], "it learns what was committed while it was being leased"


def test_a_plan_that_changed_during_the_lease_is_told_when_the_verifier_is_attached() -> None:
    rounds, _ = make()
    verifier = RecordingLeg()
    opened_with = rounds.plan
    rounds.attach_drafter(RecordingLeg(), opening())
    rounds.attach_verifier(verifier, opened_with)
    assert verifier.take() == [GATED]


def test_a_verdict_that_overtakes_the_verifiers_leg_is_answered_when_it_is_attached() -> None:
    rounds, _ = make(Plugin(lambda context: [7]))
    verifier = RecordingLeg()
    rounds.on_verdict(verdict(3, 4))
    rounds.attach_verifier(verifier, GATED)
    assert verifier.take() == [order(4, 7)]


def test_a_successor_that_has_not_spoken_gets_no_order_before_its_prefill() -> None:
    plugin = Plugin(lambda context: [7])
    rounds, _ = make(plugin)
    rounds.attach_verifier(RecordingLeg(), GATED)
    rounds.on_verdict(verdict(3, 4))
    rounds.detach_verifier()
    successor = RecordingLeg()
    rounds.attach_verifier(successor, rounds.plan)
    assert successor.take() == []
    rounds.on_verdict(verdict(4, 5, epoch=1))
    assert successor.take() == [order(5, 7, epoch=1)]


def test_a_lost_verifier_is_closed_and_its_successor_gets_the_next_epoch() -> None:
    rounds, _, verifier, drafter = with_drafter()
    rounds.on_verdict(verdict(3, 4))
    rounds.detach_verifier()
    assert verifier.take() == [close()]
    assert rounds.plan == Plan("s", 1, K, GATE_S)
    assert rounds.tokens == [1, 2, 3, 4]
    assert not rounds.verifier_spoke
    assert close() not in drafter.sent, "the drafter stays"


def test_a_detached_drafter_is_closed_and_the_sequence_free_runs() -> None:
    rounds, stats, verifier, drafter = with_drafter()
    rounds.detach_drafter("drafter lost: power cut")
    assert drafter.take() == [close()]
    assert verifier.take() == [FREE]
    assert stats.fallback == "drafter lost: power cut"
    assert rounds.draft_epoch == 1


def test_a_new_drafter_ends_the_fallback_and_is_told_what_its_opening_lacked() -> None:
    rounds, stats, verifier, _ = with_drafter()
    rounds.detach_drafter("drafter lost: power cut")
    new_opening = opening(committed=(), epoch=1)
    rounds.on_verdict(verdict(3, 4, 5))
    verifier.take()
    successor = RecordingLeg()
    rounds.attach_drafter(successor, new_opening)
    assert stats.fallback is None
    assert verifier.take() == [GATED]
    assert successor.take() == [ask(5, 4, 5, epoch=1)]


def test_a_leg_of_an_older_epoch_is_freed_and_not_used() -> None:
    rounds, stats, verifier, _ = with_drafter()
    rounds.detach_drafter("drafter lost: power cut")
    rounds.detach_verifier()
    verifier.take()
    late_verifier, late_drafter = RecordingLeg(), RecordingLeg()
    rounds.attach_verifier(late_verifier, FREE)
    rounds.attach_drafter(late_drafter, opening())
    rounds.on_verdict(verdict(3, 4, epoch=1))
    assert late_verifier.take() == [close(cancelled=True)]
    assert late_drafter.take() == [close(cancelled=True)]
    assert stats.fallback == "drafter lost: power cut"


@pytest.mark.parametrize("cancelled", [True, False])
def test_close_frees_both_legs_once(cancelled: bool) -> None:
    rounds, _, verifier, drafter = with_drafter()
    rounds.close(cancelled=cancelled)
    rounds.close(cancelled=True)
    assert verifier.take() == [close(cancelled=cancelled)]
    assert drafter.take() == [close(cancelled=cancelled)]


def test_what_comes_after_close_changes_nothing() -> None:
    rounds, stats, verifier, drafter = with_drafter()
    rounds.on_verdict(verdict(3, 4))
    rounds.close(cancelled=True)
    verifier.take()
    drafter.take()
    assert rounds.on_verdict(verdict(4, 5)) is None
    rounds.on_proposal(Proposal("s", 0, 4, (5,)))
    assert not rounds.on_verifier_resync(Resync("s", 0, 0))
    assert not rounds.on_drafter_resync(Resync("s", 0, 0))
    late = RecordingLeg()
    rounds.attach_drafter(late, opening())
    assert late.take() == [close(cancelled=True)]
    assert verifier.sent == drafter.sent == []
    assert (rounds.tokens, stats.steps, stats.late_proposals) == ([1, 2, 3, 4], 1, 0)


# ---- verdicts


def test_a_verdict_orders_the_next_drafts() -> None:
    rounds, _, verifier, drafter = with_drafter()
    rounds.on_verdict(verdict(3, 4, 5))
    assert drafter.take() == [ask(5, 4, 5)]
    rounds.on_verdict(verdict(5, 6))
    assert drafter.take() == [ask(6, 6)], "it was told of 4 and 5 before"
    assert verifier.take() == []


def test_the_last_verdict_orders_nothing() -> None:
    rounds, _, verifier, drafter = with_drafter()
    committed = rounds.on_verdict(verdict(3, 4, finish=FinishReason.LENGTH))
    assert committed == Committed((4,), (False,))
    assert verifier.sent == drafter.sent == []


def test_accepted_drafts_are_flagged_and_counted() -> None:
    rounds, stats, _, _ = with_drafter()
    rounds.on_verdict(verdict(3, 4))
    committed = rounds.on_verdict(verdict(4, 5, 6, 7, drafted=4, accepted=2))
    assert committed == Committed((5, 6, 7), (True, True, False), rejected=2)
    rounds.on_verdict(verdict(7, 8, drafted=3, accepted=0))
    assert (stats.steps, stats.rounds, stats.draft_tokens, stats.accepted_tokens) == (3, 2, 7, 2)
    assert stats.accepted_per_position == [1, 1]
    assert stats.acceptance_rate == pytest.approx(2 / 7)
    assert stats.mean_acceptance_length == 2.0


def test_a_doubled_verdict_is_nothing_new_and_counts_once() -> None:
    rounds, stats, _, drafter = with_drafter()
    said = verdict(3, 4, 5, drafted=2, accepted=1)
    rounds.on_verdict(said)
    drafter.take()
    assert rounds.on_verdict(said) is None
    assert drafter.sent == []
    assert (stats.steps, stats.draft_tokens, stats.accepted_tokens) == (1, 2, 1)


def test_of_a_replay_only_the_unknown_tail_is_new() -> None:
    rounds, stats, _, drafter = with_drafter()
    rounds.on_verdict(verdict(3, 4))
    drafter.take()
    assert rounds.on_verdict(verdict(3, 4, 5, 6, batch=0)) == Committed((5, 6), (False, False))
    assert drafter.take() == [ask(6, 5, 6)]
    assert stats.steps == 1


def test_accepted_drafts_in_the_known_part_of_a_verdict_do_not_flag_the_tail() -> None:
    rounds, _, _, _ = with_drafter()
    rounds.on_verdict(verdict(3, 4, batch=0))
    committed = rounds.on_verdict(verdict(3, 4, 5, 6, drafted=2, accepted=2))
    assert committed == Committed((5, 6), (True, False))


def test_a_gap_between_verdicts_asks_for_a_replay() -> None:
    rounds, stats, verifier, drafter = with_drafter()
    assert rounds.on_verdict(verdict(5, 6)) is None
    assert verifier.take() == [order(3)]
    assert drafter.sent == []
    assert rounds.on_verdict(verdict(3, 4, 5, 6, batch=0)) == Committed((4, 5, 6), (False,) * 3)
    assert stats.steps == 0, "what the lost verdicts counted is not made up"


def test_a_sign_of_life_is_no_round_and_no_first_word() -> None:
    rounds, stats, verifier, drafter = with_drafter()
    assert rounds.on_verdict(verdict(3, batch=0)) is None
    assert verifier.sent == drafter.sent == []
    assert (stats.steps, rounds.verifier_spoke) == (0, False)


def test_a_sign_of_life_shows_that_a_verdict_was_lost() -> None:
    rounds, _, verifier, _ = with_drafter()
    rounds.on_verdict(verdict(3, 4))
    assert rounds.on_verdict(verdict(6, batch=0)) is None
    assert verifier.take() == [order(4)]


def test_a_verdict_of_an_old_epoch_is_dropped() -> None:
    rounds, stats, _, _ = with_drafter()
    rounds.detach_verifier()
    assert rounds.on_verdict(verdict(3, 99)) is None
    assert rounds.tokens == list(PROMPT)
    assert (stats.steps, rounds.verifier_spoke) == (0, False)


# ---- proposals


def test_a_proposal_becomes_an_order() -> None:
    rounds, stats, verifier, _ = with_drafter()
    rounds.on_verdict(verdict(3, 4))
    rounds.on_proposal(Proposal("s", 0, 4, (5, 6)))
    assert verifier.take() == [order(4, 5, 6)]
    assert stats.late_proposals == 0


def test_an_empty_proposal_lets_the_verifier_go_on_at_once() -> None:
    rounds, _, verifier, _ = with_drafter()
    rounds.on_verdict(verdict(3, 4))
    rounds.on_proposal(Proposal("s", 0, 4, ()))
    assert verifier.take() == [order(4)]


def test_a_late_proposal_is_sent_for_the_verifier_to_rebase_and_counted() -> None:
    rounds, stats, verifier, _ = with_drafter()
    rounds.on_verdict(verdict(3, 4))
    rounds.on_verdict(verdict(4, 5))
    rounds.on_proposal(Proposal("s", 0, 4, (5, 6, 7)))
    assert verifier.take() == [order(4, 5, 6, 7)]
    assert stats.late_proposals == 1


def test_a_proposal_beyond_what_is_committed_is_dropped() -> None:
    rounds, stats, verifier, _ = with_drafter()
    rounds.on_verdict(verdict(3, 4))
    rounds.on_proposal(Proposal("s", 0, 6, (7,)))
    assert verifier.sent == []
    assert stats.late_proposals == 0


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_proposal_of_another_epoch_is_dropped(epoch: int) -> None:
    rounds, _, verifier, _ = with_drafter()
    rounds.detach_drafter("drafter lost")
    rounds.attach_drafter(RecordingLeg(), opening(epoch=1))
    verifier.take()
    rounds.on_proposal(Proposal("s", epoch, 3, (4,)))
    assert verifier.sent == []


# ---- resyncs


@pytest.mark.parametrize(
    ("epoch", "committed_len", "reopen"), [(0, 0, True), (0, 3, True), (0, 4, False), (1, 0, False)]
)
def test_a_verifier_that_has_less_is_opened_anew(epoch: int, committed_len: int, reopen: bool) -> None:
    rounds, _, _, _ = with_drafter()
    rounds.on_verdict(verdict(3, 4))
    assert rounds.on_verifier_resync(Resync("s", epoch, committed_len)) is reopen


def test_a_drafter_that_missed_an_order_is_told_what_it_lacks() -> None:
    rounds, _, _, drafter = with_drafter()
    rounds.on_verdict(verdict(3, 4, 5))
    rounds.on_verdict(verdict(5, 6))
    drafter.take()
    assert not rounds.on_drafter_resync(Resync("s", 0, committed_len=4))
    assert drafter.take() == [ask(6, 5, 6)]


@pytest.mark.parametrize("committed_len", [0, 5])
def test_a_drafter_that_knows_nothing_or_too_much_is_opened_anew(committed_len: int) -> None:
    rounds, _, _, drafter = with_drafter()
    rounds.on_verdict(verdict(3, 4))
    drafter.take()
    assert rounds.on_drafter_resync(Resync("s", 0, committed_len))
    assert drafter.sent == []


def test_a_resync_of_a_drafter_that_was_replaced_is_dropped() -> None:
    rounds, _, _, _ = with_drafter()
    rounds.detach_drafter("drafter lost")
    successor = RecordingLeg()
    rounds.attach_drafter(successor, opening(epoch=1))
    successor.take()
    assert not rounds.on_drafter_resync(Resync("s", 0, 0))
    assert successor.sent == []


# ---- a drafter that is late


def missed_rounds(rounds: SequentialRounds, count: int) -> None:
    for _ in range(count):
        rounds.on_verdict(verdict(len(rounds.tokens), 9))


def test_a_drafter_that_never_answers_is_left_alone_for_a_while_each_time_longer() -> None:
    rounds, stats, verifier, drafter = with_drafter()
    gated = rounds.plan
    for pause in (PAUSE_TOKENS, 2 * PAUSE_TOKENS):
        missed_rounds(rounds, MISSED_GATES_ALLOWED - 1)
        assert stats.fallback is None
        drafter.take()
        verifier.take()
        missed_rounds(rounds, 1)
        assert verifier.take() == [FREE]
        assert stats.fallback == f"drafter late: {MISSED_GATES_ALLOWED} rounds in a row"
        missed_rounds(rounds, pause - 1)
        assert drafter.sent == verifier.sent == []
        missed_rounds(rounds, 1)
        assert verifier.take() == [gated]
        (order,) = drafter.take()
        assert isinstance(order, DraftOrder)
        assert len(order.committed_since) == pause + 1
        assert stats.fallback is None


def test_an_answer_in_time_starts_the_count_of_missed_rounds_anew() -> None:
    rounds, stats, _, _ = with_drafter()
    for _ in range(3):
        missed_rounds(rounds, MISSED_GATES_ALLOWED - 1)
        rounds.on_proposal(Proposal("s", 0, len(rounds.tokens), ()))
        missed_rounds(rounds, 1)  # nothing was drafted, but the drafter had said so
    assert stats.fallback is None


def test_an_answer_to_an_older_order_is_no_answer_in_time() -> None:
    rounds, stats, _, _ = with_drafter()
    for _ in range(MISSED_GATES_ALLOWED):
        base_len = len(rounds.tokens)
        missed_rounds(rounds, 1)
        rounds.on_proposal(Proposal("s", 0, base_len, (4,)))
    assert stats.fallback == f"drafter late: {MISSED_GATES_ALLOWED} rounds in a row"


def test_late_drafts_that_still_count_keep_the_drafter() -> None:
    rounds, stats, _, _ = with_drafter()
    for _ in range(3 * MISSED_GATES_ALLOWED):
        rounds.on_verdict(verdict(len(rounds.tokens), 9, drafted=2))
    assert stats.fallback is None


def test_the_first_verdict_of_a_successor_is_no_missed_round() -> None:
    rounds, stats, _, _ = with_drafter()
    missed_rounds(rounds, MISSED_GATES_ALLOWED - 1)
    rounds.detach_verifier()
    rounds.attach_verifier(RecordingLeg(), rounds.plan)
    rounds.on_verdict(verdict(len(rounds.tokens), 9, epoch=1))
    assert stats.fallback is None


# ---- a drafter in this process


def test_a_drafter_in_this_process_answers_within_the_verdict() -> None:
    plugin = Plugin(lambda context: [len(context.tokens), context.num_tokens])
    rounds, _ = make(plugin)
    verifier = RecordingLeg()
    assert rounds.plan == GATED
    rounds.attach_verifier(verifier, rounds.plan)
    rounds.on_verdict(verdict(3, 4))
    assert verifier.take() == [order(4, 4, K)]
    assert plugin.contexts == [(1, 2, 3, 4)]


@pytest.mark.parametrize("count", [0, 1, K, K + 1, 50])
def test_drafts_beyond_k_are_cut_and_no_others(count: int) -> None:
    drafts = [10**9, *range(-1, count - 2)][:count]  # strange ids are the verifier's to refuse
    rounds, _ = make(Plugin(lambda context: drafts))
    verifier = RecordingLeg()
    rounds.attach_verifier(verifier, rounds.plan)
    rounds.on_verdict(verdict(3, 4))
    assert verifier.take() == [order(4, *drafts[:K])]


def test_drafts_without_an_end_are_cut_too() -> None:
    def forever(context: DraftContext) -> Iterator[int]:
        while True:
            yield 5

    rounds, _ = make(Plugin(forever))
    verifier = RecordingLeg()
    rounds.attach_verifier(verifier, rounds.plan)
    rounds.on_verdict(verdict(3, 4))
    assert verifier.take() == [order(4, 5, 5, 5, 5)]


def fail(context: DraftContext) -> list[int]:
    raise ValueError("a bug")


@pytest.mark.parametrize("answer", [fail, lambda context: ["no number"], lambda context: 7])
def test_a_plugin_that_fails_is_forgotten_and_the_sequence_free_runs(
    answer: Callable[[DraftContext], Iterable[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    plugin = Plugin(answer)
    rounds, stats = make(plugin)
    verifier = RecordingLeg()
    rounds.attach_verifier(verifier, rounds.plan)
    assert rounds.on_verdict(verdict(3, 4)) == Committed((4,), (False,))
    assert verifier.take() == [FREE]
    assert stats.fallback is not None
    assert stats.fallback.startswith("the drafter failed: ")
    assert plugin.forgotten == ["s"]
    rounds.on_verdict(verdict(4, 5))
    assert len(plugin.contexts) == 1
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_closing_forgets_the_sequence_in_the_plugin_once() -> None:
    plugin = Plugin(lambda context: [])
    rounds, _ = make(plugin)
    rounds.close(cancelled=False)
    rounds.close(cancelled=True)
    assert plugin.forgotten == ["s"]


def test_a_plugin_that_cannot_forget_does_not_keep_the_verifier(caplog: pytest.LogCaptureFixture) -> None:
    class Clinging(Plugin):
        def forget(self, sequence: str) -> None:
            raise RuntimeError("never")

    rounds, _ = make(Clinging(lambda context: []))
    verifier = RecordingLeg()
    rounds.attach_verifier(verifier, rounds.plan)
    rounds.close(cancelled=True)
    assert verifier.take() == [close(cancelled=True)]
    assert "could not forget s" in caplog.text


def test_a_plugin_of_older_times_that_answers_with_lists_fails_softly_and_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Older(Plugin):
        def propose(self, contexts: Sequence[DraftContext]) -> list[Any]:
            return [[5, 6] for _ in contexts]

    rounds, stats = make(Older(lambda context: ()))
    verifier = RecordingLeg()
    rounds.attach_verifier(verifier, rounds.plan)
    assert rounds.on_verdict(verdict(3, 4)) == Committed((4,), (False,))
    assert verifier.take() == [FREE]
    assert stats.fallback == "the drafter failed: AttributeError"
    assert "decodes plainly" in caplog.text
    assert "'list' object has no attribute 'tokens'" in caplog.text


def test_a_plugin_is_told_where_the_prompt_ends() -> None:
    lengths: list[int] = []

    def answer(context: DraftContext) -> tuple[int, ...]:
        lengths.append(context.prompt_len)
        return ()

    rounds, _ = make(Plugin(answer))
    rounds.on_verdict(verdict(3, 4))
    rounds.on_verdict(verdict(4, 5))
    assert lengths == [3, 3]


# ---- the ratio rules ------------------------------------------------------------------------------------


def test_distributions_go_with_their_drafts() -> None:
    rounds, _, verifier, _ = with_drafter(sampling=BLOCK)
    rounds.on_verdict(verdict(3, 4))
    rounds.on_proposal(Proposal("s", 0, 4, (5, 6), draft_probs=certain((5, 6))))
    assert verifier.take() == [VerifyOrder("s", 0, 4, (5, 6), draft_probs=certain((5, 6)))]


def test_distributions_of_a_plugin_in_this_process_are_sent_where_the_rule_needs_them() -> None:
    class Certain(Plugin):
        def propose(self, contexts: Sequence[DraftContext]) -> list[Any]:
            return [Draft((5, 6), certain((5, 6))) for _ in contexts]

    for sampling, probs in ((BLOCK, certain((5, 6))), (GREEDY, None)):
        rounds, _ = make(Certain(lambda context: ()), sampling=sampling)
        verifier = RecordingLeg()
        rounds.attach_verifier(verifier, rounds.plan)
        rounds.on_verdict(verdict(3, 4))
        assert verifier.take() == [VerifyOrder("s", 0, 4, (5, 6), draft_probs=probs)]


def test_distributions_that_are_not_packed_cost_the_drafter_and_reach_no_verifier() -> None:
    class Unpacked(Plugin):
        def propose(self, contexts: Sequence[DraftContext]) -> list[Any]:
            return [Draft((5,), [[1.0]]) for _ in contexts]  # type: ignore[arg-type]

    rounds, stats = make(Unpacked(lambda context: ()), sampling=BLOCK)
    verifier = RecordingLeg()
    rounds.attach_verifier(verifier, rounds.plan)
    rounds.on_verdict(verdict(3, 4))
    assert verifier.take() == [FREE]
    assert stats.fallback == "the drafter failed: TypeError"


def test_a_late_proposal_is_dropped_under_a_ratio_rule_and_counted() -> None:
    rounds, stats, verifier, _ = with_drafter(sampling=BLOCK)
    rounds.on_proposal(Proposal("s", 0, 3, ()))
    rounds.on_verdict(verdict(3, 4))
    rounds.on_verdict(verdict(4, 5))
    verifier.take()
    rounds.on_proposal(Proposal("s", 0, 4, (5, 6), draft_probs=certain((5, 6))))
    assert verifier.take() == []
    assert stats.late_proposals == 1


def test_a_silent_drafter_is_lost_under_a_ratio_rule_public_report_39() -> None:
    """Waiting for it again and again would be as slow as it is; leaving it for a while would need a clock."""
    rounds, stats, verifier, drafter = with_drafter(sampling=BLOCK)
    for missed in range(TIMEOUTS_ALLOWED):
        assert stats.fallback is None
        rounds.on_verdict(verdict(3 + missed, 4))
    assert stats.fallback == f"drafter lost: silent for {TIMEOUTS_ALLOWED} x {GATE_S:g} s"
    assert verifier.take() == [FREE]
    assert drafter.take()[-1] == close()
    assert rounds.on_verdict(verdict(5, 6)) is not None
    assert drafter.take() == []


def test_drafts_that_never_were_are_counted_apart() -> None:
    rounds, stats, _, _ = with_drafter()
    rounds.on_verdict(verdict(3, 4, 5, drafted=1, accepted=1, invalid_drafts=3))
    assert (stats.draft_tokens, stats.accepted_tokens, stats.invalid_drafts) == (1, 1, 3)


# ---- the client's prediction ------------------------------------------------------------------------------

PREDICTION = (4, 5, 6, 7, 8, 9)


def test_a_prediction_is_asked_before_the_drafter_and_the_drafter_where_it_is_silent() -> None:
    rounds, stats, verifier, drafter = with_drafter(prediction=PREDICTION)
    drafter.take()
    verifier.take()
    rounds.on_verdict(verdict(3, 4))
    assert verifier.take() == [order(4, 5, 6, 7, 8)]
    assert drafter.take() == []
    committed = rounds.on_verdict(verdict(4, 5, 6, 90, drafted=4, accepted=2))
    assert committed == Committed((5, 6, 90), (True, True, False), predicted=True, rejected=2)
    assert verifier.take() == []
    assert drafter.take() == [ask(7, 4, 5, 6, 90)]
    rounds.on_proposal(Proposal("s", 0, 7, (1,)))
    committed = rounds.on_verdict(verdict(7, 6, 7, drafted=1, accepted=0))
    assert committed == Committed((6, 7), (False, False), predicted=False, rejected=1)
    assert (stats.draft_tokens, stats.predicted_drafts) == (5, 4)
    assert verifier.take() == [order(7, 1), order(9, 8, 9)]


def test_a_prediction_alone_gates_the_sequence_until_it_has_nothing_to_say() -> None:
    rounds, _ = make(prediction=PREDICTION)
    verifier = RecordingLeg()
    assert rounds.plan == GATED
    rounds.attach_verifier(verifier, rounds.plan)
    rounds.on_verdict(verdict(3, 4))
    assert verifier.take() == [order(4, 5, 6, 7, 8)]
    rounds.on_verdict(verdict(4, 90, drafted=4))
    assert verifier.take() == [FREE]
    rounds.on_verdict(verdict(5, 7))
    assert verifier.take() == []
    rounds.on_verdict(verdict(6, 8))
    assert verifier.take() == [GATED, order(7, 9)]


def test_a_prediction_under_a_ratio_rule_is_a_certain_draft() -> None:
    rounds, _ = make(prediction=PREDICTION, sampling=BLOCK)
    verifier = RecordingLeg()
    rounds.attach_verifier(verifier, rounds.plan)
    rounds.on_verdict(verdict(3, 4))
    assert verifier.take() == [VerifyOrder("s", 0, 4, (5, 6, 7, 8), draft_probs=certain((5, 6, 7, 8)))]


def test_a_late_proposal_does_not_push_a_prediction_aside() -> None:
    rounds, stats, verifier, drafter = with_drafter(prediction=PREDICTION)
    rounds.on_verdict(verdict(3, 90))
    assert drafter.take()[-1] == ask(4, 90)
    rounds.on_verdict(verdict(4, 5, 6))
    assert verifier.take() == [order(6, 7, 8, 9)]
    rounds.on_proposal(Proposal("s", 0, 4, (5, 6, 1, 1)))
    assert verifier.take() == []
    assert stats.late_proposals == 1
    committed = rounds.on_verdict(verdict(6, 7, 8, 9, 2, drafted=3, accepted=3))
    assert committed == Committed((7, 8, 9, 2), (True, True, True, False), predicted=True)


def test_a_prediction_whose_order_came_late_is_still_the_predictions() -> None:
    """The verifier rides without it, and verifies its tail in the next round."""
    rounds, stats = make(prediction=PREDICTION)
    verifier = RecordingLeg()
    rounds.attach_verifier(verifier, rounds.plan)
    rounds.on_verdict(verdict(3, 4))
    assert rounds.on_verdict(verdict(4, 5)) == Committed((5,), (False,), predicted=True)
    committed = rounds.on_verdict(verdict(5, 6, 7, 8, 3, drafted=3, accepted=3))
    assert committed == Committed((6, 7, 8, 3), (True, True, True, False), predicted=True)
    assert stats.predicted_drafts == 3


def test_a_successor_of_the_verifier_is_ordered_the_prediction_again() -> None:
    rounds, _ = make(prediction=PREDICTION)
    first, second = RecordingLeg(), RecordingLeg()
    rounds.attach_verifier(first, rounds.plan)
    rounds.on_verdict(verdict(3, 4, 5))
    rounds.detach_verifier()
    assert rounds.plan == Plan("s", 1, K, GATE_S)
    rounds.attach_verifier(second, rounds.plan)
    rounds.on_verdict(verdict(5, 6, epoch=1))
    assert second.take() == [order(6, 7, 8, 9, epoch=1)]
