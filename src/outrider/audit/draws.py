"""Thousands of short generations in lockstep: the real engine, rounds and drafter, without threads or clocks.

One lap: every sequence's verdicts go to its rounds, all draft orders to the drafter as one batch, all verify
orders to the engine, and the engine makes a step. So K is what was asked for and no draft is late, which the
ratio rules need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from outrider.contracts import DraftContext, Drafter
from outrider.engine.engine import Engine
from outrider.errors import GenerationError
from outrider.generation import GenerationRequest, GenerationStats
from outrider.messages import (
    Close,
    DraftOrder,
    Limits,
    Open,
    Plan,
    Proposal,
    Resync,
    SamplingParams,
    Verdict,
    VerifyOrder,
)
from outrider.speculation.sequential import SequentialRounds


@dataclass(slots=True)
class _Mail:
    """A leg that keeps what is sent until the lap comes to it."""

    replica: str
    letters: list[Plan | VerifyOrder | Close | DraftOrder] = field(default_factory=list)

    def send(self, message: Plan | VerifyOrder | Close | DraftOrder) -> None:
        self.letters.append(message)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Generated tokens, a text a seed, and how many drafts were judged on the way."""

    texts: list[tuple[int, ...]]
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Lockstep:
    """Draws texts of `length` tokens after one prompt."""

    engine: Engine
    drafter: Drafter | None
    num_speculative_tokens: int

    @torch.inference_mode()
    def draw(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        seeds: Sequence[int],
        *,
        length: int,
    ) -> Drawn:
        """One text a seed, in waves of as many as the engine runs at once."""
        texts: list[tuple[int, ...]] = []
        drafted = accepted = 0
        wave = self.engine.max_num_seqs
        for begin in range(0, len(seeds), wave):
            rounds = self._wave(prompt, sampling, seeds[begin : begin + wave], length)
            for one in rounds:
                texts.append(tuple(one.rounds.tokens[len(prompt) :]))
                drafted += one.stats.draft_tokens
                accepted += one.stats.accepted_tokens
        return Drawn(texts, drafted, accepted)

    def _wave(
        self, prompt: tuple[int, ...], sampling: SamplingParams, seeds: Sequence[int], length: int
    ) -> list[_Running]:
        verifier, drafts = _Mail("lockstep"), _Mail("lockstep")
        running: dict[str, _Running] = {}
        for number, seed in enumerate(seeds):
            name = f"draw-{number}"
            params = replace(sampling, seed=seed)
            request = GenerationRequest(prompt, length, params)
            stats = GenerationStats()
            rounds = SequentialRounds(
                name,
                request,
                num_tokens=self.num_speculative_tokens,
                gate_s=0.0,
                drafter=None,
                stats=stats,
            )
            opening = Open(name, 0, prompt, (), params, Limits(length), rounds.plan)
            self.engine.receive(opening)
            rounds.attach_verifier(verifier, opening.plan)
            if self.drafter is not None:
                # Attached before the first verdict: its orders are answered in the lap of that verdict.
                rounds.attach_drafter(drafts, opening)
            running[name] = _Running(rounds, stats, params)
        drafts.letters.clear()  # asked for beside the prefill, which this schedule has no use for
        while self.engine.busy:
            self._post(verifier, running)
            self._post(verifier, running, self._step(drafts, running, len(prompt)))
        if self.drafter is not None:
            for name in running:
                self.drafter.forget(name)
        return list(running.values())

    def _post(self, mail: _Mail, running: dict[str, _Running], proposals: Sequence[Proposal] = ()) -> None:
        """Hand proposals to the rounds, and what the rounds say to the engine."""
        for proposal in proposals:
            running[proposal.sequence].rounds.on_proposal(proposal)
        letters, mail.letters = mail.letters, []
        for letter in letters:
            assert not isinstance(letter, DraftOrder)
            for answer in self.engine.receive(letter):
                if isinstance(answer, Resync):
                    raise GenerationError(f"the engine lost step with its rounds: {answer}")
                running[answer.sequence].rounds.on_verdict(answer)

    def _step(self, drafts: _Mail, running: dict[str, _Running], prompt_len: int) -> list[Proposal]:
        """One step of the engine; the answer to the draft orders that follow from it."""
        for event in self.engine.step():
            if isinstance(event, Verdict):
                if event.error is not None:
                    raise GenerationError(event.error)
                running[event.sequence].rounds.on_verdict(event)
        orders = [letter for letter in drafts.letters if isinstance(letter, DraftOrder)]
        drafts.letters.clear()
        if not orders or self.drafter is None:
            return []
        contexts = [
            DraftContext(
                order.sequence,
                tuple(running[order.sequence].rounds.tokens),
                order.num_tokens,
                running[order.sequence].sampling,
                prompt_len=prompt_len,
            )
            for order in orders
        ]
        answers = self.drafter.propose(contexts)
        return [
            Proposal(order.sequence, order.epoch, order.base_len, draft.tokens, draft_probs=draft.probs)
            for order, draft in zip(orders, answers, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _Running:
    """One sequence of a wave."""

    rounds: SequentialRounds
    stats: GenerationStats
    sampling: SamplingParams
