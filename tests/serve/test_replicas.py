"""The plain classes behind the deployments, in one process: real engine, real links, no Ray."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from ray.serve.handle import DeploymentHandle

from outrider.config import LimitOptions, RouterOptions, ServiceArgs, SpeculativeConfig
from outrider.contracts import Drafter
from outrider.coordinator import Coordinator, Generation
from outrider.engine.engine import drive
from outrider.engine.loading import load_engine, target_info
from outrider.errors import ConfigError
from outrider.generation import GenerationRequest, GenerationStats
from outrider.messages import Limits, Open, Plan, SamplingParams, Verdict
from outrider.text import Tokenizer
from outrider_serve import router as router_module
from outrider_serve.desk import Place
from outrider_serve.drafter import DrafterReplica
from outrider_serve.hot_options import Refusal
from outrider_serve.lease import Admitted, ServeDrafterPool, ServeVerifierPool
from outrider_serve.router import RouterReplica
from outrider_serve.verifier import VerifierReplica

HOST = "127.0.0.1"
GREEDY = SamplingParams(temperature=0.0)
PROMPT = tuple(range(10, 40)) * 2


@pytest.fixture
def args(tiny_llama: Path) -> ServiceArgs:
    return ServiceArgs(model=str(tiny_llama), device="cpu", num_kv_blocks=64, max_num_seqs=4)


class InProcess:
    """A coordinator and its workers, with everything but Serve between them."""

    def __init__(self, args: ServiceArgs, local_call: type[Any]) -> None:
        self.verifier = VerifierReplica(args, Place("verifier-1", HOST))
        self.drafter = DrafterReplica(args, Place("drafter-1", HOST))
        self._verifiers = ServeVerifierPool(
            lambda sequence: local_call(self.verifier.lease(sequence)), router="r", limits=LimitOptions()
        )
        self._drafters = ServeDrafterPool(
            lambda sequence: local_call(self.drafter.lease(sequence)), router="r", limits=LimitOptions()
        )
        target = target_info(args)
        self.coordinator = Coordinator(
            target=target,
            tokenizer=Tokenizer(target.model),
            verifiers=self._verifiers,
            drafters=self._drafters,
            drafter=None,
            options=RouterOptions.model_validate(
                {"speculative_config": {"num_speculative_tokens": 4}, "planner": {"gate_ms": 2000}}
            ),
        )

    def start(self, max_tokens: int) -> Generation:
        return self.coordinator.start(GenerationRequest(PROMPT, max_tokens, GREEDY))

    async def close(self) -> None:
        await self._verifiers.close()
        await self._drafters.close()
        await self.verifier.stop()
        await self.drafter.stop()


@pytest.fixture
async def service(args: ServiceArgs, local_call: type[Any]) -> AsyncIterator[InProcess]:
    service = InProcess(args, local_call)
    yield service
    await service.close()


@pytest.fixture
def router(args: ServiceArgs) -> RouterReplica:
    return RouterReplica(args, DeploymentHandle("Verifier", "app"), None, Place("router-1", HOST))


@pytest.fixture
def plain(args: ServiceArgs) -> list[int]:
    """200 greedy tokens of the engine alone."""
    limits = Limits(max_tokens=200)
    opening = Open("plain", 0, PROMPT, (), GREEDY, limits, Plan("plain", 0))
    verdicts = [event for event in drive(load_engine(args), [opening]) if isinstance(event, Verdict)]
    return [token for verdict in verdicts for token in verdict.tokens]


async def test_rounds_over_links_give_the_tokens_of_plain_decoding(
    service: InProcess, plain: list[int]
) -> None:
    generation = service.start(max_tokens=200)

    tokens = [token async for chunk in generation for token in chunk.tokens]

    assert tokens == plain
    assert generation.stats.draft_tokens > 0
    assert generation.stats.fallback is None


async def test_a_request_that_waits_in_the_routers_line_counts_that_as_queue_time(service: InProcess) -> None:
    leases = [service.verifier.lease(f"taken-{index}") for index in range(4)]  # every place
    assert all([isinstance(await anext(lease), Admitted) for lease in leases])
    waiting = asyncio.create_task(drain(service.start(max_tokens=4)))
    await asyncio.sleep(0.3)
    await leases[0].aclose()

    waited = (await asyncio.wait_for(waiting, 20)).queue_time
    at_once = (await drain(service.start(max_tokens=4))).queue_time

    assert at_once < 0.3 <= waited
    for lease in leases:
        await lease.aclose()


async def drain(generation: Generation) -> GenerationStats:
    async for _ in generation:
        pass
    return generation.stats


async def test_links_that_break_in_mid_stream_cost_no_token(service: InProcess, plain: list[int]) -> None:
    generation = service.start(max_tokens=200)
    tokens: list[int] = []
    cuts = [40, 120]

    async for chunk in generation:
        tokens += chunk.tokens
        if cuts and len(tokens) >= cuts[0]:
            del cuts[0]
            for replica in (service.verifier, service.drafter):
                for connection in list(replica._desk._connections):
                    connection.close("the cable is cut")

    assert tokens == plain
    assert (await service.verifier.stats()).engine.cancelled == 2, "both cuts hit an open sequence"


async def test_a_hot_change_swaps_the_drafter_and_a_bad_one_leaves_it(service: InProcess) -> None:
    drafter = service.drafter
    await drafter.reconfigure({"speculative_config": {"method": "ngram"}})
    await drafter.reconfigure({"speculative_config": {"method": "anti"}})
    await drafter.reconfigure({"speculative_config": {"method": "psychic"}})

    stats = await drafter.stats()

    assert stats.method == "anti"
    assert stats.refused is not None
    assert "'psychic' is not installed" in stats.refused.reason


@pytest.mark.parametrize(
    ("user_config", "complaint"),
    [
        ({"speculative_config": {"method": "psychic"}}, "'psychic' is not installed"),
        ({"speculative_confg": {}}, "did you mean 'speculative_config'"),
    ],
)
async def test_a_bad_first_configuration_keeps_a_replica_from_starting(
    service: InProcess, router: RouterReplica, user_config: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        await router.reconfigure(user_config)
    with pytest.raises(ConfigError, match=complaint):
        await service.drafter.reconfigure(user_config)


def test_the_verifier_knows_no_hot_option_and_does_not_start_with_one(service: InProcess) -> None:
    with pytest.raises(ConfigError, match=r"Verifier\.user_config: unknown key 'dtype'"):
        service.verifier.reconfigure({"dtype": "float32"})


BAD: dict[str, Any] = {"dtype": "float32"}


@pytest.mark.parametrize("configured", [True, False])
async def test_a_bad_change_of_a_serving_replica_is_refused_by_all_three_alike(
    service: InProcess, router: RouterReplica, configured: bool
) -> None:
    """Also where Serve had no user_config at start: then the first one to come is a hot change."""
    verifier, drafter = service.verifier, service.drafter
    if configured:
        verifier.reconfigure({})
        await drafter.reconfigure({})
        await router.reconfigure({})
    for replica in (verifier, drafter, router):
        replica.check_health()

    verifier.reconfigure(BAD)
    await drafter.reconfigure(BAD)
    await router.reconfigure(BAD)

    refusals = [(await verifier.stats()).refused, (await drafter.stats()).refused, await router.refusal()]
    assert [one and one.replica for one in refusals] == [
        "Verifier verifier-1",
        "Drafter drafter-1",
        "Router router-1",
    ]
    assert all(one and "unknown key 'dtype'" in one.reason for one in refusals)
    verifier.reconfigure({})
    await drafter.reconfigure({})
    await router.reconfigure({})
    assert (await verifier.stats()).refused is (await drafter.stats()).refused is None
    assert await router.refusal() is None


async def test_a_plugin_that_raises_what_it_likes_does_not_end_a_serving_drafter(
    service: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = service.drafter
    drafter.check_health()

    def broken(config: SpeculativeConfig) -> Drafter:
        raise ZeroDivisionError("in a third party's constructor")

    monkeypatch.setattr(drafter, "_make", broken)
    await drafter.reconfigure({"speculative_config": {"method": "anti"}})

    stats = await drafter.stats()
    assert stats.method == "ngram"
    assert stats.refused is not None
    assert stats.refused.reason == "ZeroDivisionError: in a third party's constructor"


async def test_health_names_every_replica_that_refused_whichever_router_is_asked(
    service: InProcess, router: RouterReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.verifier.check_health()
    service.verifier.reconfigure(BAD)
    elsewhere = Refusal("Router router-2", "unknown key 'limit'")
    answers: dict[str, list[Any]] = {"stats": [await service.verifier.stats()], "refusal": [elsewhere]}

    async def ask(handle: object, method: str, answer: type) -> list[Any]:
        return answers[method]

    monkeypatch.setattr(router_module, "ask_all", ask)
    monkeypatch.setattr(router_module, "_routers", lambda: None)

    readiness = await router.ready()

    assert readiness.ready
    assert [refusal.replica for refusal in readiness.refusals] == ["Router router-2", "Verifier verifier-1"]
    assert elsewhere in readiness.refusals


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [
        ({"max_queued_requests": 957}, "with 4 running and 64 for probes a router would hold 1025 requests"),
        (
            {"request_timeout_s": 660.5},
            r"request_timeout_s 660\.5 is above router\.graceful_shutdown_timeout_s",
        ),
    ],
)
async def test_limits_that_serves_own_would_undercut_are_refused(
    router: RouterReplica, limits: dict[str, float], complaint: str
) -> None:
    await router.reconfigure({"limits": {"max_queued_requests": 956, "request_timeout_s": 660}})

    await router.reconfigure({"limits": limits})

    refusal = await router.refusal()
    assert refusal is not None
    assert re.search(complaint, refusal.reason)
    assert router.options.limits.max_queued_requests == 956


def test_a_router_without_room_for_its_default_queue_does_not_start(args: ServiceArgs) -> None:
    small = ServiceArgs.model_validate(args.model_dump() | {"router": {"max_ongoing_requests": 323}})

    with pytest.raises(ConfigError, match=r"hold 324 requests, and router\.max_ongoing_requests is 323"):
        RouterReplica(small, DeploymentHandle("Verifier", "app"), None, Place("router-1", HOST))


@pytest.mark.parametrize(("placement", "allowed"), [("auto", False), ("inprocess", True)])
async def test_a_drafter_that_wants_a_device_runs_in_the_router_only_when_told_so(
    args: ServiceArgs, monkeypatch: pytest.MonkeyPatch, placement: str, allowed: bool
) -> None:
    wants_a_device: Callable[[str], bool] = lambda method: True  # noqa: E731
    monkeypatch.setattr(router_module, "needs_device", wants_a_device)
    placed = ServiceArgs.model_validate(args.model_dump() | {"drafter": {"placement": placement}})
    router = RouterReplica(placed, DeploymentHandle("Verifier", "app"), None, Place("router-1", HOST))
    config = SpeculativeConfig(method="ngram")

    if allowed:
        await router.reconfigure({"speculative_config": config.model_dump()})
        assert router.coordinator.drafter is not None
    else:
        with pytest.raises(ConfigError, match=r"drafter\.placement: actor"):
            await router.reconfigure({"speculative_config": config.model_dump()})
