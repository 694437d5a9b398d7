"""The drafter's thread: orders in, one batch for the plugin, proposals out.

A plugin only sees whole token sequences (`DraftContext`). What turns messages into those is here: each
sequence's tokens, its leg's epoch, the newest unserved order. Nothing a plugin does ends the loop: what it
raises or invents costs drafts, and drafts are hints.

The ratio rules are lossless only while no draft is lost for the tokens that were drawn. What loses drafts
here follows from orders alone, before anything is drawn (superseded, stale, resync), or ends a draft at a
token that its own distribution should not hold: a row with an id beyond the vocabulary is a bad one whatever
was drawn from it, so the verifier ends the draft there in any case (`sampling/draft_probs.py`).
"""

from __future__ import annotations

import logging
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.contracts import Draft, DraftContext, Drafter
from outrider.messages import (
    Close,
    DraftOrder,
    DraftProbs,
    Open,
    Proposal,
    Resync,
    SamplingParams,
    ToDrafter,
)

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0  # a bound, not a poll: submit() wakes the thread at once
MAX_TOKEN_ID = 2**31 - 1  # no vocabulary reaches it, and every wire carries it


@dataclass(slots=True)
class DraftingStats:
    """Counted since the loop was made; only the loop's thread writes."""

    batches: int = 0  # calls of the plugin
    orders: int = 0  # served by the plugin
    draft_tokens: int = 0
    superseded: int = 0  # orders that a newer one replaced before they were served
    stale: int = 0  # messages of an older epoch
    resyncs: int = 0  # orders whose base was not ours
    errors: int = 0  # batches that the plugin failed
    invalid: int = 0  # answers cut short: no `Draft`, what is no token, or more than were asked for


@dataclass(slots=True)
class _Sequence:
    """One open sequence: `tokens` is prompt plus committed, as far as the router has told."""

    epoch: int
    tokens: tuple[int, ...]  # a tuple, so that a plugin can neither change it nor see it change
    sampling: SamplingParams
    prompt_len: int


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An order that no batch has taken yet."""

    order: DraftOrder
    since: float  # time.monotonic()


class DrafterLoop:
    """Hosts one plugin on a thread of its own and batches all orders at hand."""

    def __init__(
        self,
        drafter: Drafter,
        deliver: Callable[[Sequence[Proposal | Resync]], None],
        *,
        max_batch: int = 64,
    ) -> None:
        """`deliver` is called on the loop's thread, once a batch; it must not block."""
        self._drafter = drafter
        self._deliver = deliver
        self._max_batch = max_batch
        self._sequences: dict[str, _Sequence] = {}
        self._waiting: dict[str, _Waiting] = {}  # by sequence, longest waiting first
        self._inbox: deque[ToDrafter] = deque()
        self._successor: Drafter | None = None
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="drafter-loop", daemon=True)
        self._complained = False
        self.stats = DraftingStats()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End after the current batch; waits at most `timeout` seconds for it."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def running(self) -> int:
        """Open sequences."""
        return len(self._sequences)

    def submit(self, messages: Sequence[ToDrafter]) -> None:
        """Queue messages, in order; callable from any thread."""
        with self._wake:
            self._inbox.extend(messages)
            self._wake.notify()

    def swap(self, drafter: Drafter) -> None:
        """Draft with another plugin from the next batch on; open sequences stay open."""
        with self._wake:
            self._successor = drafter
            self._wake.notify()

    # The loop's own thread from here on.

    def _run(self) -> None:
        while self._wait_for_work():
            self._take_successor()
            self._take_messages()
            batch = self._next_batch()
            if batch:
                self._hand_out(self._draft(batch))
        for sequence in list(self._sequences):
            self._close(sequence)

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False when stopping."""
        with self._wake:
            while not (self._stopping or self._inbox or self._waiting or self._successor):
                self._wake.wait(IDLE_WAIT_S)
            return not self._stopping

    def _take_successor(self) -> None:
        with self._wake:
            successor, self._successor = self._successor, None
        if successor is not None:
            for sequence in self._sequences:
                self._forget(sequence)
            self._drafter = successor
            self._complained = False

    def _take_messages(self) -> None:
        with self._wake:
            messages, self._inbox = self._inbox, deque()
        now = time.monotonic()
        resyncs = [resync for message in messages if (resync := self._receive(message, now)) is not None]
        if resyncs:
            self.stats.resyncs += len(resyncs)
            self._hand_out(resyncs)

    def _receive(self, message: ToDrafter, now: float) -> Resync | None:
        known = self._sequences.get(message.sequence)
        if known is not None and message.epoch < known.epoch:
            self.stats.stale += 1
            return None
        match message:
            case Open():
                self._open(message, known)
            case Close():
                self._close(message.sequence)
            case DraftOrder():
                return self._enqueue(message, known, now)
        return None

    def _open(self, message: Open, known: _Sequence | None) -> None:
        if known is not None and message.epoch == known.epoch:
            return  # delivered twice: what we know may be further along
        self._sequences[message.sequence] = _Sequence(
            epoch=message.epoch,
            tokens=message.prompt + message.committed,
            sampling=message.sampling,
            prompt_len=len(message.prompt),
        )
        self._waiting.pop(message.sequence, None)

    def _close(self, sequence: str) -> None:
        self._waiting.pop(sequence, None)
        if self._sequences.pop(sequence, None) is not None:
            self._forget(sequence)

    def _enqueue(self, order: DraftOrder, known: _Sequence | None, now: float) -> Resync | None:
        """Bring the sequence to the order's base and let the order wait, or say what we have instead."""
        if known is None or order.epoch != known.epoch:
            return Resync(order.sequence, order.epoch, committed_len=0)
        have = len(known.tokens)
        since = order.base_len - len(order.committed_since)
        if not since <= have <= order.base_len:
            return Resync(order.sequence, order.epoch, committed_len=have)
        overlap = have - since
        if known.tokens[since:] != order.committed_since[:overlap]:
            # Committed tokens never roll back, so one of us holds another sequence: start over.
            self._close(order.sequence)
            return Resync(order.sequence, order.epoch, committed_len=0)
        known.tokens += order.committed_since[overlap:]
        if order.sequence in self._waiting:
            self.stats.superseded += 1
        self._waiting[order.sequence] = _Waiting(order, now)  # a superseded order's place in the queue stays
        return None

    def _next_batch(self) -> list[_Waiting]:
        chosen = list(self._waiting)[: self._max_batch]
        return [self._waiting.pop(sequence) for sequence in chosen]

    def _draft(self, batch: Sequence[_Waiting]) -> list[Proposal]:
        """One call of the plugin; an order gets no drafts where the plugin fails."""
        began = time.monotonic()
        orders = [waiting.order for waiting in batch]
        try:
            drafts = self._ask_plugin(orders)
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything, and its drafts are only hints
            self.stats.errors += 1
            self._complain("failed a batch", error)
            drafts = [Draft() for _ in orders]
        draft_time = time.monotonic() - began
        self.stats.batches += 1
        self.stats.orders += len(orders)
        self.stats.draft_tokens += sum(len(draft.tokens) for draft in drafts)
        return [
            Proposal(
                sequence=waiting.order.sequence,
                epoch=waiting.order.epoch,
                base_len=waiting.order.base_len,
                tokens=draft.tokens,
                draft_time=draft_time,
                queue_time=began - waiting.since,
                draft_probs=draft.probs,
            )
            for waiting, draft in zip(batch, drafts, strict=True)
        ]

    def _ask_plugin(self, orders: Sequence[DraftOrder]) -> list[Draft]:
        contexts = []
        for order in orders:
            known = self._sequences[order.sequence]
            contexts.append(
                DraftContext(
                    order.sequence,
                    known.tokens,
                    order.num_tokens,
                    known.sampling,
                    prompt_len=known.prompt_len,
                )
            )
        answers = self._drafter.propose(contexts)
        if len(answers) != len(contexts):
            raise ValueError(f"{len(answers)} answers to {len(contexts)} contexts")
        return [
            self._valid_prefix(answer, context) for answer, context in zip(answers, contexts, strict=True)
        ]

    def _valid_prefix(self, answer: Any, context: DraftContext) -> Draft:
        """The drafts up to the first that is no token id, `num_tokens` of them at most.

        Of draft_probs, where the rule needs them, the rows of what is left: the verifier judges them.
        """
        if not isinstance(answer, Draft) or not isinstance(answer.tokens, Iterable):
            self.stats.invalid += 1
            return Draft()
        valid: list[int] = []
        for token in answer.tokens:
            token_id = _token_id(token)
            if token_id is None or len(valid) >= context.num_tokens:
                self.stats.invalid += 1
                break
            valid.append(token_id)
        needed = context.sampling.needs_draft_probs
        return Draft(tuple(valid), _first_rows(answer.probs, len(valid)) if needed else None)

    def _forget(self, sequence: str) -> None:
        try:
            self._drafter.forget(sequence)
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything; the sequence is over all the same
            self._complain("could not forget a sequence", error)

    def _hand_out(self, answers: Sequence[Proposal | Resync]) -> None:
        try:
            self._deliver(answers)
        except Exception:  # answers may get lost by contract; a closed event loop must not end the thread
            logger.exception("%d answers of the drafter could not be delivered", len(answers))

    def _complain(self, what: str, error: Exception) -> None:
        """Log a plugin's first failure with its traceback; the rest are only counted."""
        if not self._complained:
            self._complained = True
            logger.error("drafter %s %s", type(self._drafter).__name__, what, exc_info=error)


def _token_id(token: Any) -> int | None:
    """What the plugin said as a plain int, numpy's and torch's integers included; None if it is no token."""
    try:
        token_id = operator.index(token)
    except TypeError:
        return None
    return token_id if 0 <= token_id <= MAX_TOKEN_ID else None


def _first_rows(probs: Any, rows: int) -> DraftProbs | None:
    """The distributions of the first `rows` drafts; None for what no message could carry."""
    match probs:
        case DraftProbs(width=int(width), token_ids=bytes(ids), probs=bytes(shares)) if width > 0:
            return DraftProbs(width, ids[: 4 * width * rows], shares[: 4 * width * rows])
    return None
