"""The verifier's engine: messages in, one step at a time, verdicts out. It owns the committed tokens.

No threads and no clock of its own: `loop.VerifierLoop` drives it, and so can a test.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from outrider.engine.blocks import BlockPool, chain_digest
from outrider.engine.model import Batch, CausalModel, Span
from outrider.engine.scheduler import Scheduler, Work
from outrider.engine.sequence import Sequence
from outrider.engine.verification import verify
from outrider.grammar import GrammarCompiler
from outrider.messages import Close, FinishReason, Open, Plan, Resync, ToVerifier, Verdict, VerifyOrder

Event: TypeAlias = Verdict | Resync

COMPILE_TIMEOUT_S = 30.0
"""Seconds that a sequence waits for its grammar."""

COMPILE_POLL_S = 0.005
"""Seconds between two looks at a grammar, where nothing else is to be done."""

SIGN_OF_LIFE_S = 1.0
"""Seconds after which a sequence that got no token is told that the verifier still works on it."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for metrics, health and autoscaling."""

    running: int
    waiting: int
    capacity: int  # sequences that may run at once
    kv_blocks: int
    kv_blocks_used: int
    preemptions: int
    steps: int
    rows: int
    cancelled: int
    failed: int  # sequences ended by an error of their own
    draft_tokens: int = 0  # drafts that were verified
    accepted_tokens: int = 0
    invalid_tokens: int = 0  # drafts that could not be verified: no token of the vocabulary
    invalid_draft_probs: int = 0  # no sound distribution where the rule needs one
    invalid_grammar: int = 0  # forbidden by the request's grammar


class Engine:
    """Ragged continuous batching over one model."""

    def __init__(
        self,
        model: CausalModel,
        *,
        num_blocks: int,
        vocab_size: int,
        max_model_len: int,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        prefix_caching: bool = True,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """`vocab_size` is the tokenizer's: ids from there on are padding, neither drawn nor accepted.

        Without `grammars`, a sequence that comes with a grammar ends with an error.
        """
        self.model = model
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.pool = BlockPool(num_blocks, model.block_size, prefix_caching=prefix_caching)
        model.allocate(num_blocks)
        self._scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_rows=max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        self._grammars = grammars
        self._sequences: dict[str, Sequence] = {}
        self._steps = self._rows = self._cancelled = self._failed = 0
        self._draft_tokens = self._accepted_tokens = 0
        self._invalid_tokens = self._invalid_draft_probs = self._invalid_grammar = 0

    @property
    def busy(self) -> bool:
        return bool(self._sequences)

    def stats(self) -> EngineStats:
        scheduler, pool = self._scheduler, self.pool
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            capacity=self.max_num_seqs,
            kv_blocks=pool.num_blocks,
            kv_blocks_used=pool.num_blocks - pool.num_free,
            preemptions=scheduler.preemptions,
            steps=self._steps,
            rows=self._rows,
            cancelled=self._cancelled,
            failed=self._failed,
            draft_tokens=self._draft_tokens,
            accepted_tokens=self._accepted_tokens,
            invalid_tokens=self._invalid_tokens,
            invalid_draft_probs=self._invalid_draft_probs,
            invalid_grammar=self._invalid_grammar,
        )

    # ---- messages

    def receive(self, message: ToVerifier) -> list[Event]:
        """Take one message in; at times the answer is immediate."""
        match message:
            case Open():
                return self._open(message)
            case VerifyOrder():
                return self._order(message)
            case Plan():
                if sequence := self._known(message):
                    sequence.plan = message
                return []
            case Close():
                if sequence := self._known(message):
                    self._cancelled += message.cancelled
                    self._remove(sequence)
                return []

    def _known(self, message: Plan | VerifyOrder | Close) -> Sequence | None:
        sequence = self._sequences.get(message.sequence)
        return sequence if sequence is not None and sequence.epoch == message.epoch else None

    def _open(self, message: Open) -> list[Event]:
        old = self._sequences.get(message.sequence)
        if old is not None:
            if old.epoch >= message.epoch:
                return []  # a duplicate
            self._remove(old)
        sequence = Sequence.opened(message, time.monotonic(), self.vocab_size)
        if not sequence.tokens or len(sequence.tokens) >= self.max_model_len:
            return [self._failure(sequence, f"{len(sequence.tokens)} tokens do not fit {self.max_model_len}")]
        if not all(0 <= token < self.vocab_size for token in sequence.tokens):
            return [self._failure(sequence, f"a token id is outside 0..{self.vocab_size - 1}")]
        if message.grammar is not None:
            if self._grammars is None:
                return [self._failure(sequence, "this verifier compiles no grammars")]
            sequence.compiling = self._grammars.submit(message.grammar)
        self._sequences[sequence.name] = sequence
        self._scheduler.waiting.append(sequence)
        return []

    def _order(self, order: VerifyOrder) -> list[Event]:
        sequence = self._known(order)
        if sequence is None:
            return [Resync(order.sequence, order.epoch, committed_len=0)]
        if order.base_len > len(sequence.tokens):
            return [Resync(order.sequence, order.epoch, committed_len=len(sequence.tokens))]
        missed = tuple(sequence.tokens[order.base_len :])
        if not missed:
            sequence.order(order.tokens, order.draft_probs)
            return []
        # Late: its tail still counts if it begins with what was committed meanwhile. Not under a ratio rule:
        # whether it does depends on what was drawn.
        tail = order.tokens[len(missed) :]
        if tail and order.tokens[: len(missed)] == missed and not sequence.sampling.needs_draft_probs:
            sequence.order(tail, None)
        reported = sequence.logprobs_from(order.base_len)
        return [Verdict(order.sequence, order.epoch, order.base_len, tokens=missed, logprobs=reported)]

    def _remove(self, sequence: Sequence) -> None:
        if sequence.compiling is not None:
            sequence.compiling.cancel()
        del self._sequences[sequence.name]
        self._scheduler.remove(sequence)

    # ---- steps

    def gate(self, now: float) -> float:
        """Seconds that the next step may still wait for orders or a grammar; 0 when it should start."""
        scheduler = self._scheduler
        if not scheduler.running and scheduler.waiting:
            unready = [s for s in scheduler.waiting if s.compiling and not s.compiling.done()]
            if len(unready) == len(scheduler.waiting):
                left = min(s.opened_at + COMPILE_TIMEOUT_S - now for s in unready)
                return max(0.0, min(left, COMPILE_POLL_S))
        gates = [s.gate_opens_at - now for s in self._scheduler.running if s.gated]
        return max(0.0, *gates) if gates else 0.0

    def step(self) -> list[Event]:
        """Take grammars in, admit, sift drafts, schedule, forward, verify, commit."""
        started = time.monotonic()
        failures = self._take_grammars(started)
        self._scheduler.admit(started)
        self._sift_drafts()
        works = self._scheduler.next_step()
        if not works:
            return failures
        logits = self.model.forward(self._batch(works))
        verdicts = self._commit(works, logits)
        ended = time.monotonic()
        self._steps += 1
        rows = sum(work.rows for work in works)
        self._rows += rows
        for sequence in (work.sequence for work in works):
            sequence.gate_opens_at = ended + sequence.plan.gate_s
            if sequence.decoding:
                sequence.heard_at = ended
        events: list[Event] = [
            replace(verdict, batch=len(works), batch_tokens=rows, step_time=ended - started)
            for verdict in verdicts
        ]
        return failures + events + self._signs_of_life(ended)

    def _take_grammars(self, now: float) -> list[Event]:
        """Give waiting sequences the grammars that are compiled; end those whose grammar failed or is
        late."""
        failures: list[Event] = []
        for sequence in [s for s in self._scheduler.waiting if s.compiling is not None]:
            reason: str | None = None
            compiling = sequence.compiling
            assert compiling is not None
            if compiling.done():
                try:
                    sequence.grammar = compiling.result()
                    sequence.grammar.advance(sequence.tokens[sequence.prompt_len :])
                    sequence.compiling = None
                except Exception as error:  # noqa: BLE001 - the library's, about the request's own grammar
                    reason = f"the grammar cannot be used: {error}"
            elif now - sequence.opened_at >= COMPILE_TIMEOUT_S:
                reason = f"the grammar took longer than {COMPILE_TIMEOUT_S:g} s to compile"
            if reason is not None:
                self._remove(sequence)
                failures.append(self._failure(sequence, reason))
        return failures

    def _sift_drafts(self) -> None:
        for sequence in self._scheduler.running:
            if sequence.drafts and sequence.decoding:
                sifted = sequence.sift(self.vocab_size)
                self._invalid_tokens += sifted.tokens
                self._invalid_draft_probs += sifted.draft_probs
                self._invalid_grammar += sifted.grammar

    def _signs_of_life(self, now: float) -> list[Event]:
        """An empty verdict for who waits for memory or is still prefilling: silence means a lost verifier."""
        quiet = [s for s in self._sequences.values() if now - s.heard_at >= SIGN_OF_LIFE_S]
        for sequence in quiet:
            sequence.heard_at = now
        return [Verdict(s.name, s.epoch, base_len=len(s.tokens), tokens=()) for s in quiet]

    def fail_all(self, reason: str) -> list[Event]:
        """End every sequence with an error: the model itself broke."""
        failures: list[Event] = []
        for sequence in list(self._sequences.values()):
            self._remove(sequence)
            failures.append(self._failure(sequence, reason))
        return failures

    def _batch(self, works: list[Work]) -> Batch:
        tokens: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        spans: list[Span] = []
        for work in works:
            sequence, first = work.sequence, len(tokens)
            begin, end = sequence.cached, sequence.cached + work.pending
            tokens += sequence.tokens[begin:end]
            tokens += work.drafts
            length = begin + work.rows
            positions += range(begin, length)
            if work.complete:
                logit_rows += range(first + work.pending - 1, first + work.rows)
            used = self.pool.blocks_for(length)
            spans.append(Span(first, work.rows, length, tuple(sequence.blocks[:used])))
        rows, at, wanted = (torch.tensor(ids, dtype=torch.int64) for ids in (tokens, positions, logit_rows))
        return Batch(rows, at, tuple(spans), wanted)

    def _commit(self, works: list[Work], logits: Tensor) -> list[Verdict]:
        """Verify what is complete, and append what it gave."""
        complete = [work for work in works if work.complete]
        for work in works:
            if not work.complete:
                work.sequence.cached += work.pending
        if not complete:
            return []
        verdicts = []
        blocks = [work.sequence.block(work.drafts) for work in complete]
        for work, outcome in zip(complete, verify(logits, blocks, self.vocab_size), strict=True):
            sequence = work.sequence
            invalid = sequence.invalid_drafts
            sequence.order(None, None)
            if outcome.error is not None:
                self._remove(sequence)
                verdicts.append(self._failure(sequence, outcome.error))
                continue
            base_len = len(sequence.tokens)
            committed, finish = sequence.commit(outcome.tokens, self.max_model_len)
            sequence.cached = base_len + len(committed) - 1
            reported = outcome.logprobs[: len(committed)]
            sequence.reported_logprobs += reported
            if sequence.grammar is not None and finish is None:
                sequence.grammar.advance(committed)
            self._draft_tokens += len(work.drafts)
            accepted = min(outcome.accepted, len(committed))
            self._accepted_tokens += accepted
            self._publish(sequence)
            verdicts.append(
                Verdict(
                    sequence.name,
                    sequence.epoch,
                    base_len,
                    tokens=tuple(committed),
                    drafted=len(work.drafts),
                    accepted=accepted,
                    invalid_drafts=invalid,
                    logprobs=reported,
                    finish=finish,
                    cached_tokens=0 if sequence.reported else sequence.prefix_hit,
                    queue_time=0.0 if sequence.reported else sequence.queue_time or 0.0,
                )
            )
            sequence.reported = True
            if finish is not None:
                self._remove(sequence)
            elif outcome.poisoned:
                self._scheduler.preempt(sequence)  # its cache holds a NaN: compute it anew
        return verdicts

    def _publish(self, sequence: Sequence) -> None:
        """Name the blocks that are full of committed tokens, for others to share."""
        size = self.pool.block_size
        while self.pool.prefix_caching and (sequence.published + 1) * size <= sequence.cached:
            begin = sequence.published * size
            sequence.digest = chain_digest(sequence.digest, sequence.tokens[begin : begin + size])
            self.pool.publish(sequence.blocks[sequence.published], sequence.digest)
            sequence.published += 1

    def _failure(self, sequence: Sequence, reason: str) -> Verdict:
        self._failed += 1
        return Verdict(
            sequence.name,
            sequence.epoch,
            base_len=len(sequence.tokens),
            tokens=(),
            finish=FinishReason.ERROR,
            error=reason,
        )


def drive(engine: Engine, messages: Iterable[ToVerifier]) -> list[Event]:
    """Run to the end without a router: for tests and offline use. Gates are not waited for."""
    events = [event for message in messages for event in engine.receive(message)]
    while engine.busy:
        events += engine.step()
    return events
