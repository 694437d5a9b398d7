"""Which rows the next step computes: newest tokens with their drafts first, then prefill chunks.

Memory is promised before it is used: a sequence is admitted when its tokens and one round (1 + K rows) fit.
When a running sequence finds no block, it first gives up its drafts; then the youngest is preempted: its
blocks are freed and its tokens, which are the truth, are prefilled again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from outrider.engine.blocks import BlockPool, OutOfBlocks
from outrider.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part in a step: `pending` known tokens to compute, then `drafts` to verify."""

    sequence: Sequence
    pending: int
    drafts: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.pending + len(self.drafts)

    @property
    def complete(self) -> bool:
        """Whether the newest token is among the rows, so that the step gives a token."""
        return self.sequence.cached + self.pending == len(self.sequence.tokens)


class Scheduler:
    """Admission, rows and preemption over one block pool."""

    def __init__(
        self, pool: BlockPool, *, max_num_seqs: int, max_rows: int, vocab_size: int, max_model_len: int
    ) -> None:
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest admission first
        self.preemptions = 0
        self._max_num_seqs = max_num_seqs
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def next_step(self, now: float) -> list[Work]:
        """Admit what fits and choose this step's rows; every chosen row has its block."""
        self._admit(now)
        room = self._max_rows
        chosen: list[Work] = []
        for decoding in (True, False):  # a long prompt must not delay running streams
            for sequence in [s for s in self.running if s.decoding is decoding]:
                if room <= 0 or sequence not in self.running:
                    continue  # no row left, or preempted by an older one in this very loop
                work = self._with_blocks(self._wanted(sequence, room), chosen)
                if work is not None:
                    chosen.append(work)
                    room -= work.rows
        return chosen

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free what it holds."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._free(sequence)

    def _admit(self, now: float) -> None:
        while self.waiting and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[0]
            shared = self.pool.shared_prefix(sequence.tokens)
            one_round = 1 + sequence.plan.num_tokens
            ends_at = min(len(sequence.tokens) + one_round, self._max_model_len)
            if self.pool.blocks_for(ends_at) - len(shared) > self.pool.num_free and self.running:
                self.pool.release(shared)
                return  # running sequences will free blocks; alone, a sequence always fits
            self.waiting.popleft()
            sequence.blocks = shared
            sequence.cached = len(shared) * self.pool.block_size
            # Published blocks are the shared ones: the digest chain is resumed by `Engine._publish`.
            sequence.published, sequence.digest = 0, b""
            if sequence.queue_time is None:
                sequence.queue_time = now - sequence.opened_at
                sequence.prefix_hit = min(sequence.cached, sequence.prompt_len)
            self.running.append(sequence)

    def _wanted(self, sequence: Sequence, room: int) -> Work:
        missing = len(sequence.tokens) - sequence.cached
        if missing > room or not sequence.decoding:
            return Work(sequence, min(missing, room), ())
        drafts = sequence.usable_drafts(self._vocab_size, self._max_model_len)
        return Work(sequence, missing, drafts[: room - missing])

    def _with_blocks(self, work: Work, chosen: list[Work]) -> Work | None:
        """Give the work's rows their blocks; None when the sequence itself had to be preempted."""
        sequence = work.sequence
        while True:
            needed = self.pool.blocks_for(sequence.cached + work.rows) - len(sequence.blocks)
            try:
                sequence.blocks += self.pool.allocate(max(needed, 0))
                return work
            except OutOfBlocks:
                if work.drafts:
                    work = Work(sequence, work.pending, ())
                    continue
                victim = self.running[-1]
                self._preempt(victim)
                chosen[:] = [other for other in chosen if other.sequence is not victim]
                if victim is sequence:
                    return None

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self._free(sequence)
        self.waiting.appendleft(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.cached = 0
        sequence.published, sequence.digest = 0, b""
