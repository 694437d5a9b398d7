"""The plain classes behind the deployments, in one process: real engine, real links, no Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from ray.serve.handle import DeploymentHandle

from outrider.config import LimitOptions, RouterOptions, ServiceArgs, SpeculativeConfig
from outrider.coordinator import Coordinator, Generation
from outrider.engine.engine import drive
from outrider.engine.loading import load_engine, target_info
from outrider.errors import ConfigError
from outrider.generation import GenerationRequest
from outrider.messages import Limits, Open, Plan, SamplingParams, Verdict
from outrider.text import Tokenizer
from outrider_serve import router as router_module
from outrider_serve.desk import Place
from outrider_serve.drafter import DrafterReplica
from outrider_serve.lease import ServeDrafterPool, ServeVerifierPool
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
    assert "'psychic' is not installed" in stats.refused


@pytest.mark.parametrize(
    ("user_config", "complaint"),
    [
        ({"speculative_config": {"method": "psychic"}}, "'psychic' is not installed"),
        ({"speculative_confg": {}}, "did you mean 'speculative_config'"),
    ],
)
async def test_a_bad_first_configuration_keeps_a_replica_from_starting(
    service: InProcess, args: ServiceArgs, user_config: dict[str, Any], complaint: str
) -> None:
    handle = DeploymentHandle("Verifier", "app")
    router = RouterReplica(args, handle, None, Place("router-1", HOST))

    with pytest.raises(ConfigError, match=complaint):
        await router.reconfigure(user_config)
    with pytest.raises(ConfigError, match=complaint):
        await service.drafter.reconfigure(user_config)


def test_the_verifier_knows_no_hot_option(args: ServiceArgs) -> None:
    with pytest.raises(ConfigError, match=r"Verifier\.user_config: unknown key 'dtype'"):
        VerifierReplica.reconfigure(VerifierReplica.__new__(VerifierReplica), {"dtype": "float32"})


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
