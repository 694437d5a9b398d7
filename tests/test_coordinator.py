"""One request's rounds, over real engines and drafters in pools that misbehave.

Whatever gets lost, doubled, late or killed between the coordinator and its workers, the text is that of
plain decoding; and once a generation is over, nothing that was leased for it stays behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from torch import Tensor

from outrider.config import RouterOptions, SpeculativeConfig
from outrider.contracts import Draft, DraftContext, Drafter, TargetInfo
from outrider.coordinator import REHOMES_ALLOWED, Coordinator, Generation
from outrider.engine.engine import Engine, drive
from outrider.engine.loading import load_model
from outrider.engine.loop import VerifierLoop
from outrider.engine.model import Batch, CausalModel
from outrider.errors import GenerationError, OutriderError, OverloadedError, RequestError, UnavailableError
from outrider.generation import Chunk, GenerationRequest
from outrider.inprocess import Completion, complete
from outrider.messages import (
    AcceptanceRule,
    Close,
    DraftOrder,
    FinishReason,
    LegLost,
    Limits,
    Open,
    Plan,
    Proposal,
    Resync,
    SamplingParams,
    Verdict,
    VerifyOrder,
)
from outrider.registry import drafter_factory
from outrider.speculation.drafting import DrafterLoop
from outrider.speculation.sequential import MISSED_GATES_ALLOWED
from outrider.text import Tokenizer

PROMPT = tuple(range(20, 40)) * 2
MAX_TOKENS = 60
MAX_MODEL_LEN = 400
K = 4
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=77)

PATIENT_MS = 30_000  # a gate that never passes in a test: every round has its drafts
HASTY_MS = 5  # a gate that passes when drafts are held back
HANG_S = 30.0  # an await that takes this long fails the test

Meddle: TypeAlias = Callable[[Any], Iterable[Any]]
"""What becomes of a message on its way: none, one or several messages."""


# ---- pools -----------------------------------------------------------------------------------------


class Pausable:
    """A model whose steps can be held; knows nothing else that the model does not."""

    def __init__(self, model: CausalModel) -> None:
        self.model = model
        self.vocab_size, self.max_model_len = model.vocab_size, model.max_model_len
        self.numerics = model.numerics
        self.block_size, self.device, self.dtype = model.block_size, model.device, model.dtype
        self.go = threading.Event()
        self.go.set()

    def bytes_per_block(self) -> int:
        return self.model.bytes_per_block()

    def allocate(self, num_blocks: int) -> None:
        self.model.allocate(num_blocks)

    def forward(self, batch: Batch) -> Tensor:
        assert self.go.wait(HANG_S)
        return self.model.forward(batch)


@dataclass(eq=False)
class Leg:
    """One sequence's way to a replica. Keeps what was sent on it."""

    worker: Worker
    opening: Open
    deliver: Callable[[Any], None]
    sent: list[Any] = field(default_factory=list)

    @property
    def replica(self) -> str:
        return self.worker.name

    @property
    def closes(self) -> list[Close]:
        return [message for message in self.sent if isinstance(message, Close)]

    def send(self, message: Any) -> None:
        self.sent.append(message)
        self.worker.receive(message)


class Worker:
    """A replica: the real loop on its own thread. What it says reaches the legs, even those that closed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loop: VerifierLoop | DrafterLoop
        self.alive = True
        self.legs: list[Leg] = []
        self.outward: Meddle = lambda message: [message]  # from the router
        self.inward: Meddle = lambda message: [message]  # to the router
        self.heard: list[Any] = []  # messages that reached the router
        self._home = asyncio.get_running_loop()

    def receive(self, message: Any) -> None:
        if self.alive:
            self.loop.submit(list(self.outward(message)))

    def say(self, messages: Sequence[Any]) -> None:
        """On the loop's thread."""
        self._home.call_soon_threadsafe(self._hand_out, list(messages))

    def _hand_out(self, messages: list[Any]) -> None:
        for message in messages:
            for passed in self.inward(message) if self.alive else ():
                self.pass_on(passed)

    def pass_on(self, message: Any) -> None:
        self.heard.append(message)
        for leg in self.legs:
            if (leg.opening.sequence, leg.opening.epoch) == (message.sequence, message.epoch):
                leg.deliver(message)

    def at(self, committed: int, act: Callable[[], None]) -> None:
        """Act on the first message that builds on so many committed tokens, just before it is passed on."""
        acted = False

        def watch(message: Verdict | Proposal) -> list[Any]:
            nonlocal acted
            if not acted and message.base_len >= len(PROMPT) + committed:
                acted = True
                act()
            return [message] if self.alive else []

        self.inward = watch

    def kill(self) -> None:
        """The process is gone, and the router's end of the link notices."""
        self.alive = False
        for leg in self.legs:
            leg.deliver(LegLost(leg.opening.sequence, leg.opening.epoch, f"{self.name} was killed"))

    @property
    def busy(self) -> bool:
        if isinstance(self.loop, VerifierLoop):
            return self.loop.stats.running + self.loop.stats.waiting > 0
        return self.loop.running > 0


class Pool:
    """Leases on its workers in turn. `before` and `after` the Open, a lease may take its time."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = list(workers)
        self.legs: list[Leg] = []
        self.attempts = 0
        self.given_up = 0
        self.before: Callable[[], Awaitable[None]] = _at_once
        self.after: Callable[[], Awaitable[None]] = _at_once

    async def lease(self, opening: Open, deliver: Callable[[Any], None]) -> Leg:
        self.attempts += 1
        try:
            await self.before()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        leg = Leg(self.workers[len(self.legs) % len(self.workers)], opening, deliver)
        self.legs.append(leg)
        leg.worker.legs.append(leg)
        leg.worker.receive(opening)
        await self.after()
        return leg

    def heard(self, kind: type[Any]) -> list[Any]:
        return [message for worker in self.workers for message in worker.heard if isinstance(message, kind)]

    def sent(self, kind: type[Any]) -> list[Any]:
        return [message for leg in self.legs for message in leg.sent if isinstance(message, kind)]


async def _at_once() -> None:
    """A lease that need not wait."""


async def _a_moment_later() -> None:
    """A lease that takes a little longer than one that need not wait."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


@dataclass
class Service:
    """A coordinator over one pool of verifiers and perhaps one of drafters."""

    coordinator: Coordinator
    verifiers: Pool
    drafters: Pool
    models: list[Pausable]

    def start(self, **fields: Any) -> Generation:
        asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "sampling": GREEDY}
        return self.coordinator.start(GenerationRequest(**asked | fields))

    async def run(self, **fields: Any) -> Completion:
        async with asyncio.timeout(HANG_S):
            return await complete(self.start(**fields))

    async def settled(self) -> None:
        """Every leg was closed once, every worker is empty, no task is left."""
        assert self.coordinator.active == 0
        for leg in [*self.verifiers.legs, *self.drafters.legs]:
            assert len(leg.closes) == 1, f"{leg.replica}: {leg.closes}"
            assert leg.sent[-1] == leg.closes[0], "nothing is sent after Close"
            assert leg.closes[0].epoch == leg.opening.epoch
        for model in self.models:
            model.go.set()
        workers = [*self.verifiers.workers, *self.drafters.workers]
        await until(lambda: not any(worker.alive and worker.busy for worker in workers))
        await until(lambda: len(asyncio.all_tasks()) == 1)


Serve: TypeAlias = Callable[..., Service]


@functools.cache
def load(folder: Path, number: int) -> CausalModel:
    """A model for each verifier; a new engine allocates its cache anew once the one before it is over."""
    return load_model(folder, dtype="float32", device="cpu", block_size=16, cpu_kernels="torch")


def make_engine(model: CausalModel) -> Engine:
    return Engine(model, num_blocks=64, vocab_size=model.vocab_size, max_model_len=MAX_MODEL_LEN)


@functools.cache
def plain(folder: Path, max_tokens: int = MAX_TOKENS, sampling: SamplingParams = GREEDY) -> tuple[int, ...]:
    """What the engine alone makes of the prompt."""
    opening = Open("plain", 0, PROMPT, (), sampling, Limits(max_tokens), Plan("plain", 0))
    events = drive(make_engine(load(folder, -1)), [opening])
    return tuple(token for event in events if isinstance(event, Verdict) for token in event.tokens)


@pytest.fixture
def truth(tiny_llama: Path) -> tuple[int, ...]:
    return plain(tiny_llama)


@pytest.fixture(scope="session")
def tokenizer(tiny_llama: Path) -> Tokenizer:
    return Tokenizer(tiny_llama)


@pytest.fixture
async def serve(tiny_llama: Path, tokenizer: Tokenizer) -> AsyncIterator[Serve]:
    gc.freeze()  # what was there before need not be searched at the end
    services: list[Service] = []
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))

    def make(
        method: str | None = "oracle",
        *,
        extra: dict[str, Any] | None = None,
        plugin: Drafter | None = None,
        inprocess: bool = False,
        gate_ms: float = PATIENT_MS,
        verifiers: int = 1,
        drafters: int = 1,
        max_tokens: int = MAX_TOKENS,
        limits: dict[str, Any] | None = None,
        planner: dict[str, Any] | None = None,
        rule: AcceptanceRule = AcceptanceRule.COUPLED,
    ) -> Service:
        """A service whose drafters use `method`, or `plugin`, in a pool or in process; none without both."""
        target = TargetInfo(str(tiny_llama), load(tiny_llama, -1).vocab_size, MAX_MODEL_LEN, "float32", "cpu")
        if method in ("oracle", "scripted", "anti"):
            extra = {"continuations": {PROMPT: plain(tiny_llama, max_tokens)}} | (extra or {})
        config = method and SpeculativeConfig(
            method=method,
            num_speculative_tokens=K,
            prompt_lookup_min=1,
            rejection_sample_method=rule,
            extra=extra or {},
        )
        options: dict[str, Any] = {"limits": limits or {}, "planner": {"gate_ms": gate_ms} | (planner or {})}
        if config:
            options["speculative_config"] = config
            plugin = plugin or drafter_factory(config.method)(config, target)

        models = [Pausable(load(tiny_llama, number)) for number in range(verifiers)]
        pool = Pool([Worker(f"verifier-{number}") for number in range(verifiers)])
        for model, worker in zip(models, pool.workers, strict=True):
            worker.loop = VerifierLoop(make_engine(model), worker.say)
        pool.before = _a_moment_later  # so that drafts begin with the text, on a busy machine too
        remote = Pool([Worker(f"drafter-{number}") for number in range(drafters)])
        for worker in remote.workers:
            worker.loop = DrafterLoop(plugin or Silent(), worker.say)
        for worker in [*pool.workers, *remote.workers]:
            worker.loop.start()
        coordinator = Coordinator(
            target=target,
            tokenizer=tokenizer,
            verifiers=pool,
            drafters=remote if config and not inprocess else None,
            drafter=plugin if inprocess else None,
            options=RouterOptions.model_validate(options),
        )
        services.append(Service(coordinator, pool, remote, models))
        return services[-1]

    yield make

    try:
        for service in services:
            await service.settled()
    finally:
        for service in services:
            for worker in [*service.verifiers.workers, *service.drafters.workers]:
                worker.loop.stop(HANG_S)
    gc.collect()  # a task whose exception nobody retrieved says so when it goes
    gc.unfreeze()
    assert complaints == []


class Silent:
    """Has no guess."""

    needs_device = False

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [Draft() for _ in contexts]

    def forget(self, sequence: str) -> None: ...


async def first(generation: Generation) -> Chunk:
    async with asyncio.timeout(HANG_S):
        return await anext(aiter(generation))


async def rest(generation: Generation) -> list[int]:
    """The tokens from here to the end."""
    async with asyncio.timeout(HANG_S):
        return [token async for chunk in generation for token in chunk.tokens]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 - it may turn true on another thread
            await asyncio.sleep(0.001)


# ---- rounds through a pool of drafters ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "extra"), [("oracle", {}), ("anti", {}), ("scripted", {"accept": [4, 0, 2]}), ("ngram", {})]
)
async def test_remote_drafts_give_the_plain_text_and_are_flagged_and_counted(
    serve: Serve, truth: tuple[int, ...], tokenizer: Tokenizer, method: str, extra: dict[str, Any]
) -> None:
    service = serve(method, extra=extra)
    generation = service.start()
    chunks = [chunk async for chunk in generation]
    steps = service.verifiers.heard(Verdict)

    assert tuple(token for chunk in chunks for token in chunk.tokens) == truth
    assert "".join(chunk.text for chunk in chunks) == tokenizer.decode(truth)
    assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + [FinishReason.LENGTH]
    flagged = [chunk.drafted for chunk in chunks]
    replays_apart = [step for step in steps if step.batch]
    assert flagged == [
        tuple(index < step.accepted for index in range(len(step.tokens))) for step in replays_apart
    ]

    stats = generation.stats
    accepted = sum(map(sum, flagged))
    drafted = sum(step.drafted for step in steps)
    rounds = sum(step.drafted > 0 for step in steps)
    assert (stats.accepted_tokens, stats.draft_tokens, stats.rounds) == (accepted, drafted, rounds)
    assert stats.acceptance_rate == accepted / drafted
    assert stats.mean_acceptance_length == 1 + accepted / rounds
    assert stats.accepted_per_position == [
        sum(sum(flags) > position for flags in flagged) for position in range(max(map(sum, flagged)))
    ]
    assert stats.fallback is None
    assert (stats.completion_tokens, stats.prompt_tokens) == (len(truth), len(PROMPT))
    expected = {"oracle": stats.acceptance_rate == 1.0, "anti": accepted == 0}
    assert expected.get(method, 0 < accepted < drafted)


async def test_generations_side_by_side_do_not_mix(serve: Serve, truth: tuple[int, ...]) -> None:
    service = serve("scripted", extra={"accept": [3, 1]})
    async with asyncio.timeout(HANG_S):
        done = await asyncio.gather(*(complete(service.start(max_tokens=n)) for n in range(10, 18)))
    assert [completion.tokens for completion in done] == [truth[:n] for n in range(10, 18)]
    assert all(completion.stats.draft_tokens for completion in done)


class Meddler:
    """Ways for proposals to go wrong; one a test."""

    def __init__(self) -> None:
        self.seen = 0
        self.held: list[Any] = []

    def lost(self, proposal: Any) -> list[Any]:
        self.seen += 1
        return [proposal] if self.seen % 2 else []

    def doubled(self, proposal: Any) -> list[Any]:
        return [proposal, proposal]

    def reordered(self, proposal: Any) -> list[Any]:
        """In pairs, the later one first."""
        self.held.append(proposal)
        if len(self.held) < 2:
            return []
        pair, self.held = self.held, []
        return pair[::-1]

    def for_a_shorter_base(self, proposal: Any) -> list[Any]:
        return [replace(proposal, base_len=proposal.base_len - 2)]

    def for_a_longer_base(self, proposal: Any) -> list[Any]:
        return [replace(proposal, base_len=proposal.base_len + 2)]


@pytest.mark.parametrize("way", ["lost", "doubled", "reordered", "for_a_shorter_base", "for_a_longer_base"])
async def test_whatever_happens_to_proposals_the_text_is_the_plain_one(
    serve: Serve, truth: tuple[int, ...], way: str
) -> None:
    service = serve(gate_ms=HASTY_MS)
    (drafter,) = service.drafters.workers
    drafter.inward = getattr(Meddler(), way)

    done = await service.run()

    assert done.tokens == truth
    assert done.stats.accepted_tokens == sum(done.drafted)
    assert drafter.heard, "there were proposals to meddle with"
    assert service.verifiers.heard(Resync) == []
    assert [leg.opening.epoch for leg in service.verifiers.legs] == [0]
    if way in ("reordered", "for_a_shorter_base"):
        assert done.stats.late_proposals > 0
    if way == "for_a_longer_base":
        assert done.stats.rounds == done.stats.late_proposals == 0


async def test_proposals_later_than_the_gate_are_counted_and_their_tails_still_help(
    serve: Serve, truth: tuple[int, ...]
) -> None:
    service = serve(gate_ms=HASTY_MS)
    (verifier,), (drafter,) = service.verifiers.workers, service.drafters.workers
    held: list[Any] = []

    def hold(proposal: Any) -> list[Any]:
        held.append(proposal)
        return []

    def release_after(verdict: Any) -> list[Any]:
        """What was ordered before this verdict comes right behind it."""
        overdue = [proposal for proposal in held if proposal.base_len <= verdict.base_len]
        held[:] = [proposal for proposal in held if proposal not in overdue]
        for proposal in overdue if verdict.finish is None else ():
            asyncio.get_running_loop().call_soon(drafter.pass_on, proposal)
        return [verdict]

    drafter.inward, verifier.inward = hold, release_after
    done = await service.run()

    assert done.tokens == truth
    assert done.stats.late_proposals > 0
    assert done.stats.late_proposals == len(drafter.heard)
    assert done.stats.accepted_tokens > 0


async def test_a_drafter_that_misses_orders_is_told_what_it_lacks(
    serve: Serve, truth: tuple[int, ...]
) -> None:
    service = serve(gate_ms=HASTY_MS)
    (drafter,) = service.drafters.workers
    orders = 0

    def lose_every_third(message: Any) -> list[Any]:
        nonlocal orders
        orders += isinstance(message, DraftOrder)
        return [] if isinstance(message, DraftOrder) and orders % 3 == 0 else [message]

    drafter.outward = lose_every_third
    done = await service.run()

    assert done.tokens == truth
    assert any(isinstance(message, Resync) for message in drafter.heard)
    assert len(service.drafters.legs) == 1, "it was not replaced for that"
    assert done.stats.accepted_tokens > 0


# ---- verdicts -----------------------------------------------------------------------------------------


async def test_doubled_verdicts_commit_and_count_once(serve: Serve, truth: tuple[int, ...]) -> None:
    service = serve("scripted", extra={"accept": [2, 0]})
    (verifier,) = service.verifiers.workers
    verifier.inward = lambda verdict: [verdict, verdict]

    done = await service.run()

    assert done.tokens == truth
    steps = [verdict for verdict in verifier.heard[::2] if verdict.batch]
    assert done.stats.steps == len(steps)
    assert done.stats.draft_tokens == sum(verdict.drafted for verdict in steps)
    assert done.stats.accepted_tokens == sum(done.drafted)


async def test_lost_verdicts_are_replayed(serve: Serve, truth: tuple[int, ...]) -> None:
    service = serve("scripted", extra={"accept": [2, 0]}, gate_ms=HASTY_MS)
    (verifier,) = service.verifiers.workers
    steps = 0

    def lose_every_third(message: Any) -> list[Any]:
        nonlocal steps
        steps += isinstance(message, Verdict) and message.batch > 0
        near_the_end = message.base_len > len(PROMPT) + MAX_TOKENS - 10
        return [message] if steps % 3 or near_the_end else []

    verifier.inward = lose_every_third
    done = await service.run()

    assert done.tokens == truth
    assert any(verdict.batch == 0 for verdict in verifier.heard)
    assert [leg.opening.epoch for leg in service.verifiers.legs] == [0]
    assert done.stats.accepted_tokens == sum(done.drafted)


@pytest.mark.parametrize(("tokens_left", "reason"), [(1, "silence"), (2, "a gap")])
async def test_verdicts_lost_at_the_very_end_are_decoded_anew(
    serve: Serve, truth: tuple[int, ...], tokens_left: int, reason: str
) -> None:
    service = serve(None, planner={"verdict_timeout_s": 0.5})
    (verifier,) = service.verifiers.workers
    lost_base = len(PROMPT) + MAX_TOKENS - tokens_left

    def lose_it_once(message: Any) -> list[Any]:
        is_it = isinstance(message, Verdict) and (message.epoch, message.base_len) == (0, lost_base)
        return [] if is_it else [message]

    verifier.inward = lose_it_once
    done = await service.run()

    assert (done.tokens, done.finish) == (truth, FinishReason.LENGTH)
    assert bool(service.verifiers.heard(Resync)) is (reason == "a gap")
    assert service.verifiers.legs[-1].opening.committed == truth[:-tokens_left]


async def test_a_verifier_that_does_not_know_the_sequence_is_opened_anew(
    serve: Serve, truth: tuple[int, ...]
) -> None:
    service = serve()
    (verifier,) = service.verifiers.workers

    def forget_at_an_order(message: Any) -> list[Any]:
        if not isinstance(message, VerifyOrder) or message.epoch > 0:
            return [message]
        return [Close(message.sequence, 0), message]

    verifier.outward = forget_at_an_order
    generation = service.start()
    tokens = await rest(generation)

    assert tuple(tokens) == truth
    leg = service.verifiers.legs[0]
    assert service.verifiers.heard(Resync) != []
    openings = [leg.opening for leg in service.verifiers.legs]
    assert [opening.epoch for opening in openings] == [0, 1]
    assert openings[1].committed == truth[: len(openings[1].committed)]
    assert leg.closes == [Close(generation.sequence, 0)]
    assert generation.stats.fallback is None, "the drafter knew the sequence all along"


async def test_messages_of_an_old_epoch_change_nothing(serve: Serve, truth: tuple[int, ...]) -> None:
    service = serve(verifiers=2, drafters=2)
    service.models[1].go.clear()

    def kill_both() -> None:
        service.verifiers.workers[0].kill()
        service.drafters.workers[0].kill()

    service.verifiers.workers[0].at(10, kill_both)
    generation = service.start()
    running = asyncio.create_task(rest(generation))
    await until(lambda: len(service.verifiers.legs) == len(service.drafters.legs) == 2)
    old_verifier, old_drafter = service.verifiers.legs[0], service.drafters.legs[0]
    sent = [*service.verifiers.legs[1].sent]
    stats = replace(generation.stats)

    for base_len in range(len(PROMPT), len(PROMPT) + MAX_TOKENS):
        old_verifier.deliver(Verdict(generation.sequence, 0, base_len, (1, 2, 3), batch=1, drafted=4))
        old_drafter.deliver(Proposal(generation.sequence, 0, base_len, (1, 2, 3)))
    failure = Verdict(generation.sequence, 0, 50, (), finish=FinishReason.ERROR, error="of the dead")
    old_verifier.deliver(failure)
    old_verifier.deliver(Resync(generation.sequence, 0, 0))
    old_verifier.deliver(LegLost(generation.sequence, 0, "said twice"))
    old_drafter.deliver(Resync(generation.sequence, 0, 0))
    old_drafter.deliver(LegLost(generation.sequence, 0, "said twice"))
    assert service.verifiers.legs[1].sent == sent
    assert generation.stats == stats

    service.models[1].go.set()
    assert tuple(await running) == truth
    assert len(service.verifiers.legs) == len(service.drafters.legs) == 2


# ---- drafters that are lost, silent or absent ---------------------------------------------------------


async def test_after_a_drafter_is_lost_the_stream_goes_on_and_a_new_one_drafts(
    serve: Serve, tiny_llama: Path
) -> None:
    service = serve(drafters=2, max_tokens=200)
    (model,) = service.models
    found = asyncio.Event()

    async def wait() -> None:
        if service.drafters.legs:
            await found.wait()

    def kill_it() -> None:
        model.go.clear()  # so that the end of the text does not come before all is looked at
        service.drafters.workers[0].kill()

    service.drafters.before = wait
    service.drafters.workers[0].at(10, kill_it)
    generation = service.start(max_tokens=200)
    tokens = [*(await first(generation)).tokens]
    await until(lambda: service.drafters.attempts == 2)
    assert generation.stats.fallback == "drafter lost: drafter-0 was killed"
    assert service.verifiers.legs[0].sent[-1] == Plan(generation.sequence, 0), "it waits for nobody"
    model.go.set()
    steps = len(service.verifiers.heard(Verdict))
    await until(lambda: len(service.verifiers.heard(Verdict)) > steps + 1)

    model.go.clear()
    found.set()
    await until(lambda: len(service.drafters.legs) == 2 and service.drafters.legs[1].sent)
    assert generation.stats.fallback is None
    rounds_before = generation.stats.rounds
    model.go.set()
    tokens += await rest(generation)

    assert tuple(tokens) == plain(tiny_llama, 200)
    opening = service.drafters.legs[1].opening
    assert opening.epoch == 1
    assert opening.committed == tuple(tokens[: len(opening.committed)]) != ()
    assert generation.stats.rounds > rounds_before + 1
    assert generation.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("error", [UnavailableError("no replica"), OverloadedError("all are busy")])
async def test_without_a_drafter_the_text_is_plain_and_the_reason_is_kept(
    serve: Serve, truth: tuple[int, ...], error: OutriderError
) -> None:
    service = serve()

    async def refuse() -> None:
        raise error

    service.drafters.before = refuse
    done = await service.run()
    assert done.tokens == truth
    assert done.stats.fallback == f"no drafter: {error}"
    assert done.stats.rounds == 0


async def test_a_drafter_that_never_answers_is_not_waited_for_all_the_time(
    serve: Serve, truth: tuple[int, ...]
) -> None:
    service = serve(gate_ms=HASTY_MS)
    service.drafters.workers[0].inward = lambda message: []
    done = await service.run()
    assert done.tokens == truth
    assert done.stats.rounds == 0
    asked = len(service.drafters.sent(DraftOrder))
    assert MISSED_GATES_ALLOWED <= asked < len(truth) / 2, "most of the time it decodes plainly"
    assert len(service.drafters.legs) == 1
    assert Plan(service.verifiers.sent(Plan)[-1].sequence, 0) in service.verifiers.sent(Plan)


async def test_a_sequence_that_loses_one_drafter_after_another_stays_plain(
    serve: Serve, truth: tuple[int, ...]
) -> None:
    service = serve(drafters=REHOMES_ALLOWED + 2)

    async def lose_it_soon() -> None:
        newest = service.drafters.legs[-1]
        asyncio.get_running_loop().call_soon(newest.worker.kill)

    service.drafters.after = lose_it_soon
    (model,) = service.models
    model.go.clear()
    generation = service.start()
    running = asyncio.create_task(rest(generation))
    await until(lambda: len(service.drafters.legs) == REHOMES_ALLOWED + 1)
    model.go.set()

    assert tuple(await running) == truth
    assert [leg.opening.epoch for leg in service.drafters.legs] == list(range(REHOMES_ALLOWED + 1))
    assert generation.stats.fallback == f"drafter lost: drafter-{REHOMES_ALLOWED} was killed"


async def test_a_drafter_lost_while_it_is_being_leased_is_replaced(
    serve: Serve, truth: tuple[int, ...]
) -> None:
    service = serve(drafters=2)

    async def lost_before_the_lease_returns() -> None:
        if len(service.drafters.legs) == 1:
            try:
                service.drafters.workers[0].kill()
                await asyncio.sleep(HANG_S)
            except asyncio.CancelledError:
                service.drafters.legs[0].send(Close(service.drafters.legs[0].opening.sequence, 0))
                raise

    service.drafters.after = lost_before_the_lease_returns
    (model,) = service.models
    model.go.clear()
    generation = service.start()
    running = asyncio.create_task(rest(generation))
    await until(lambda: len(service.drafters.legs) == 2 and service.drafters.legs[1].sent)
    model.go.set()

    assert tuple(await running) == truth
    assert [leg.opening.epoch for leg in service.drafters.legs] == [0, 1]
    assert generation.stats.accepted_tokens > 0


async def test_a_drafter_that_forgot_the_sequence_is_leased_anew(
    serve: Serve, truth: tuple[int, ...]
) -> None:
    service = serve(drafters=2)
    forgetful = service.drafters.workers[0]
    forgetful.outward = lambda message: [] if isinstance(message, Open) else [message]
    (model,) = service.models
    model.go.clear()
    generation = service.start()
    running = asyncio.create_task(rest(generation))
    await until(lambda: len(service.drafters.legs) == 2 and service.drafters.legs[1].sent)
    model.go.set()

    assert tuple(await running) == truth
    assert [leg.opening.epoch for leg in service.drafters.legs] == [0, 1]
    assert service.drafters.legs[0].closes == [Close(generation.sequence, 0)], "its place is given back"
    assert generation.stats.accepted_tokens > 0


# ---- verifiers that are lost or silent ----------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["ngram", None])
async def test_a_lost_verifier_is_replaced_within_the_same_stream(
    serve: Serve, tiny_llama: Path, method: str | None, sampling: SamplingParams
) -> None:
    service = serve(method, verifiers=2)
    service.verifiers.workers[0].at(20, service.verifiers.workers[0].kill)
    generation = service.start(sampling=sampling)
    tokens = await rest(generation)

    assert tuple(tokens) == plain(tiny_llama, sampling=sampling)
    before, after = [leg.opening for leg in service.verifiers.legs]
    assert (after.epoch, after.prompt, after.sampling, after.limits) == (
        1,
        before.prompt,
        before.sampling,
        before.limits,
    )
    assert after.committed == tuple(tokens[: len(after.committed)]) != ()
    assert generation.stats.completion_tokens == MAX_TOKENS
    assert generation.stats.fallback is None


async def test_a_first_verdict_that_overtakes_the_lease_is_answered_all_the_same(
    serve: Serve, truth: tuple[int, ...]
) -> None:
    service = serve(verifiers=2)

    lost, successor = service.verifiers.workers
    lost.at(10, lost.kill)

    async def first_drafts_are_out() -> None:
        if len(service.verifiers.legs) == 2:  # gated from its Open on
            await until(lambda: successor.heard)
            await until(lambda: service.drafters.heard(Proposal)[-1].base_len > successor.heard[0].base_len)

    service.verifiers.after = first_drafts_are_out
    done = await service.run()
    assert done.tokens == truth
    assert len(service.verifiers.legs) == 2


async def test_a_drafter_in_this_process_also_answers_a_verdict_that_overtook_the_lease(
    serve: Serve, truth: tuple[int, ...]
) -> None:
    service = serve(inprocess=True)

    async def first_verdict_is_out() -> None:
        await until(lambda: service.verifiers.heard(Verdict))

    service.verifiers.after = first_verdict_is_out
    done = await service.run()
    assert done.tokens == truth
    assert done.stats.acceptance_rate == 1.0


async def test_a_request_that_loses_verifier_after_verifier_fails(serve: Serve) -> None:
    service = serve(verifiers=2)
    for worker in service.verifiers.workers:
        worker.inward = lambda message: [LegLost(message.sequence, message.epoch, "it burns")]

    with pytest.raises(UnavailableError, match=r"4 verifiers were lost, the last: it burns"):
        await service.run()
    assert [leg.opening.epoch for leg in service.verifiers.legs] == list(range(REHOMES_ALLOWED + 1))
    assert service.drafters.legs[0].closes[0].cancelled


async def test_a_silent_verifier_is_closed_and_replaced(serve: Serve, truth: tuple[int, ...]) -> None:
    service = serve("ngram", verifiers=2, planner={"verdict_timeout_s": 0.5})
    silent = service.verifiers.workers[0]
    silent.inward = lambda message: (
        [message] if message.epoch > 0 or message.base_len < len(PROMPT) + 10 else []
    )
    done = await service.run()

    assert done.tokens == truth
    before, after = service.verifiers.legs[:2]
    assert after.opening.epoch == 1
    assert before.closes == [Close(before.opening.sequence, 0)], "it may still be decoding"


async def test_a_verifier_that_never_spoke_is_replaced_too(serve: Serve, truth: tuple[int, ...]) -> None:
    service = serve("ngram", verifiers=2, planner={"first_verdict_timeout_s": 0.5})
    service.verifiers.workers[0].inward = lambda message: [message] if message.epoch > 0 else []
    done = await service.run()
    assert done.tokens == truth
    assert service.verifiers.legs[1].opening.committed == ()


async def test_a_replacing_verifier_has_as_long_for_its_first_verdict_as_the_first_one(
    serve: Serve, truth: tuple[int, ...]
) -> None:
    service = serve(None, verifiers=2, planner={"verdict_timeout_s": 0.2})
    service.models[1].go.clear()  # a long prefill
    service.verifiers.workers[0].at(10, service.verifiers.workers[0].kill)
    running = asyncio.create_task(service.run())
    await until(lambda: len(service.verifiers.legs) == 2)
    await asyncio.sleep(3 * 0.2)
    assert len(service.verifiers.legs) == 2
    service.models[1].go.set()
    assert (await running).tokens == truth


async def test_signs_of_life_keep_a_verifier_that_has_no_token(serve: Serve, truth: tuple[int, ...]) -> None:
    service = serve(None, planner={"verdict_timeout_s": 0.5})
    service.verifiers.workers[0].at(10, service.models[0].go.clear)
    running = asyncio.create_task(service.run())
    await until(lambda: service.verifiers.heard(Verdict))
    (leg,) = service.verifiers.legs
    for _ in range(10):
        await asyncio.sleep(0.1)
        leg.deliver(Verdict(leg.opening.sequence, 0, len(PROMPT), ()))
    assert len(service.verifiers.legs) == 1
    service.models[0].go.set()
    assert (await running).tokens == truth


async def test_signs_of_life_of_a_verifier_that_was_left_keep_no_other(
    serve: Serve, truth: tuple[int, ...]
) -> None:
    service = serve(None, verifiers=3, planner={"first_verdict_timeout_s": 0.5})
    left, silent, _ = service.verifiers.workers
    left.at(10, left.kill)
    silent.inward = lambda message: []
    running = asyncio.create_task(service.run())
    while not running.done():
        await asyncio.sleep(0.1)
        for leg in service.verifiers.legs[:1]:
            leg.deliver(Verdict(leg.opening.sequence, 0, len(PROMPT), ()))
    assert (await running).tokens == truth
    assert len(service.verifiers.legs) == 3


async def test_a_verifier_is_not_called_silent_because_the_router_stood_still(
    serve: Serve, truth: tuple[int, ...]
) -> None:
    service = serve(None, planner={"verdict_timeout_s": 0.5})
    (model,) = service.models

    def stand_still() -> None:
        model.go.set()
        time.sleep(0.8)  # the verdicts of this time are in the loop's queue, behind the timeout

    def soon() -> None:
        model.go.clear()  # so that the generation is waiting when it happens
        asyncio.get_running_loop().call_later(0.05, stand_still)

    service.verifiers.workers[0].at(10, soon)
    done = await service.run()
    assert done.tokens == truth
    assert len(service.verifiers.legs) == 1


# ---- failures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [OverloadedError("full", retry_after_s=3.0), UnavailableError("no replica")]
)
async def test_errors_of_the_verifiers_lease_pass_to_the_caller(serve: Serve, error: OutriderError) -> None:
    service = serve()

    async def refuse() -> None:
        await until(lambda: service.drafters.legs and service.drafters.legs[0].sent)
        raise error

    service.verifiers.before = refuse
    with pytest.raises(type(error)) as raised:
        await service.run()
    assert raised.value is error
    assert service.verifiers.legs == []
    assert service.drafters.legs[0].closes[0].cancelled


async def test_an_error_in_a_verdict_fails_the_generation(serve: Serve) -> None:
    service = serve()
    with pytest.raises(GenerationError, match="a token id is outside"):
        await service.run(prompt=(5, 100_000))
    assert service.verifiers.legs[0].closes[0].cancelled


@pytest.mark.parametrize("where", ["in the lease", "in a step", "in a second lease"])
async def test_a_generation_that_takes_too_long_fails_wherever_it_waits(serve: Serve, where: str) -> None:
    service = serve(verifiers=2, limits={"request_timeout_s": 1.0})

    async def hang() -> None:
        if where == "in the lease" or service.verifiers.legs:
            await asyncio.sleep(HANG_S)

    if where == "in a step":
        service.models[0].go.clear()
    else:
        service.verifiers.before = hang
    if where == "in a second lease":
        service.verifiers.workers[0].inward = lambda message: [
            LegLost(message.sequence, message.epoch, "gone")
        ]
    with pytest.raises(GenerationError, match=r"the generation took longer than 1 s"):
        await service.run()
    assert [leg.closes[0].cancelled for leg in service.drafters.legs] == [True]
    if where == "in a step":
        assert service.verifiers.legs[0].closes[0].cancelled
    else:
        assert service.verifiers.given_up == 1


async def test_requests_that_cannot_work_name_the_field(serve: Serve) -> None:
    service = serve()
    for fields, param, complaint in (
        ({"prompt": ()}, "prompt", "the prompt is empty"),
        ({"prompt": (1,) * MAX_MODEL_LEN}, "prompt", "shorten the prompt"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        ({"max_draft_tokens": -1}, "speculative", "-1 draft tokens"),
    ):
        with pytest.raises(RequestError, match=complaint) as raised:
            service.start(**fields)
        assert raised.value.param == param


# ---- leaving ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inprocess", [False, True])
async def test_a_stream_that_is_left_frees_both_workers(serve: Serve, inprocess: bool) -> None:
    service = serve(inprocess=inprocess)
    service.verifiers.workers[0].at(5, service.models[0].go.clear)  # so that it is left before its end
    generation = service.start()
    await first(generation)
    assert service.coordinator.active == 1
    await generation.aclose()
    await generation.aclose()

    assert service.coordinator.active == 0
    for leg in [*service.verifiers.legs, *service.drafters.legs]:
        assert leg.closes == [Close(generation.sequence, 0, cancelled=True)]


async def test_a_consumer_that_is_cancelled_frees_both_workers(serve: Serve) -> None:
    service = serve()
    service.verifiers.workers[0].at(5, service.models[0].go.clear)
    running = asyncio.create_task(service.run())
    await until(lambda: service.verifiers.heard(Verdict))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [leg.closes[0].cancelled for leg in [*service.verifiers.legs, *service.drafters.legs]] == [
        True
    ] * 2


@pytest.mark.parametrize("ticks", range(6))
async def test_a_cancellation_in_the_moment_of_a_verdict_is_not_lost(serve: Serve, ticks: int) -> None:
    service = serve(None)
    (verifier,) = service.verifiers.workers
    loop = asyncio.get_running_loop()

    def cancel_in(ticks: int) -> None:
        if ticks:
            loop.call_soon(cancel_in, ticks - 1)
        else:
            running.cancel()

    def at_the_first_verdict(message: Any) -> list[Any]:
        if message.base_len == len(PROMPT):
            service.models[0].go.clear()
            loop.call_soon(cancel_in, ticks)
        return [message]

    verifier.inward = at_the_first_verdict
    running = asyncio.create_task(service.run())
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [close.cancelled for close in service.verifiers.legs[0].closes] == [True]


async def test_a_generation_that_was_never_iterated_leases_nothing(serve: Serve) -> None:
    service = serve()
    await service.start().aclose()
    assert service.verifiers.attempts == service.drafters.attempts == service.coordinator.active == 0


async def test_a_generation_cancelled_in_its_leases_gives_both_up(serve: Serve) -> None:
    service = serve()

    async def hang() -> None:
        await asyncio.sleep(HANG_S)

    service.verifiers.before = service.drafters.before = hang
    running = asyncio.create_task(service.run())
    await until(lambda: service.verifiers.attempts and service.drafters.attempts)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: service.drafters.given_up)
    assert service.verifiers.given_up == 1
    assert service.verifiers.legs == service.drafters.legs == []


async def test_a_drafter_that_is_found_after_the_end_is_closed(serve: Serve, truth: tuple[int, ...]) -> None:
    service = serve()
    found = asyncio.Event()

    async def find_it_in_spite_of_all() -> None:
        while not found.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await found.wait()

    service.drafters.after = find_it_in_spite_of_all
    done = await service.run()
    found.set()
    await until(lambda: service.drafters.legs[0].sent)

    assert done.tokens == truth
    assert done.stats.draft_tokens == 0
    (leg,) = service.drafters.legs
    assert leg.sent == [Close(leg.opening.sequence, 0, cancelled=True)]


async def test_a_drafter_lost_after_the_end_is_not_replaced(serve: Serve, truth: tuple[int, ...]) -> None:
    service = serve()
    done = await service.run()
    assert done.tokens == truth
    service.drafters.workers[0].kill()
    service.verifiers.workers[0].kill()
    await asyncio.sleep(0)
    assert service.drafters.attempts == service.verifiers.attempts == 1


# ---- what a request and the options say ---------------------------------------------------------------


async def test_a_stop_string_ends_the_text_and_frees_both_workers(
    serve: Serve, truth: tuple[int, ...], tokenizer: Tokenizer
) -> None:
    text = tokenizer.decode(truth)
    at, stop = next(
        (at, text[at : at + 2])
        for at in range(8, len(text))
        if text[at : at + 2].isascii() and text.index(text[at : at + 2]) == at
    )
    done = await serve().run(stop=(stop,))
    assert (done.text, done.finish) == (text[:at], FinishReason.STOP)
    assert done.tokens == truth[: len(done.tokens)]
    assert stop in tokenizer.decode(done.tokens)
    assert stop not in tokenizer.decode(done.tokens[:-1])
    assert len(done.drafted) == len(done.tokens) == done.stats.completion_tokens


async def test_what_a_slow_reader_has_not_seen_behind_a_stop_string_counts_for_nothing(
    serve: Serve, truth: tuple[int, ...], tokenizer: Tokenizer
) -> None:
    """Public reports 16 and 18: the rounds ran ahead of the text, and the answer ends at its stop string."""
    service = serve(None)
    stop = next(s for at in range(8, 30) if len(s := tokenizer.decode(truth[at : at + 1]).strip()) > 1)
    plain = await service.run(stop=(stop,))
    seen = list(service.verifiers.workers[0].heard)
    generation = service.start(stop=(stop,), prediction=truth, logprobs=1)
    chunks = [await first(generation)]
    (leg,) = service.verifiers.legs[1:]
    await until(lambda: any(verdict.finish for verdict in leg.worker.heard[len(seen) :]))
    chunks += [chunk async for chunk in generation]
    stats = generation.stats
    drafted = [flag for chunk in chunks for flag in chunk.drafted]
    tokens = tuple(token for chunk in chunks for token in chunk.tokens)
    assert ("".join(chunk.text for chunk in chunks), tokens) == (plain.text, plain.tokens)
    assert chunks[-1].finish == FinishReason.STOP
    assert stats.completion_tokens == len(tokens) == sum(len(chunk.logprobs) for chunk in chunks)
    assert stats.accepted_prediction_tokens == sum(drafted) < len(tokens) < stats.predicted_drafts
    assert stats.rejected_prediction_tokens == 0


async def test_a_stop_string_frees_the_workers_before_the_reader_takes_the_last_chunk(
    serve: Serve, truth: tuple[int, ...], tokenizer: Tokenizer
) -> None:
    service = serve(None)
    stop = tokenizer.decode(truth[:12]).strip()[-2:]
    generation = service.start(stop=(stop,))
    while (await first(generation)).finish is None:
        pass
    (leg,) = service.verifiers.legs
    assert len(leg.closes) == 1
    await generation.aclose()


@pytest.mark.parametrize("rule", list(AcceptanceRule))
async def test_the_services_rule_reaches_both_workers_and_the_gate_is_its_own(
    serve: Serve, truth: tuple[int, ...], rule: AcceptanceRule
) -> None:
    service = serve("oracle", rule=rule, planner={"draft_timeout_s": 20.0})
    greedy = await service.run()
    assert greedy.tokens == truth
    sampled = await service.run(sampling=SAMPLED, logprobs=2, stop_token_ids=(5,), min_tokens=3)
    assert len(sampled.logprobs) == len(sampled.tokens)
    (verify,), (draft,) = service.verifiers.legs[1:], service.drafters.legs[1:]
    assert verify.opening.sampling == draft.opening.sampling == replace(SAMPLED, rule=rule)
    assert verify.opening.limits.min_tokens == 3
    assert 5 in verify.opening.limits.stop_token_ids
    assert (verify.opening.logprobs, draft.opening.logprobs) == (2, None)
    gates = {plan.gate_s for plan in service.verifiers.sent(Plan) if plan.sequence == verify.opening.sequence}
    assert gates == {PATIENT_MS / 1000 if rule is AcceptanceRule.COUPLED else 20.0}
    orders = [message for message in verify.sent if isinstance(message, VerifyOrder) and message.tokens]
    assert orders
    assert all((order.draft_probs is not None) == (rule is not AcceptanceRule.COUPLED) for order in orders)


@pytest.mark.parametrize("rule", [AcceptanceRule.REJECTION, AcceptanceRule.BLOCK])
async def test_a_drafter_that_answers_nobody_is_left_under_a_ratio_rule_public_report_39(
    serve: Serve, truth: tuple[int, ...], rule: AcceptanceRule
) -> None:
    service = serve("oracle", rule=rule, gate_ms=HASTY_MS, planner={"draft_timeout_s": 0.05})
    service.drafters.workers[0].inward = lambda message: []
    greedy = await service.run()
    assert greedy.tokens == truth
    sampled = await service.run(sampling=SAMPLED)
    assert len(sampled.tokens) == MAX_TOKENS
    assert sampled.stats.rounds == 0
    assert sampled.stats.fallback is not None
    assert sampled.stats.fallback.startswith("drafter lost: silent for")
    assert len(service.drafters.legs[-1].closes) == 1


async def test_a_request_without_ends_of_its_own_has_the_models(serve: Serve, tokenizer: Tokenizer) -> None:
    service = serve(None)
    await service.run(max_tokens=3)
    await service.run(max_tokens=3, ignore_eos=True)
    kept, ignored = (leg.opening.limits.stop_token_ids for leg in service.verifiers.legs)
    assert kept == tokenizer.eos_token_ids
    assert ignored == ()


async def test_a_rehomed_request_keeps_its_fields_and_reports_each_logprob_once(
    serve: Serve, truth: tuple[int, ...]
) -> None:
    """All that a verifier needs to go on exactly: seed, penalties, limits, the wish for logprobs."""
    fields: dict[str, Any] = {
        "sampling": replace(SAMPLED, frequency_penalty=0.7, logit_bias=((7, -3.0),)),
        "logprobs": 2,
        "prediction": truth,
        "min_tokens": 5,
    }
    whole = await serve(None).run(**fields)
    service = serve(None, verifiers=2)
    service.verifiers.workers[0].at(20, service.verifiers.workers[0].kill)
    done = await service.run(**fields)
    lost, found = (leg.opening for leg in service.verifiers.legs)
    assert (done.tokens, done.text) == (whole.tokens, whole.text)
    assert len(done.logprobs) == len(done.tokens)
    assert [entry.top[0][0] for entry in done.logprobs] == [entry.top[0][0] for entry in whole.logprobs]
    assert found == replace(lost, epoch=1, committed=done.tokens[: len(found.committed)], plan=found.plan)
    assert len(found.committed) >= 20


async def test_a_request_without_drafts_leases_no_drafter(serve: Serve, truth: tuple[int, ...]) -> None:
    service = serve()
    done = await service.run(max_draft_tokens=0)
    assert done.tokens == truth
    assert service.drafters.attempts == 0
    (leg,) = service.verifiers.legs
    assert leg.opening.plan == Plan(leg.opening.sequence, 0)
    assert leg.sent == leg.closes, "the verifier free-ran"
    assert done.stats.fallback is None


@pytest.mark.parametrize(("asked", "expected"), [(2, 2), (K + 3, K)])
async def test_a_request_may_ask_for_fewer_drafts_and_not_for_more(
    serve: Serve, truth: tuple[int, ...], asked: int, expected: int
) -> None:
    service = serve()
    done = await service.run(max_draft_tokens=asked)
    assert done.tokens == truth
    assert {order.num_tokens for order in service.drafters.sent(DraftOrder)} == {expected}
    assert {plan.num_tokens for plan in service.verifiers.sent(Plan)} == {expected}
    assert max(verdict.drafted for verdict in service.verifiers.heard(Verdict)) == expected


async def test_new_options_are_those_of_the_generations_that_start_later(
    serve: Serve, truth: tuple[int, ...]
) -> None:
    service = serve()
    old_options = service.coordinator.options
    before = service.start()
    await first(before)
    started_before = service.start()
    service.coordinator.reconfigure(RouterOptions())
    after = service.start()
    service.coordinator.reconfigure(old_options)
    again = service.start()

    assert tuple(await rest(started_before)) == tuple(await rest(after)) == tuple(await rest(again)) == truth
    await rest(before)
    assert before.stats.draft_tokens > 0
    assert started_before.stats.draft_tokens > 0
    assert after.stats.draft_tokens == 0
    assert again.stats.draft_tokens > 0


async def test_a_slow_reader_holds_up_neither_the_rounds_nor_the_workers(
    serve: Serve, truth: tuple[int, ...]
) -> None:
    service = serve()
    generation = service.start()
    tokens = [*(await first(generation)).tokens]
    await until(lambda: service.verifiers.heard(Verdict)[-1].finish)
    (verifier,), (drafter,) = service.verifiers.legs, service.drafters.legs
    assert verifier.closes == drafter.closes == [Close(generation.sequence, 0)]
    assert service.coordinator.active == 1

    tokens += await rest(generation)
    assert tuple(tokens) == truth
    assert generation.stats.completion_tokens == len(truth)


async def test_cached_tokens_are_those_that_the_first_verifier_found(serve: Serve) -> None:
    service = serve(None, verifiers=2)
    await service.run(prompt=(5,))  # on the first
    await service.run()  # on the second, which has the prompt in its cache from now on
    assert (await service.run(prompt=(5,))).stats.cached_tokens == 0
    assert (await service.run()).stats.cached_tokens > 0
    service.verifiers.workers[0].at(10, service.verifiers.workers[0].kill)
    moved = await service.run()
    assert [leg.worker for leg in service.verifiers.legs[-2:]] == service.verifiers.workers
    assert moved.stats.cached_tokens == 0
