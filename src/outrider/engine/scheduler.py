"""Which rows the next step computes: every newest token, then prefill chunks and drafts in fair shares.

Memory is promised before it is used: a sequence is admitted when its tokens and one round (1 + K rows) fit
beside what the running ones were promised. When a running sequence finds no block, it first gives up its
drafts; then the youngest is preempted: its blocks are freed and its tokens, which are the truth, are
prefilled again later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from outrider.engine.blocks import BlockPool, OutOfBlocks
from outrider.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part in a step: `pending` known tokens to compute, then `drafts` to verify."""

    sequence: Sequence
    pending: int
    drafts: tuple[int, ...] = ()
    reserved: int = 0  # draft rows that memory is asked for: as ordered, before any was cut for what it is

    @property
    def rows(self) -> int:
        return self.pending + len(self.drafts)

    @property
    def complete(self) -> bool:
        """Whether the newest token is among the rows, so that the step gives a token."""
        return self.sequence.cached + self.pending == len(self.sequence.tokens)


class Scheduler:
    """Admission, rows and preemption over one block pool."""

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, max_rows: int, max_model_len: int) -> None:
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest admission first
        self.preemptions = 0
        self._max_num_seqs = max_num_seqs
        self._max_rows = max_rows
        self._max_model_len = max_model_len

    def next_step(self) -> list[Work]:
        """Choose this step's rows; every chosen row has its block."""
        decoding = [sequence for sequence in self.running if sequence.decoding]
        prefilling = [sequence for sequence in self.running if not sequence.decoding]
        # A long prompt must not delay running streams, nor drafts the prompts: streams come first, with a
        # row each, and drafts leave half of what is left to prompts that wait for it.
        spare = self._max_rows - len(decoding)
        for_drafts = spare // 2 if prefilling else spare
        chosen: list[Work] = []
        for index, sequence in enumerate(decoding):
            # By counts alone, and of memory by the order's: under the ratio rules it would bias the text if
            # what was drawn decided whether drafts find room.
            share = max(0, for_drafts) // (len(decoding) - index)
            room = min(share, sequence.draft_room(self._max_model_len))
            drafts = (sequence.drafts or ())[:room]
            for_drafts -= len(drafts)
            self._choose(Work(sequence, 1, drafts, min(room, sequence.ordered)), chosen)
        room = self._max_rows - sum(work.rows for work in chosen)
        for sequence in prefilling:
            pending = min(len(sequence.tokens) - sequence.cached, room)
            if pending > 0:
                self._choose(Work(sequence, pending), chosen)
                room -= pending
        return chosen

    def _choose(self, work: Work, chosen: list[Work]) -> None:
        """Add the work with its blocks, unless its sequence was or must be preempted."""
        if work.sequence in self.running and (placed := self._with_blocks(work, chosen)) is not None:
            chosen.append(placed)

    def preempt(self, sequence: Sequence) -> None:
        """Free a running sequence's cache; it is prefilled again, before those that wait."""
        self.preemptions += 1
        self.running.remove(sequence)
        self._free(sequence)
        self.waiting.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free what it holds."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._free(sequence)

    def admit(self, now: float) -> None:
        """Let run what fits beside what the running were promised."""
        ready = deque(sequence for sequence in self.waiting if sequence.compiling is None)
        while ready and len(self.running) < self._max_num_seqs:
            sequence = ready.popleft()
            shared = self.pool.shared_prefix(sequence.tokens)
            if self._promised(sequence) - len(shared) > self._unpromised() and self.running:
                self.pool.release(shared)
                return  # running sequences will free blocks; alone, a sequence always fits
            self.waiting.remove(sequence)
            sequence.blocks = shared
            sequence.cached = len(shared) * self.pool.block_size
            if sequence.queue_time is None:
                sequence.queue_time = now - sequence.opened_at
                sequence.prefix_hit = min(sequence.cached, sequence.prompt_len)
            self.running.append(sequence)

    def _promised(self, sequence: Sequence) -> int:
        """Blocks that a sequence needs for its tokens and one round."""
        one_round = 1 + sequence.plan.num_tokens
        return self.pool.blocks_for(min(len(sequence.tokens) + one_round, self._max_model_len))

    def _unpromised(self) -> int:
        """Free blocks that no running sequence counts on."""
        owed = (self._promised(running) - len(running.blocks) for running in self.running)
        return self.pool.num_free - sum(max(blocks, 0) for blocks in owed)

    def _with_blocks(self, work: Work, chosen: list[Work]) -> Work | None:
        """Give the work's rows their blocks; None when the sequence itself had to be preempted."""
        sequence = work.sequence
        while True:
            length = sequence.cached + work.pending + work.reserved
            needed = self.pool.blocks_for(length) - len(sequence.blocks)
            try:
                sequence.blocks += self.pool.allocate(max(needed, 0))
                return work
            except OutOfBlocks:
                if work.reserved:
                    work = Work(sequence, work.pending)
                    continue
                victim = self.running[-1]
                self.preempt(victim)
                chosen[:] = [other for other in chosen if other.sequence is not victim]
                if victim is sequence:
                    return None

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.cached = 0
        sequence.published, sequence.digest = 0, b""
