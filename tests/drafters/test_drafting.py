from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from outrider.contracts import Draft, DraftContext, Drafter
from outrider.messages import (
    AcceptanceRule,
    Close,
    DraftOrder,
    DraftProbs,
    Limits,
    Open,
    Plan,
    Proposal,
    Resync,
    SamplingParams,
)
from outrider.sampling.draft_probs import certain
from outrider.speculation.drafting import DrafterLoop

WAIT_S = 20.0


class LastTokens:
    """Drafts the newest tokens, oldest first: the answer shows what the plugin was given."""

    needs_device = False

    def __init__(self) -> None:
        self.batches: list[list[DraftContext]] = []
        self.forgotten: list[str] = []

    def propose(self, contexts: Sequence[DraftContext]) -> list[Any]:
        self.batches.append(list(contexts))
        return [Draft(tuple(context.tokens[-context.num_tokens :])) for context in contexts]

    def forget(self, sequence: str) -> None:
        self.forgotten.append(sequence)


class Answering(LastTokens):
    """Gives the same answer, valid or not, to every batch."""

    def __init__(self, answer: Callable[[Sequence[DraftContext]], Any]) -> None:
        super().__init__()
        self._answer = answer

    def propose(self, contexts: Sequence[DraftContext]) -> list[Any]:
        answer: list[Any] = self._answer(contexts)
        return answer


class Holding(LastTokens):
    """Holds its first batch until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.release = threading.Event(), threading.Event()

    def propose(self, contexts: Sequence[DraftContext]) -> list[Any]:
        self.entered.set()
        assert self.release.wait(WAIT_S)
        return super().propose(contexts)


class Host:
    """A loop and what it delivered."""

    def __init__(self, drafter: Drafter, *, max_batch: int = 64) -> None:
        self.answers: queue.Queue[Proposal | Resync] = queue.Queue()
        self.loop = DrafterLoop(drafter, self._deliver, max_batch=max_batch)
        self.loop.start()

    def _deliver(self, answers: Sequence[Proposal | Resync]) -> None:
        for answer in answers:
            self.answers.put(answer)

    def next(self) -> Proposal | Resync:
        return self.answers.get(timeout=WAIT_S)

    def proposal(self) -> Proposal:
        answer = self.next()
        assert isinstance(answer, Proposal)
        return answer


@pytest.fixture
def host() -> Iterator[Callable[..., Host]]:
    hosts = []

    def make(drafter: Drafter, *, max_batch: int = 64) -> Host:
        hosts.append(Host(drafter, max_batch=max_batch))
        return hosts[-1]

    yield make
    for made in hosts:
        made.loop.stop(WAIT_S)
        assert not made.loop.alive


def opening(
    sequence: str = "a",
    prompt: tuple[int, ...] = (1, 2, 3),
    committed: tuple[int, ...] = (),
    epoch: int = 0,
    rule: AcceptanceRule = AcceptanceRule.COUPLED,
) -> Open:
    return Open(
        sequence=sequence,
        epoch=epoch,
        prompt=prompt,
        committed=committed,
        sampling=SamplingParams(seed=7, rule=rule),
        limits=Limits(max_tokens=100),
        plan=Plan(sequence, epoch),
    )


def order(
    base_len: int = 3,
    since: tuple[int, ...] = (),
    *,
    sequence: str = "a",
    epoch: int = 0,
    num_tokens: int = 2,
) -> DraftOrder:
    return DraftOrder(sequence, epoch, base_len, since, num_tokens)


def test_order_is_drafted_after_prompt_and_committed_tokens(host: Callable[..., Host]) -> None:
    plugin = LastTokens()
    served = host(plugin)
    served.loop.submit([opening(committed=(4,)), order(4)])
    proposal = served.proposal()
    assert (proposal.sequence, proposal.epoch, proposal.base_len) == ("a", 0, 4)
    assert proposal.tokens == (3, 4)
    assert proposal.draft_time >= 0
    assert proposal.queue_time >= 0
    assert plugin.batches == [[DraftContext("a", (1, 2, 3, 4), 2, SamplingParams(seed=7), prompt_len=3)]]


def test_committed_since_extends_what_is_known(host: Callable[..., Host]) -> None:
    served = host(LastTokens())
    served.loop.submit([opening(), order(3)])
    assert served.proposal().tokens == (2, 3)
    served.loop.submit([order(5, (8, 9))])
    assert served.proposal().tokens == (8, 9)
    served.loop.submit([order(6, (8, 9, 10), num_tokens=6)])  # tells again what was told
    assert served.proposal().tokens == (1, 2, 3, 8, 9, 10)


@pytest.mark.parametrize(
    ("request_", "committed_len"),
    [
        (order(3, sequence="unknown"), 0),
        (order(9, (8, 9)), 3),  # a gap between 3 and 7
        (order(2), 3),  # older than what we have
        (order(4, (2, 7, 8)), 0),  # tells another past: 7 is not 3
        (order(3, epoch=1), 0),  # the opening of that epoch never came
    ],
)
def test_order_on_another_base_is_answered_by_resync(
    host: Callable[..., Host], request_: DraftOrder, committed_len: int
) -> None:
    served = host(LastTokens())
    served.loop.submit([opening(), request_])
    assert served.next() == Resync(request_.sequence, request_.epoch, committed_len)
    assert served.loop.stats.resyncs == 1


def test_resynced_sequence_drafts_again_once_it_is_told_what_it_lacks(host: Callable[..., Host]) -> None:
    served = host(LastTokens())
    served.loop.submit([opening(), order(6, (6,))])
    assert served.next() == Resync("a", 0, committed_len=3)
    served.loop.submit([order(6, (4, 5, 6))])
    assert served.proposal().tokens == (5, 6)


def test_messages_of_an_older_epoch_are_dropped(host: Callable[..., Host]) -> None:
    served = host(LastTokens())
    served.loop.submit(
        [
            opening(epoch=2),
            order(3, epoch=1),
            Close("a", epoch=1),
            opening(prompt=(9,), epoch=1),
            order(3, epoch=2),
        ]
    )
    assert served.proposal().epoch == 2
    assert served.loop.stats.stale == 3
    assert served.loop.running == 1


def test_newer_epoch_starts_over_from_its_opening(host: Callable[..., Host]) -> None:
    served = host(LastTokens())
    served.loop.submit([opening(), order(3), opening(prompt=(5, 6, 7, 8), epoch=1)])
    served.loop.submit([order(4, epoch=1)])
    proposal = served.proposal()  # the first answer: the order of the old epoch is gone
    assert (proposal.epoch, proposal.tokens) == (1, (7, 8))


def test_opening_delivered_twice_changes_nothing(host: Callable[..., Host]) -> None:
    served = host(LastTokens())
    served.loop.submit([opening(), order(5, (4, 5)), opening()])
    assert served.proposal().tokens == (4, 5)


def test_newer_order_supersedes_an_unserved_one(host: Callable[..., Host]) -> None:
    plugin = Holding()
    served = host(plugin)
    served.loop.submit([opening("b"), order(sequence="b")])
    assert plugin.entered.wait(WAIT_S)
    served.loop.submit([opening(), order(3), order(5, (4, 5))])
    plugin.release.set()
    assert [served.proposal().base_len, served.proposal().base_len] == [3, 5]
    assert served.loop.stats.superseded == 1
    assert served.loop.stats.orders == 2


def test_orders_at_hand_share_batches_of_at_most_max_batch(host: Callable[..., Host]) -> None:
    plugin = Holding()
    served = host(plugin, max_batch=3)
    served.loop.submit([opening("first"), order(sequence="first")])
    assert plugin.entered.wait(WAIT_S)
    names = [f"s{number}" for number in range(7)]
    served.loop.submit([opening(name) for name in names] + [order(sequence=name) for name in names])
    plugin.release.set()
    answered = [served.proposal().sequence for _ in range(8)]
    assert answered == ["first", *names]
    assert [len(batch) for batch in plugin.batches] == [1, 3, 3, 1]


def test_closed_sequence_is_forgotten_and_its_order_dropped(host: Callable[..., Host]) -> None:
    plugin = Holding()
    served = host(plugin)
    served.loop.submit([opening("b"), order(sequence="b")])
    assert plugin.entered.wait(WAIT_S)
    served.loop.submit([opening(), order(3), Close("a", 0), Close("never opened", 0)])
    plugin.release.set()
    assert served.proposal().sequence == "b"
    served.loop.submit([order(3)])
    assert served.next() == Resync("a", 0, committed_len=0)
    assert plugin.forgotten == ["a"]
    assert served.loop.running == 1


def test_raising_plugin_costs_drafts_and_is_logged_once(
    host: Callable[..., Host], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(contexts: Sequence[DraftContext]) -> Any:
        raise RuntimeError("out of luck")

    served = host(Answering(fail))
    with caplog.at_level(logging.ERROR, logger="outrider.speculation.drafting"):
        served.loop.submit([opening()])
        for _ in range(3):
            served.loop.submit([order(3)])
            assert served.proposal().tokens == ()
    assert served.loop.stats.errors == 3
    assert [record.getMessage() for record in caplog.records] == ["drafter Answering failed a batch"]
    assert "out of luck" in caplog.text
    served.loop.swap(LastTokens())
    served.loop.submit([order(3)])
    assert served.proposal().tokens == (2, 3)


@pytest.mark.parametrize("answer", [None, [], [Draft(), Draft()], 5])
def test_answer_of_the_wrong_shape_counts_as_an_error(host: Callable[..., Host], answer: Any) -> None:
    served = host(Answering(lambda contexts: answer))
    served.loop.submit([opening(), order(3)])
    assert served.proposal().tokens == ()
    assert served.loop.stats.errors == 1
    assert served.loop.alive


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ([5, 6, 7, 8], (5, 6)),  # two were asked for
        ([5, -1], (5,)),
        ([-1, 5], ()),
        ([5.0, 6], ()),
        (["x"], ()),
        ([5, None], (5,)),
        ([5, 2**40], (5,)),
        (iter(range(10**9)), (0, 1)),
    ],
)
def test_drafts_are_cut_at_the_first_that_is_no_token(
    host: Callable[..., Host], answer: Any, kept: tuple[int, ...]
) -> None:
    """Public report 9: placeholders such as -1 never leave the drafter."""
    served = host(Answering(lambda contexts: [Draft(answer)]))
    served.loop.submit([opening(), order(3)])
    assert served.proposal().tokens == kept
    assert served.loop.stats.invalid == 1
    assert served.loop.stats.errors == 0


@pytest.mark.parametrize("bad", [None, [5, 6], Draft(None), Draft(7)])  # type: ignore[arg-type]
def test_an_answer_that_is_no_draft_costs_its_own_sequence_only(host: Callable[..., Host], bad: Any) -> None:
    served = host(
        Answering(lambda contexts: [bad if one.sequence == "a" else Draft((8,)) for one in contexts])
    )
    served.loop.submit([opening("a"), opening("b"), order(sequence="a"), order(sequence="b")])
    assert {(one.sequence, one.tokens) for one in (served.proposal(), served.proposal())} == {
        ("a", ()),
        ("b", (8,)),
    }
    assert (served.loop.stats.invalid, served.loop.stats.errors) == (1, 0)


@pytest.mark.parametrize(("rule", "shipped"), [(AcceptanceRule.COUPLED, False), (AcceptanceRule.BLOCK, True)])
def test_draft_probs_travel_where_the_rule_needs_them(
    host: Callable[..., Host], rule: AcceptanceRule, shipped: bool
) -> None:
    served = host(Answering(lambda contexts: [Draft((5, 6), certain((5, 6)))]))
    served.loop.submit([opening(rule=rule), order()])
    assert served.proposal().draft_probs == (certain((5, 6)) if shipped else None)


@pytest.mark.parametrize(
    ("draft", "kept"),
    [
        (Draft((5, 6, 7), certain((5, 6, 7))), certain((5, 6))),  # two were asked for
        (Draft((5, -1), certain((5, 9))), certain((5,))),
        (Draft((5, 6), certain((5,))), certain((5,))),  # too few rows: the verifier's to judge
        (Draft((5, 6), None), None),
        (Draft((5, 6), DraftProbs(0, b"", b"")), None),
        (Draft((5, 6), DraftProbs("1", b"", b"")), None),  # type: ignore[arg-type]
        (Draft((5, 6), [[0.5, 0.5]]), None),  # type: ignore[arg-type]
    ],
)
def test_draft_probs_are_cut_with_their_drafts_and_must_be_ones_a_message_can_carry(
    host: Callable[..., Host], draft: Draft, kept: DraftProbs | None
) -> None:
    """Public report 10: what is shipped instead of distributions is none, and never ends the loop."""
    served = host(Answering(lambda contexts: [draft]))
    served.loop.submit([opening(rule=AcceptanceRule.REJECTION), order()])
    assert served.proposal().draft_probs == kept


@pytest.mark.parametrize("answer", [torch.tensor([5, 6]), np.array([5, 6]), (5, 6)])
def test_any_integers_leave_as_plain_ints(host: Callable[..., Host], answer: Any) -> None:
    served = host(Answering(lambda contexts: [Draft(answer)]))
    served.loop.submit([opening(), order(3)])
    tokens = served.proposal().tokens
    assert tokens == (5, 6)
    assert all(type(token) is int for token in tokens)
    assert served.loop.stats.invalid == 0


def test_plugin_that_cannot_forget_does_not_keep_the_sequence_open(host: Callable[..., Host]) -> None:
    class Clinging(LastTokens):
        def forget(self, sequence: str) -> None:
            raise KeyError(sequence)

    served = host(Clinging())
    served.loop.submit([opening(), Close("a", 0), opening("b"), order(sequence="b")])
    assert served.proposal().sequence == "b"
    assert served.loop.running == 1


def test_swap_keeps_sequences_open_and_frees_the_old_plugin(host: Callable[..., Host]) -> None:
    old, new = LastTokens(), LastTokens()
    served = host(old)
    served.loop.submit([opening(), order(3)])
    served.proposal()
    served.loop.swap(new)
    served.loop.submit([order(4, (4,))])
    assert served.proposal().tokens == (3, 4)
    assert old.forgotten == ["a"]
    assert [context.tokens for context in new.batches[0]] == [(1, 2, 3, 4)]


def test_stop_ends_the_thread_and_frees_the_plugin() -> None:
    plugin = LastTokens()
    served = Host(plugin)
    served.loop.submit([opening(), order(3)])
    served.proposal()
    served.loop.stop(WAIT_S)
    assert not served.loop.alive
    assert plugin.forgotten == ["a"]
    assert served.loop.running == 0


def test_stop_returns_although_the_plugin_hangs() -> None:
    plugin = Holding()
    served = Host(plugin)
    served.loop.submit([opening(), order(3)])
    assert plugin.entered.wait(WAIT_S)
    served.loop.stop(0.05)
    assert served.loop.alive
    plugin.release.set()
    served.loop.stop(WAIT_S)
    assert not served.loop.alive


def test_stopping_a_loop_that_never_started_is_no_error() -> None:
    loop = DrafterLoop(LastTokens(), lambda answers: None)
    loop.stop(1.0)
    assert not loop.alive


def test_lost_deliveries_do_not_end_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    delivered = threading.Event()
    calls = []

    def deliver(answers: Sequence[Proposal | Resync]) -> None:
        calls.append(answers)
        if len(calls) == 1:
            raise RuntimeError("Event loop is closed")
        delivered.set()

    loop = DrafterLoop(LastTokens(), deliver)
    loop.start()
    loop.submit([opening(), order(3)])
    deadline = time.monotonic() + WAIT_S
    while not calls and time.monotonic() < deadline:
        time.sleep(0.001)
    loop.submit([order(3)])
    assert delivered.wait(WAIT_S)
    loop.stop(WAIT_S)
    assert "could not be delivered" in caplog.text


def test_many_threads_may_submit(host: Callable[..., Host]) -> None:
    served = host(LastTokens(), max_batch=5)

    def submit(name: str) -> None:
        served.loop.submit([opening(name)])
        served.loop.submit([order(sequence=name)])

    threads = [threading.Thread(target=submit, args=(str(number),)) for number in range(20)]
    for thread in threads:
        thread.start()
    answered = {served.proposal().sequence for _ in threads}
    for thread in threads:
        thread.join(WAIT_S)
    assert answered == {str(number) for number in range(20)}
