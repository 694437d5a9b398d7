"""One request from admission to its last chunk: leases, rounds, text. The same in the router and locally.

    Coordinator.start(request) → Generation
        lease a verifier (and a drafter beside the prefill)
        every Verdict → rounds.on_verdict → next drafts ordered at once, in the delivering callback
                      → queue → text → Chunk to the caller, who may be slow without slowing the rounds

Truth lives in the verifier. When it is lost, prompt and committed tokens open the sequence on another one;
when a drafter is lost, the sequence free-runs and a drafter is looked for again.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from outrider import models
from outrider.config import RouterOptions
from outrider.contracts import Drafter, DrafterPool, TargetInfo, VerifierPool
from outrider.engine.loading import parameter_count
from outrider.errors import ConfigError, GenerationError, OutriderError, RequestError, UnavailableError
from outrider.generation import Chunk, GenerationRequest, GenerationStats
from outrider.messages import FinishReason, FromDrafter, FromVerifier, LegLost, Limits, Open, Resync, Verdict
from outrider.speculation.sequential import Committed, SequentialRounds
from outrider.text import TextStream, Tokenizer

PREDICTED_TOKENS = 8
"""K of a request that comes with a prediction, where the service itself drafts nothing."""

REHOMES_ALLOWED = 3
"""Leases a request may lose on one leg before it fails (verifier) or stays plain (drafter)."""


class Coordinator:
    """Starts generations. One per router process."""

    def __init__(
        self,
        *,
        target: TargetInfo,
        tokenizer: Tokenizer,
        verifiers: VerifierPool,
        drafters: DrafterPool | None,
        drafter: Drafter | None,
        options: RouterOptions,
    ) -> None:
        """`drafter` drafts in this process, `drafters` on others; with neither, decoding is plain."""
        self.target = target
        self.tokenizer = tokenizer
        self.verifiers = verifiers
        self.drafters = drafters
        self.drafter = drafter
        self.options = options
        self.drafter_parameters = self._drafter_parameters()
        self.active = 0  # generations under way
        self._prefix = uuid.uuid4().hex[:8]
        self._numbers = itertools.count()

    def reconfigure(self, options: RouterOptions) -> None:
        """Apply new options to the generations that start from now on."""
        self.options = options
        self.drafter_parameters = self._drafter_parameters()

    def _drafter_parameters(self) -> int:
        """Weights that a draft passes through, for the estimate of what speculation costs; 0: not known."""
        if self.drafter is not None:
            return int(getattr(self.drafter, "parameters", 0))
        config = self.options.speculative_config
        if config is None or config.model is None:
            return 0
        try:
            return parameter_count(models.resolve(config.model))
        except (ConfigError, OSError, ValueError):  # the drafter's own start says what is wrong with it
            return 0

    def start(self, request: GenerationRequest) -> Generation:
        """Begin one generation; nothing happens until it is iterated.

        Raises `RequestError` when the prompt does not fit the context or a number is out of range.
        """
        limit = self.target.max_model_len
        if not request.prompt:
            raise RequestError("the prompt is empty: give at least one token", param="prompt")
        if len(request.prompt) >= limit:
            raise RequestError(
                f"the prompt has {len(request.prompt)} tokens and the context {limit}: shorten the prompt",
                param="prompt",
                code="context_length_exceeded",
            )
        if request.max_tokens is not None and request.max_tokens < 1:
            raise RequestError(
                f"max_tokens is {request.max_tokens}: ask for at least one token", param="max_tokens"
            )
        if request.max_draft_tokens is not None and request.max_draft_tokens < 0:
            raise RequestError(
                f"{request.max_draft_tokens} draft tokens: ask for 0 (plain decoding) or more",
                param="speculative",
            )
        self._refuse_contradictions(request)
        return Generation(self, f"{self._prefix}-{next(self._numbers)}", request)

    def _refuse_contradictions(self, request: GenerationRequest) -> None:
        """Fields that are fine alone and cannot all be honoured together, and ids that are no tokens."""
        size = self.target.vocab_size
        for param, ids in (
            ("stop_token_ids", request.stop_token_ids),
            ("logit_bias", tuple(token for token, _ in request.sampling.logit_bias)),
        ):
            for token in ids:
                if not 0 <= token < size:
                    raise RequestError(
                        f"{param}: {token} is no token of this model; ids go from 0 to {size - 1}",
                        param=param,
                    )
        if request.max_tokens is not None and request.min_tokens > request.max_tokens:
            raise RequestError(
                f"min_tokens {request.min_tokens} is above max_tokens {request.max_tokens}: lower the first",
                param="min_tokens",
            )
        if request.prediction and request.max_draft_tokens == 0:
            raise RequestError(
                "prediction is a source of drafts, and this request forbids drafts: leave one of them out",
                param="prediction",
            )
        if request.grammar is not None:
            for param, given in (
                ("stop", request.stop),
                ("stop_token_ids", request.stop_token_ids),
                ("ignore_eos", request.ignore_eos),
                ("min_tokens", request.min_tokens),
            ):
                if given:
                    raise RequestError(
                        f"{param} cannot be honoured with a grammar, which says where the text ends: leave "
                        "one of them out",
                        param=param,
                    )

    def planned_drafts(self, request: GenerationRequest) -> int:
        """K for a request: the service's, or less where the request asks for less."""
        planned = PREDICTED_TOKENS if request.prediction else 0
        config = self.options.speculative_config
        if config is not None and (self.drafter is not None or self.drafters is not None):
            planned = config.num_speculative_tokens
        asked = request.max_draft_tokens
        return planned if asked is None else min(asked, planned)


@dataclass(frozen=True, slots=True)
class _Progress:
    """What the rounds hand to the text stage."""

    committed: Committed
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class _SignOfLife:
    """The verifier has nothing new and says so: the sequence waits for memory, or is being prefilled."""


_Event: TypeAlias = _Progress | _SignOfLife | OutriderError | LegLost


class Generation:
    """An async iterator of `Chunk`. Leaving it early needs `aclose()`, which frees both workers."""

    def __init__(self, coordinator: Coordinator, sequence: str, request: GenerationRequest) -> None:
        self.sequence = sequence
        config = coordinator.options.speculative_config
        if config is not None:
            sampling = replace(request.sampling, rule=config.rejection_sample_method)
            request = replace(request, sampling=sampling)
        self.request = request
        self.stats = GenerationStats(
            prompt_tokens=len(request.prompt),
            target_parameters=coordinator.target.parameters,
            drafter_parameters=coordinator.drafter_parameters,
        )
        self._coordinator = coordinator
        self._options = coordinator.options
        num_tokens = coordinator.planned_drafts(request)
        room = coordinator.target.max_model_len - len(request.prompt)
        self._limits = Limits(
            max_tokens=room if request.max_tokens is None else min(request.max_tokens, room),
            stop_token_ids=request.stop_token_ids
            + (() if request.ignore_eos else coordinator.tokenizer.eos_token_ids),
            min_tokens=request.min_tokens,
        )
        planner = self._options.planner
        ratio = request.sampling.needs_draft_probs
        self._rounds = SequentialRounds(
            sequence,
            request,
            num_tokens=num_tokens,
            gate_s=planner.draft_timeout_s if ratio else planner.gate_ms / 1000,
            drafter=coordinator.drafter if num_tokens else None,
            stats=self.stats,
        )
        self.stats.planned_drafts = num_tokens
        self._wants_drafter = bool(num_tokens) and coordinator.drafter is None
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._leasing: asyncio.Task[None] | None = None
        self._drafters_lost = 0
        self._chunks = self._run()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._chunks

    async def aclose(self) -> None:
        """Stop; a generation that has not ended is cancelled."""
        await self._chunks.aclose()

    async def _run(self) -> AsyncGenerator[Chunk, None]:
        started = time.monotonic()
        deadline = started + self._options.limits.request_timeout_s
        text = TextStream(self._coordinator.tokenizer, self.request.stop, min_tokens=self.request.min_tokens)
        finish: FinishReason | None = None
        self._coordinator.active += 1
        try:
            if self._wants_drafter:
                self._leasing = asyncio.create_task(self._lease_drafter())
            await self._lease_verifier(deadline)
            self.stats.queue_time += time.monotonic() - started
            while finish is None:
                progress = await self._next_progress(deadline)
                committed = progress.committed
                tokens, drafted = committed.tokens, committed.drafted
                piece = text.feed(tokens)
                if piece.stopped:
                    self._free(cancelled=False)  # now: the caller may take its time with the chunk
                if committed.predicted:
                    self.stats.accepted_prediction_tokens += sum(drafted[: piece.used])
                    self.stats.rejected_prediction_tokens += committed.rejected
                finish = FinishReason.STOP if piece.stopped else progress.finish
                tail = text.finish() if finish is not None and not piece.stopped else ""
                if not self.stats.completion_tokens:
                    self.stats.time_to_first_token = time.monotonic() - started
                self.stats.completion_tokens += piece.used
                self.stats.duration = time.monotonic() - started
                yield Chunk(
                    piece.text + tail,
                    tokens[: piece.used],
                    drafted[: piece.used],
                    finish,
                    logprobs=committed.logprobs[: piece.used],
                )
        finally:
            self._coordinator.active -= 1
            self.stats.duration = time.monotonic() - started
            self._free(cancelled=finish is None)

    def _free(self, *, cancelled: bool) -> None:
        """Free both workers; a lease that is still being looked for is given up."""
        if self._leasing is not None:
            self._leasing.cancel()
        self._rounds.close(cancelled=cancelled)

    async def _next_progress(self, deadline: float) -> _Progress:
        """The next committed tokens; replaces a lost verifier on the way. Bounded by the verdict timeout."""
        planner = self._options.planner
        while True:
            spoke = self._rounds.verifier_spoke  # a new verifier, too, has the whole prefill before it
            bound = planner.verdict_timeout_s if spoke else planner.first_verdict_timeout_s
            bound = min(bound, deadline - time.monotonic())
            try:
                # Not wait_for: before Python 3.12 it loses a cancellation that comes with an event.
                async with asyncio.timeout(bound):
                    event = await self._events.get()
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise self._took_too_long() from None
                if not self._events.empty():
                    continue  # it was this loop that stood still
                event = LegLost(self.sequence, self._rounds.verify_epoch, f"no verdict for {bound:g} s")
            match event:
                case _Progress():
                    return event
                case OutriderError():
                    raise event
                case _SignOfLife():
                    continue  # the wait begins anew
                case LegLost() if event.epoch == self._rounds.verify_epoch:
                    await self._rehome_verifier(event.reason, deadline)

    def _took_too_long(self) -> GenerationError:
        limit = self._options.limits.request_timeout_s
        return GenerationError(f"the generation took longer than {limit:g} s")

    # ---- the verifier's leg

    async def _lease_verifier(self, deadline: float) -> None:
        opening = replace(
            self._opening(self._rounds.verify_epoch),
            grammar=self.request.grammar,
            logprobs=self.request.logprobs,
        )
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                leg = await self._coordinator.verifiers.lease(opening, self._on_verifier)
        except TimeoutError:
            raise self._took_too_long() from None
        self._rounds.attach_verifier(leg, opening.plan)

    async def _rehome_verifier(self, reason: str, deadline: float) -> None:
        self._rounds.detach_verifier()
        if self._rounds.verify_epoch > REHOMES_ALLOWED:
            raise UnavailableError(f"{self._rounds.verify_epoch} verifiers were lost, the last: {reason}")
        await self._lease_verifier(deadline)

    def _on_verifier(self, message: FromVerifier) -> None:
        match message:
            case Verdict():
                if message.error is not None and message.epoch == self._rounds.verify_epoch:
                    self._events.put_nowait(GenerationError(message.error))
                    return
                first = not self.stats.steps
                committed = self._rounds.on_verdict(message)
                if committed is None:
                    if message.epoch == self._rounds.verify_epoch:
                        self._events.put_nowait(_SignOfLife())
                    return
                if first:  # of the generation: what a later verifier finds in its cache saved nothing
                    self.stats.cached_tokens = message.cached_tokens
                    self.stats.queue_time += message.queue_time
                self._events.put_nowait(_Progress(committed, message.finish))
                if message.finish is not None:
                    self._free(cancelled=False)  # now: the caller may take its time with the chunks
            case Resync():
                if self._rounds.on_verifier_resync(message):
                    lost = LegLost(message.sequence, message.epoch, "the verifier does not know the sequence")
                    self._events.put_nowait(lost)
            case LegLost():
                self._events.put_nowait(message)

    # ---- the drafter's leg

    async def _lease_drafter(self) -> None:
        """Find a drafter. Not finding one costs speed, never the request."""
        drafters = self._coordinator.drafters
        if drafters is None:
            return
        opening = self._opening(self._rounds.draft_epoch)
        try:
            leg = await drafters.lease(opening, self._on_drafter)
        except OutriderError as error:
            self._rounds.detach_drafter(f"no drafter: {error}")
            return
        self._rounds.attach_drafter(leg, opening)

    def _on_drafter(self, message: FromDrafter) -> None:
        match message:
            case Resync():
                if self._rounds.on_drafter_resync(message):
                    self._replace_drafter("the drafter does not know the sequence")
            case LegLost():
                if message.epoch == self._rounds.draft_epoch:
                    self._replace_drafter(message.reason)
            case _:
                self._rounds.on_proposal(message)

    def _replace_drafter(self, reason: str) -> None:
        if self._leasing is not None:
            self._leasing.cancel()  # lost before its lease was told so
        self._rounds.detach_drafter(f"drafter lost: {reason}")
        self._drafters_lost += 1
        if self._drafters_lost <= REHOMES_ALLOWED:
            self._leasing = asyncio.create_task(self._lease_drafter())

    def _opening(self, epoch: int) -> Open:
        tokens = self._rounds.tokens
        return Open(
            self.sequence,
            epoch,
            prompt=self.request.prompt,
            committed=tuple(tokens[len(self.request.prompt) :]),
            sampling=self.request.sampling,
            limits=self._limits,
            plan=self._rounds.plan,
            traceparent=self.request.traceparent,
        )
