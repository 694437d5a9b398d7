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
from outrider.messages import Close, FinishReason, Open, Plan, Resync, ToVerifier, Verdict, VerifyOrder
from outrider.sampling.acceptance import count_accepted
from outrider.sampling.target import choose_tokens, finite_rows

Event: TypeAlias = Verdict | Resync

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


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What one sequence's rows gave."""

    tokens: list[int]  # the accepted drafts, then the recovered or bonus token
    accepted: int
    finite: bool  # the rows that count have finite logits
    poisoned: bool  # some row has not: a rejected draft may have left a NaN in the cache


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
    ) -> None:
        """`vocab_size` is the tokenizer's: ids from there on are padding, neither drawn nor accepted."""
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
            vocab_size=vocab_size,
            max_model_len=max_model_len,
        )
        self._sequences: dict[str, Sequence] = {}
        self._steps = self._rows = self._cancelled = self._failed = 0

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
        sequence = Sequence.opened(message, time.monotonic())
        if not sequence.tokens or len(sequence.tokens) >= self.max_model_len:
            return [self._failure(sequence, f"{len(sequence.tokens)} tokens do not fit {self.max_model_len}")]
        if not all(0 <= token < self.vocab_size for token in sequence.tokens):
            return [self._failure(sequence, f"a token id is outside 0..{self.vocab_size - 1}")]
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
            sequence.drafts = order.tokens
            return []
        # Late: its tail still counts if it begins with what was committed meanwhile.
        tail = order.tokens[len(missed) :]
        if tail and order.tokens[: len(missed)] == missed:
            sequence.drafts = tail
        return [Verdict(order.sequence, order.epoch, order.base_len, tokens=missed)]

    def _remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.name]
        self._scheduler.remove(sequence)

    # ---- steps

    def gate(self, now: float) -> float:
        """Seconds that the next step may still wait for orders; 0 when it should start."""
        gates = [s.gate_opens_at - now for s in self._scheduler.running if s.gated]
        return max(0.0, *gates) if gates else 0.0

    def step(self) -> list[Event]:
        """Schedule, forward, draw, accept, commit."""
        started = time.monotonic()
        works = self._scheduler.next_step(started)
        if not works:
            return []
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
        return events + self._signs_of_life(ended)

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
        """Draw the target's token for every logit row, accept drafts while equal, and append."""
        complete = [work for work in works if work.complete]
        for work in works:
            if not work.complete:
                work.sequence.cached += work.pending
        if not complete:
            return []
        verdicts = []
        for work, drawn in zip(complete, self._verify(complete, logits), strict=True):
            sequence = work.sequence
            sequence.drafts = None
            if not drawn.finite:
                self._remove(sequence)
                verdicts.append(self._failure(sequence, "the model's logits are not finite numbers"))
                continue
            base_len = len(sequence.tokens)
            committed, finish = sequence.commit(drawn.tokens, self.max_model_len)
            sequence.cached = base_len + len(committed) - 1
            self._publish(sequence)
            verdicts.append(
                Verdict(
                    sequence.name,
                    sequence.epoch,
                    base_len,
                    tokens=tuple(committed),
                    drafted=len(work.drafts),
                    accepted=min(drawn.accepted, len(committed)),
                    finish=finish,
                    cached_tokens=0 if sequence.reported else sequence.prefix_hit,
                    queue_time=0.0 if sequence.reported else sequence.queue_time or 0.0,
                )
            )
            sequence.reported = True
            if finish is not None:
                self._remove(sequence)
            elif drawn.poisoned:
                self._scheduler.preempt(sequence)  # its cache holds a NaN: compute it anew
        return verdicts

    def _verify(self, works: list[Work], logits: Tensor) -> list[_Drawn]:
        """Draw for every logit row, accept, and bring the outcome over in one transfer from the device."""
        sampling = [work.sequence.sampling for work in works for _ in range(len(work.drafts) + 1)]
        positions = [
            len(work.sequence.tokens) + offset for work in works for offset in range(len(work.drafts) + 1)
        ]
        drawn = choose_tokens(logits, sampling, positions, self.vocab_size)
        finite = finite_rows(logits[:, : self.vocab_size])
        width = max(len(work.drafts) for work in works) + 1
        counts = torch.tensor([len(work.drafts) for work in works], device=drawn.device)
        ends = (counts + 1).cumsum(0)
        column = torch.arange(width, device=drawn.device)
        rows = (ends - counts - 1).unsqueeze(1) + column
        rows = rows.minimum((ends - 1).unsqueeze(1))  # short sequences repeat their last row as padding
        padded = [list(work.drafts) + [0] * (width - 1 - len(work.drafts)) for work in works]
        drafts = torch.tensor(padded, dtype=torch.int64, device=drawn.device).view(len(works), width - 1)
        targets = drawn[rows]
        accepted = count_accepted(targets, drafts, counts)
        # What a rejected draft did to the rows behind it is no fault of the request.
        kept = (finite[rows] | (column > accepted.unsqueeze(1))).all(dim=1)
        clean = finite[rows].all(dim=1)
        outcome = torch.stack([accepted, kept.long(), clean.long()], dim=1)
        return [
            _Drawn(row[: row[width] + 1], row[width], bool(row[-2]), not row[-1])
            for row in torch.cat([targets, outcome], dim=1).tolist()
        ]

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
