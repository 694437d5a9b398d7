"""The whole service in one process, without Ray: for notebooks, tests, benchmarks and the audit.

    with outrider.local({"model": "smollm2", "speculative_config": {"method": "ngram"}}) as service:
        print(service.generate("The capital of France is", max_tokens=16).text)

The same coordinator, rounds, engine and drafters as under Ray Serve; only the legs are function calls.
"""

from __future__ import annotations

import asyncio
import math
import os
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from outrider.config import LocalConfig, RouterOptions, parse
from outrider.contracts import Drafter
from outrider.coordinator import Coordinator, Generation
from outrider.engine.engine import Engine, Event
from outrider.engine.loading import load_engine, target_info
from outrider.engine.loop import VerifierLoop
from outrider.errors import RequestError, UnavailableError
from outrider.generation import Chunk, GenerationRequest, GenerationStats
from outrider.grammar import check as check_grammar
from outrider.messages import (
    Close,
    FinishReason,
    FromVerifier,
    Grammar,
    Open,
    Plan,
    SamplingParams,
    TokenLogprobs,
    VerifyOrder,
)
from outrider.registry import drafter_factory
from outrider.text import Tokenizer

STOP_TIMEOUT_S = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished generation."""

    text: str
    tokens: tuple[int, ...]
    drafted: tuple[bool, ...]  # which tokens were accepted drafts
    finish: FinishReason
    stats: GenerationStats
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, where asked for


class LocalVerifierPool:
    """The one verifier of this process, driven by its own thread."""

    def __init__(self, engine: Engine) -> None:
        self.loop = VerifierLoop(engine, self._deliver)
        self._receivers: dict[str, tuple[asyncio.AbstractEventLoop, Callable[[FromVerifier], None]]] = {}

    async def lease(self, opening: Open, deliver: Callable[[FromVerifier], None]) -> LocalLeg:
        if not self.loop.alive:
            raise UnavailableError("the local verifier has stopped")
        self._receivers[opening.sequence] = (asyncio.get_running_loop(), deliver)
        self.loop.submit([opening])
        return LocalLeg(self, opening.sequence)

    def send(self, message: Plan | VerifyOrder | Close) -> None:
        if isinstance(message, Close):
            self._receivers.pop(message.sequence, None)
        self.loop.submit([message])

    def _deliver(self, events: Sequence[Event]) -> None:
        """On the verifier's thread: hand a step's events over in one call a caller's loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Callable[[FromVerifier], None], Event]]] = {}
        for event in events:
            receiver = self._receivers.get(event.sequence)
            if receiver is not None:
                by_loop.setdefault(receiver[0], []).append((receiver[1], event))
        for loop, calls in by_loop.items():
            try:
                loop.call_soon_threadsafe(_call_all, calls)
            except RuntimeError:  # that loop was closed: nobody listens any more
                continue


def _call_all(calls: list[tuple[Callable[[FromVerifier], None], Event]]) -> None:
    for deliver, event in calls:
        deliver(event)


@dataclass(frozen=True, slots=True)
class LocalLeg:
    """A sequence's leg to the local verifier."""

    pool: LocalVerifierPool
    sequence: str
    replica: str = "local"

    def send(self, message: Plan | VerifyOrder | Close) -> None:
        self.pool.send(message)


class LocalService:
    """`generate` and `stream` for threads without a loop; `coordinator` for those with one."""

    def __init__(
        self, config: LocalConfig, *, engine: Engine | None = None, drafter: Drafter | None = None
    ) -> None:
        """`engine` and `drafter` replace what the config would load: for tests and experiments."""
        self.config = config
        target = target_info(config)
        self.tokenizer = Tokenizer(target.model)
        spec = config.speculative_config
        if drafter is None and spec is not None:
            drafter = drafter_factory(spec.method)(spec, target)
        self._pool = LocalVerifierPool(engine or load_engine(config))
        self.coordinator = Coordinator(
            target=target,
            tokenizer=self.tokenizer,
            verifiers=self._pool,
            drafters=None,
            drafter=drafter,
            options=RouterOptions(speculative_config=spec, limits=config.limits, planner=config.planner),
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-local", daemon=True)
        self._thread.start()
        self._pool.loop.start()

    @property
    def verifier(self) -> VerifierLoop:
        return self._pool.loop

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the verifier's thread and the loop; running generations end with `UnavailableError`."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(STOP_TIMEOUT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_TIMEOUT_S)
            self._loop.close()
        self._pool.loop.stop(STOP_TIMEOUT_S)

    def request(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, str]],
        *,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int | None = None,
        min_p: float = 0.0,
        seed: int | None = None,
        choice: int = 0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        min_tokens: int = 0,
        logprobs: int | None = None,
        grammar: Grammar | None = None,
        prediction: str | Sequence[int] = "",
        speculative: bool | int = True,
    ) -> GenerationRequest:
        """Build a request from text, token ids or chat messages.

        `choice` is its index among several of one seed; `logprobs` how many alternatives are reported beside
        each token's own; `prediction` what the answer is expected to be. `speculative`: False decodes
        plainly, a number is this request's upper K. Raises `RequestError` naming the argument that is out of
        its range.
        """
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        bias = tuple((logit_bias or {}).items())
        _check("max_tokens", max_tokens, max_tokens is None or max_tokens >= 1, "at least 1")
        _check("temperature", temperature, 0 <= temperature < math.inf, "at least 0 and finite")
        _check("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1")
        _check("top_k", top_k, top_k is None or top_k >= 1, "at least 1, or None for all tokens")
        _check("min_p", min_p, 0 <= min_p <= 1, "0 to 1")
        _check("choice", choice, choice >= 0, "at least 0")
        _check("presence_penalty", presence_penalty, -2 <= presence_penalty <= 2, "-2 to 2")
        _check("frequency_penalty", frequency_penalty, -2 <= frequency_penalty <= 2, "-2 to 2")
        _check("repetition_penalty", repetition_penalty, 0 < repetition_penalty <= 2, "above 0, at most 2")
        _check("logit_bias", logit_bias, all(-100 <= b <= 100 for _, b in bias), "-100 to 100 for each token")
        _check("min_tokens", min_tokens, min_tokens >= 0, "at least 0")
        _check("logprobs", logprobs, logprobs is None or 0 <= logprobs <= 20, "0 to 20 alternatives, or None")
        _check("seed", seed, seed is None or -(1 << 63) <= seed < 1 << 63, "a 64-bit number")
        _check("stop", stop, all(stop), "text that is not empty")
        _check("speculative", speculative, int(speculative) >= 0, "True, False or at least 0")
        if grammar is not None:
            check_grammar(grammar)
        expected = self.tokenizer.encode_piece(prediction) if isinstance(prediction, str) else prediction
        return GenerationRequest(
            prompt=tuple(self._encode(prompt)),
            max_tokens=max_tokens,
            sampling=SamplingParams(
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                min_p=min_p,
                choice=choice,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                repetition_penalty=repetition_penalty,
                logit_bias=bias,
                seed=int.from_bytes(os.urandom(8), "big", signed=True) if seed is None else seed,
            ),
            stop=stop,
            stop_token_ids=tuple(stop_token_ids),
            ignore_eos=ignore_eos,
            min_tokens=min_tokens,
            grammar=grammar,
            logprobs=logprobs,
            prediction=tuple(expected),
            max_draft_tokens=None if speculative is True else int(speculative),
        )

    def generate(
        self, prompt: str | Sequence[int] | Sequence[Mapping[str, str]], **options: Any
    ) -> Completion:
        """One completion, with the keyword arguments of `request`."""
        (completion,) = self.generate_many([self.request(prompt, **options)])
        return completion

    def generate_many(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """All requests at once, batched by the verifier; results in order. The first error is raised."""

        async def gather() -> list[Completion]:
            tasks = [asyncio.ensure_future(complete(self.coordinator.start(one))) for one in requests]
            try:
                return await asyncio.gather(*tasks)
            finally:  # the first error ends the others, too
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        return self._run(gather())

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """On the service's loop, to its end. A generation bounds its own time; closing ends it at once."""
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        except CancelledError:
            raise UnavailableError("the service was closed") from None

    def stream(
        self, prompt: str | Sequence[int] | Sequence[Mapping[str, str]], **options: Any
    ) -> Iterator[Chunk]:
        """Chunks as they are committed. Leaving the iterator early cancels the generation."""
        generation = self.coordinator.start(self.request(prompt, **options))
        chunks: queue.Queue[Chunk | BaseException | None] = queue.Queue()

        async def pump() -> None:
            try:
                async for chunk in generation:
                    chunks.put(chunk)
                chunks.put(None)
            except asyncio.CancelledError:
                chunks.put(UnavailableError("the service was closed"))
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to who iterates
                chunks.put(error)
            finally:
                await generation.aclose()

        pumping = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while (item := chunks.get()) is not None:  # pump ends with an item, whatever happens
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            pumping.cancel()

    def _encode(self, prompt: str | Sequence[int] | Sequence[Mapping[str, str]]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        items = list(prompt)
        if all(isinstance(item, int) for item in items):
            return [item for item in items if isinstance(item, int)]
        messages = [item for item in items if isinstance(item, Mapping)]
        if len(messages) != len(items):
            raise RequestError("a prompt is text, token ids or chat messages, not a mixture", param="prompt")
        return self.tokenizer.encode_chat(
            [{"role": message["role"], "content": message["content"]} for message in messages]
        )


async def _cancel_all() -> None:
    """Cancel what runs on this loop and wait for its end."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _check(param: str, value: object, fine: bool, allowed: str) -> None:
    if not fine:
        raise RequestError(f"{param} is {value!r}: allowed is {allowed}", param=param)


async def complete(generation: Generation) -> Completion:
    """Iterate a generation to its end."""
    text: list[str] = []
    tokens: list[int] = []
    drafted: list[bool] = []
    logprobs: list[TokenLogprobs] = []
    finish = FinishReason.STOP
    try:
        async for chunk in generation:
            text.append(chunk.text)
            tokens += chunk.tokens
            drafted += chunk.drafted
            logprobs += chunk.logprobs
            finish = chunk.finish or finish
    finally:
        await generation.aclose()
    return Completion("".join(text), tuple(tokens), tuple(drafted), finish, generation.stats, tuple(logprobs))


def local(
    config: LocalConfig | Mapping[str, Any], *, engine: Engine | None = None, drafter: Drafter | None = None
) -> LocalService:
    """Start a service in this process. Raises `ConfigError`; close it, or use it as a context manager."""
    checked = config if isinstance(config, LocalConfig) else parse(LocalConfig, dict(config), where="config")
    return LocalService(checked, engine=engine, drafter=drafter)
