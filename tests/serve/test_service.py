"""The whole service on a real Ray cluster: 2 routers, 2 drafters, 2 verifiers, and a client over HTTP.

One cluster for the file. The tests that kill replicas come last; Serve replaces what they kill, but nobody
waits for it.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import msgspec
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider_serve.drafter import DrafterStats
from outrider_serve.launch import Cluster, LaunchError, deploy, local_ray, with_port
from outrider_serve.router import RouterSnapshot, ask_all
from outrider_serve.verifier import VerifierStats

pytestmark = pytest.mark.ray

PROMPT = "The router drafts, the verifier accepts"
LENGTH = 1200  # tokens of the longest answer: a few seconds, so that there is time to break something
PATIENCE_S = 60.0

Configuration: TypeAlias = dict[str, Any]
"""A service file's content."""


@dataclass(frozen=True, slots=True)
class Service:
    """A running service, and what its model makes of PROMPT by `transformers` alone."""

    url: str
    cluster: Cluster
    configuration: Configuration
    truth: Truth

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S, trust_env=False)

    async def apply(self, change: Callable[[Configuration], None]) -> None:
        """Deploy an edited copy of the service file, as `serve deploy` does."""
        edited = copy.deepcopy(self.configuration)
        change(edited)
        await asyncio.to_thread(
            deploy, edited, self.cluster, timeout_s=PATIENCE_S, report=lambda progress: None
        )


@dataclass(frozen=True, slots=True)
class Truth:
    """Greedy decoding of PROMPT by `transformers`."""

    prompt: list[int]
    tokens: list[int]
    decode: Callable[[list[int]], str]

    def text(self, length: int = LENGTH) -> str:
        return self.decode(self.tokens[:length])


@pytest.fixture(scope="module")
def truth(smoke_model: Path) -> Truth:
    tokenizer = AutoTokenizer.from_pretrained(smoke_model)
    model = AutoModelForCausalLM.from_pretrained(smoke_model)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two would spin on work of this size, ten times as long
    try:
        tokens = model.generate(**prompt, max_new_tokens=LENGTH, do_sample=False)[0].tolist()
    finally:
        torch.set_num_threads(threads)
    size = prompt.input_ids.shape[1]
    return Truth(
        tokens[:size], tokens[size:], lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
    )


@pytest.fixture(scope="module")
def smoke_model(build_llama: Callable[..., Path]) -> Path:
    return build_llama(
        "smoke", hidden_size=32, intermediate_size=64, num_hidden_layers=2, max_position_embeddings=2048
    )


@pytest.fixture(scope="module")
def service(smoke_model: Path, truth: Truth) -> Iterator[Service]:
    drafting = {
        "method": "oracle",
        "num_speculative_tokens": 8,
        "extra": {"continuations": [[truth.prompt, truth.tokens]]},
    }
    pool = {"num_replicas": 2, "num_cpus": 0.25}
    configuration = {
        "http_options": {"host": "127.0.0.1"},
        "applications": [
            {
                "name": "smoke",
                "route_prefix": "/",
                "import_path": "outrider_serve.app:build",
                "args": {
                    "model": str(smoke_model),
                    "served_model_name": "smoke",
                    "device": "cpu",
                    "num_kv_blocks": 512,
                    "max_num_seqs": 8,
                    "router": pool,
                    "verifier": pool,
                    "drafter": pool | {"placement": "actor"},
                },
                "deployments": [
                    {
                        "name": "Router",
                        # A gate that a busy machine cannot miss: drafts are part of what is tested here.
                        "user_config": {"speculative_config": drafting, "planner": {"gate_ms": 2000}},
                    },
                    {"name": "Drafter", "user_config": {"speculative_config": drafting}},
                ],
            }
        ],
    }
    with local_ray() as cluster:
        configuration = with_port(configuration, 0)
        running = deploy(configuration, cluster, timeout_s=120, report=lambda progress: None)
        yield Service(running.url, cluster, configuration, truth)
        serve.shutdown()


async def verifiers() -> list[VerifierStats]:
    return await ask_all(serve.get_deployment_handle("Verifier", "smoke"), "stats", VerifierStats)


async def drafters() -> list[DrafterStats]:
    return await ask_all(serve.get_deployment_handle("Drafter", "smoke"), "stats", DrafterStats)


async def worker_pids() -> list[int]:
    return sorted([one.pid for one in await verifiers()] + [one.pid for one in await drafters()])


def official(service: Service) -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S)
    return openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, http_client=http)


async def the_leased(stats: Callable[[], Any]) -> Any:
    """The one replica that holds a sequence."""
    while True:
        holding = [one for one in await stats() if one.leased]
        if holding:
            assert len(holding) == 1
            return holding[0]
        await asyncio.sleep(0.01)


async def until_free() -> None:
    """Wait until no worker holds a sequence; TimeoutError if one is kept."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            held = [one.leased for one in await verifiers()] + [one.leased for one in await drafters()]
            running = [one.engine.running + one.engine.waiting for one in await verifiers()]
            if not any(held + running):
                return
            await asyncio.sleep(0.05)


def body(**options: Any) -> dict[str, Any]:
    return {"model": "smoke", "prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0, **options}


async def completion(client: httpx.AsyncClient, **options: Any) -> dict[str, Any]:
    answer = await client.post("/v1/completions", json=body(speculation_detail=True, **options))
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


async def stream(client: httpx.AsyncClient, **options: Any) -> AsyncIterator[str]:
    """The pieces of text of a streamed completion."""
    async with client.stream("POST", "/v1/completions", json=body(stream=True, **options)) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                document = msgspec.json.decode(line.removeprefix("data: "))
                assert "error" not in document, document
                yield document["choices"][0]["text"]


async def test_greedy_text_is_that_of_transformers_at_any_k(service: Service) -> None:
    async with service.client() as client:
        answers = await asyncio.gather(
            *(completion(client, max_tokens=64, speculative={"max_tokens": k}) for k in (0, 1, 2, 4, 8))
        )

    for k, answer in zip((0, 1, 2, 4, 8), answers, strict=True):
        assert answer["choices"][0]["text"] == service.truth.text(64)
        assert answer["usage"]["completion_tokens"] == 64
        figures = answer["outrider"]
        assert figures["accepted_tokens"] == figures["draft_tokens"], "an oracle is never wrong"
        assert bool(figures["draft_tokens"]) == bool(k)


async def test_the_service_says_that_it_is_ready_and_speculates(service: Service) -> None:
    async with service.client() as client:
        health = (await client.get("/health/ready")).json()

    assert health["status"] == "ready"
    assert health["speculation"] == {"active": True, "reason": None}
    assert health["numerics"] in ("strict", "fast")


async def test_seeded_choices_and_their_logprobs_are_the_same_on_any_replica_with_and_without_drafts(
    service: Service,
) -> None:
    """Three choices at temperature 1, twice, and choice 0 alone: on two routers and two verifiers."""
    asked: dict[str, Any] = {"model": "smoke", "prompt": PROMPT, "max_tokens": 32, "seed": 7, "logprobs": 2}
    async with official(service) as client:
        answers = await asyncio.gather(
            *(client.completions.create(n=3, **asked) for _ in range(2)),
            client.completions.create(n=3, extra_body={"speculative": False}, **asked),
        )
        (alone,) = (await client.completions.create(**asked)).choices

    texts = [[choice.text for choice in answer.choices] for answer in answers]
    assert texts[0] == texts[1] == texts[2]
    assert len(set(texts[0])) == 3
    assert alone.text == texts[0][0]
    for answer in answers:
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.completion_tokens == 3 * 32
        assert answer.usage.prompt_tokens == len(service.truth.prompt)
        for choice in answer.choices:
            assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == 32
            assert all(len(top) in (2, 3) for top in choice.logprobs.top_logprobs)


async def test_a_schema_is_kept_and_a_prediction_counted_across_processes(service: Service) -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["draft", "verdict"]}, "count": {"type": "boolean"}},
        "required": ["kind", "count"],
        "additionalProperties": False,
    }
    asked: dict[str, Any] = {
        "model": "smoke",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0,
        "max_tokens": 64,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    async with official(service) as client:
        free = await client.chat.completions.create(**asked)
        text = free.choices[0].message.content
        predicted = await client.chat.completions.create(
            **asked, prediction={"type": "content", "content": text}
        )

    assert free.choices[0].finish_reason == "stop"
    assert set(json.loads(text)) == {"kind", "count"}
    assert predicted.choices[0].message.content == text
    assert free.usage.completion_tokens_details.accepted_prediction_tokens == 0
    details = predicted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0


async def test_metrics_are_those_of_both_routers_and_verifiers_whichever_router_is_asked(
    service: Service,
) -> None:
    async with service.client() as client:
        await asyncio.gather(*(completion(client, max_tokens=4) for _ in range(16)))
        scrapes = [(await client.get("/metrics")).text for _ in range(6)]
    routers = await ask_all(serve.get_deployment_handle("Router", "smoke"), "snapshot", RouterSnapshot)

    counted = {
        router.replica: sample.value
        for router in routers
        for family in router.metrics
        for sample in family.samples
        if sample.name == GENERATED
    }
    assert len(counted) == 2
    assert all(counted.values()), "both routers served"
    replicas = {verifier.replica for verifier in await verifiers()}
    assert len(replicas) == 2
    for scrape in scrapes:
        assert series(scrape, GENERATED) == counted
        assert series(scrape, "vllm:kv_cache_usage_perc").keys() == replicas
        assert series(scrape, "outrider_verifier_sequences_failed_total") == dict.fromkeys(replicas, 0)


GENERATED = "vllm:generation_tokens_total"


def series(scrape: str, name: str) -> dict[str, float]:
    """By the replica that counted."""
    return {
        sample.labels["engine"]: sample.value
        for family in text_string_to_metric_families(scrape)
        for sample in family.samples
        if sample.name == name
    }


async def test_a_client_that_leaves_frees_the_sequence_on_both_workers(service: Service) -> None:
    before = sum(one.engine.cancelled for one in await verifiers())

    async with service.client() as client:
        async for _ in stream(client, speculative={"max_tokens": 1}):
            await the_leased(verifiers)
            await the_leased(drafters)
            break

    await until_free()
    assert sum(one.engine.cancelled for one in await verifiers()) == before + 1


async def test_editing_user_config_keeps_processes_and_text_of_open_streams(service: Service) -> None:
    before = await worker_pids()

    def wrong_drafts(configuration: Configuration) -> None:
        for deployment in configuration["applications"][0]["deployments"]:
            deployment["user_config"]["speculative_config"] |= {"method": "anti", "num_speculative_tokens": 3}

    async with service.client() as client:
        edit = asyncio.create_task(service.apply(wrong_drafts))
        texts: list[str] = []

        async def stream_until_edited() -> None:
            while not edit.done():  # so that streams are open whenever the edit arrives
                texts.append("".join([piece async for piece in stream(client)]))

        await asyncio.gather(edit, *(stream_until_edited() for _ in range(3)))
        after = await completion(client, max_tokens=64)

    assert set(texts) == {service.truth.text()}
    assert {one.method for one in await drafters()} == {"anti"}
    assert after["choices"][0]["text"] == service.truth.text(64)
    assert after["outrider"]["draft_tokens"] > 0
    assert after["outrider"]["accepted_tokens"] == 0
    assert await worker_pids() == before


@pytest.mark.parametrize("rule", ["rejection", "block"])
async def test_a_rule_that_judges_by_draft_probs_is_a_hot_change(service: Service, rule: str) -> None:
    before = await worker_pids()

    def by_ratio(configuration: Configuration) -> None:
        for deployment in configuration["applications"][0]["deployments"]:
            drafting = {"rejection_sample_method": rule, "method": "anti", "extra": {}}  # knows no truth
            deployment["user_config"]["speculative_config"] |= drafting

    await service.apply(by_ratio)
    try:
        async with service.client() as client:
            greedy = await completion(client, max_tokens=64)
            sampled = [await completion(client, max_tokens=64, temperature=1, seed=4) for _ in range(2)]
    finally:
        await service.apply(lambda configuration: None)

    assert greedy["choices"][0]["text"] == service.truth.text(64)
    for answer in (greedy, *sampled):
        assert answer["usage"]["completion_tokens"] == 64
        assert answer["outrider"]["draft_tokens"] > 0, "the drafts came with the probabilities that they need"
    assert sampled[0]["choices"] == sampled[1]["choices"], "the same seed, drafter and K"
    assert await worker_pids() == before


async def test_a_bad_edit_is_refused_and_the_old_configuration_goes_on(service: Service) -> None:
    before = await worker_pids()

    def misspell(configuration: Configuration) -> None:
        router, drafter = configuration["applications"][0]["deployments"]
        router["user_config"]["limit"] = {}
        drafter["user_config"]["speculative_config"] |= {"method": "psychic"}
        # The first user_config of the verifiers, which came up without one.
        edited = {"name": "Verifier", "user_config": {"dtype": "float32"}}
        configuration["applications"][0]["deployments"].append(edited)

    def without_faults(configuration: Configuration) -> None:
        # Serve tells a replica nothing when its user_config is removed, so an empty one mends it.
        configuration["applications"][0]["deployments"].append({"name": "Verifier", "user_config": {}})

    async with service.client() as client:
        await service.apply(misspell)
        await asyncio.sleep(1.1)  # health checks of one second share an answer
        health = [(await client.get("/health/ready")).json() for _ in range(4)]  # of either router
        answer = await completion(client, max_tokens=64)
        await service.apply(without_faults)
        await asyncio.sleep(1.1)
        mended = (await client.get("/health/ready")).json()

    for report in health:
        assert (report["status"], report["speculation"]) == ("ready", {"active": True, "reason": None})
        reasons = {change["replica"]: change["reason"] for change in report["refused_changes"]}
        assert sorted(name.split()[0] for name in reasons) == 2 * ["Drafter"] + 2 * ["Router"] + 2 * [
            "Verifier"
        ]
        for name, complaint in (
            ("Router", "unknown key 'limit'; did you mean 'limits'?"),
            ("Drafter", "'psychic' is not installed"),
            ("Verifier", "unknown key 'dtype'"),
        ):
            assert all(complaint in reasons[replica] for replica in reasons if replica.startswith(name))
    assert mended["refused_changes"] == []
    assert answer["choices"][0]["text"] == service.truth.text(64)
    assert await worker_pids() == before


async def test_a_burst_beyond_the_queue_gets_429_and_probes_are_answered_meanwhile(service: Service) -> None:
    """16 places on the verifiers and 1 in each router's line, for 48 requests at once."""

    def short_line(configuration: Configuration) -> None:
        configuration["applications"][0]["deployments"][0]["user_config"]["limits"] = {
            "max_queued_requests": 1
        }

    await service.apply(short_line)
    try:
        async with service.client() as client, official(service) as openai_client:
            burst = [
                asyncio.create_task(
                    openai_client.completions.create(
                        model="smoke",
                        prompt=PROMPT,
                        max_tokens=400,
                        temperature=0,
                        extra_body={"speculative": False},
                    )
                )
                for _ in range(48)
            ]
            probes = []
            while not all(one.done() for one in burst):
                probes.append((await client.get("/health/ready")).status_code)
                probes.append((await client.get("/metrics")).status_code)
            answers = await asyncio.gather(*burst, return_exceptions=True)
    finally:
        await service.apply(lambda configuration: None)

    refused = [one for one in answers if isinstance(one, openai.RateLimitError)]
    served = [one for one in answers if not isinstance(one, BaseException)]
    assert len(refused) + len(served) == 48
    assert len(served) >= 16
    assert refused
    for error in refused:
        assert error.response.headers["retry-after"] == "1"
        assert error.code == "rate_limit_exceeded", "the router's own words, not Serve's"
    assert {one.choices[0].text for one in served} == {service.truth.text(400)}
    assert set(probes) == {200}


def test_a_sync_client_that_closes_its_stream_frees_the_sequence(service: Service) -> None:
    before = sum(one.engine.cancelled for one in asyncio.run(verifiers()))
    http = httpx.Client(trust_env=False, timeout=PATIENCE_S)
    with openai.OpenAI(
        base_url=f"{service.url}/v1", api_key="none", max_retries=0, http_client=http
    ) as client:
        pieces = client.completions.create(
            model="smoke",
            prompt=PROMPT,
            max_tokens=LENGTH,
            temperature=0,
            stream=True,
            extra_body={"speculative": {"max_tokens": 1}},
        )
        next(iter(pieces))
        pieces.close()

        asyncio.run(until_free())
    assert sum(one.engine.cancelled for one in asyncio.run(verifiers())) == before + 1


async def test_a_killed_drafter_costs_speed_and_no_text(service: Service) -> None:
    async with service.client() as client:
        pieces = stream(client, speculative={"max_tokens": 1})
        text = await anext(pieces)
        drafter = await the_leased(drafters)
        os.kill(drafter.pid, signal.SIGKILL)
        assert (await the_leased(verifiers)).engine.running == 1, "the stream is open"
        async for piece in pieces:
            text += piece

    assert text == service.truth.text()


async def test_a_killed_verifier_costs_time_and_no_text(service: Service) -> None:
    async with service.client() as client:
        pieces = stream(client, speculative={"max_tokens": 1})
        text = await anext(pieces)
        verifier = await the_leased(verifiers)
        os.kill(verifier.pid, signal.SIGKILL)
        async for piece in pieces:
            text += piece

    assert text == service.truth.text()


async def test_without_verifiers_the_official_client_raises_503_within_the_queues_bound(
    service: Service,
) -> None:
    def short_wait(configuration: Configuration) -> None:
        configuration["applications"][0]["deployments"][0]["user_config"]["limits"] = {"queue_timeout_s": 0.3}

    async with asyncio.timeout(PATIENCE_S):  # until the replicas that other tests killed are replaced
        while True:
            try:
                await service.apply(short_wait)
                break
            except LaunchError:
                await asyncio.sleep(0.5)
    for verifier in await verifiers():
        os.kill(verifier.pid, signal.SIGKILL)
    async with official(service) as client:
        with pytest.raises(openai.InternalServerError) as down:
            await client.completions.create(model="smoke", prompt=PROMPT, max_tokens=4)

    assert (down.value.status_code, down.value.code) == (503, "service_unavailable")
