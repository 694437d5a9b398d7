"""The real application on a real port, with the official client; only the coordinator is a scripted one."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from outrider.config import LimitOptions, RouterOptions, SpeculativeConfig
from outrider.errors import GenerationError, OutriderError, OverloadedError, UnavailableError
from outrider.generation import Chunk, GenerationRequest, GenerationStats
from outrider.messages import FinishReason, Grammar, TokenLogprobs
from outrider.text import TextStream, Tokenizer
from outrider_serve.hot_options import Refusal
from outrider_serve.ingress import Readiness
from outrider_serve.telemetry import Snapshot, Telemetry

Running: TypeAlias = Callable[[Any], AbstractAsyncContextManager[str]]

MODEL = "tiny/scripted"
REPLY = "Merhaba dünya: ığdır, 你好, 🙂🚀 and the end."
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


class ScriptedCoordinator:
    """Says `reply` to everything, in rounds of K drafts, all accepted, and one token more.

    `before` is raised instead of the first chunk, `midway` after it (of the choice `fails` only, if that is
    set); a cleared `may_go_on` holds a generation after its first chunk, `may_begin` before it. Token i of a
    reply has the log-probability -i, and its alternatives are the ids from 300 down.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.reply = REPLY
        self.num_drafts = 4
        self.before: Exception | None = None
        self.midway: Exception | None = None
        self.fails: int | None = None
        self.may_begin, self.may_go_on = asyncio.Event(), asyncio.Event()
        self.may_begin.set()
        self.may_go_on.set()
        self.begun = asyncio.Event()
        self.requests: list[GenerationRequest] = []
        self.active = 0
        self.cancelled = 0

    def start(self, request: GenerationRequest) -> ScriptedGeneration:
        self.requests.append(request)
        return ScriptedGeneration(self, request)


class ScriptedGeneration:
    def __init__(self, script: ScriptedCoordinator, request: GenerationRequest) -> None:
        asked = request.max_draft_tokens
        planned = script.num_drafts if asked is None else min(asked, script.num_drafts)
        self.stats = GenerationStats(prompt_tokens=len(request.prompt), planned_drafts=planned)
        self._script = script
        self._request = request
        self._chunks = self._run()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._chunks

    async def aclose(self) -> None:
        await self._chunks.aclose()

    async def _run(self) -> AsyncGenerator[Chunk, None]:
        script, request = self._script, self._request
        tokens = [*script.tokenizer.encode(script.reply), *script.tokenizer.eos_token_ids][
            : request.max_tokens
        ]
        num_drafts = self.stats.planned_drafts
        text = TextStream(script.tokenizer, request.stop)
        finish: FinishReason | None = None
        script.active += 1
        script.begun.set()
        try:
            await script.may_begin.wait()
            if script.before is not None:
                raise script.before
            for at in range(0, len(tokens), num_drafts + 1):
                if at:
                    await script.may_go_on.wait()
                    if script.midway is not None and script.fails in (None, request.sampling.choice):
                        raise script.midway
                block = tuple(tokens[at : at + num_drafts + 1])
                piece = text.feed(block)
                if piece.stopped or block[-1] in script.tokenizer.eos_token_ids:
                    finish = FinishReason.STOP
                elif at + len(block) == len(tokens):
                    finish = FinishReason.LENGTH
                tail = text.finish() if finish is not None and not piece.stopped else ""
                self.stats.count(drafted=len(block) - 1, accepted=len(block) - 1)
                self.stats.completion_tokens += piece.used
                drafted = tuple(place < len(block) - 1 for place in range(len(block)))
                await asyncio.sleep(0)
                reported: list[TokenLogprobs] = []
                if request.logprobs is not None:
                    top = tuple((300 - rank, -1.0 - rank) for rank in range(request.logprobs))
                    reported = [TokenLogprobs(-float(at + place), top) for place in range(piece.used)]
                yield Chunk(
                    piece.text + tail, block[: piece.used], drafted[: piece.used], finish, tuple(reported)
                )
                if finish is not None:
                    return
        finally:
            script.active -= 1
            script.cancelled += finish is None


class ScriptedService:
    model_name = MODEL
    created = 1_790_000_000
    max_model_len = 200

    def __init__(self, tokenizer: Tokenizer, replica: str = "r1") -> None:
        self.tokenizer = tokenizer
        self.options = RouterOptions(
            speculative_config=SpeculativeConfig(num_speculative_tokens=4),
            limits=LimitOptions(max_body_bytes=100_000),
        )
        self.coordinator = ScriptedCoordinator(tokenizer)
        self.telemetry = Telemetry(MODEL, engine=replica)
        self.readiness = Readiness(True, None, True, None, "strict")
        self.peers: list[Telemetry] = []

    async def ready(self) -> Readiness:
        return self.readiness

    async def snapshots(self) -> list[Snapshot]:
        return [telemetry.snapshot() for telemetry in (self.telemetry, *self.peers)]


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Tokenizer:
    return Tokenizer(tiny_llama)


@pytest.fixture
def service(tokenizer: Tokenizer) -> ScriptedService:
    return ScriptedService(tokenizer)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what nothing signals, at most ten seconds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
async def http(service: ScriptedService, running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with running(service) as address, httpx.AsyncClient(base_url=address, timeout=20) as client:
        yield client


@pytest.fixture
async def client(http: httpx.AsyncClient) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=str(http.base_url.join("/v1")), api_key="none", max_retries=0) as client:
        yield client


def events_of(body: str) -> list[Any]:
    """The JSON documents of a stream; the last event must be [DONE]."""
    events = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(one) for one in events[:-1]]


# ---- answers


async def test_a_chat_completion_is_the_reply_with_its_usage(
    client: AsyncOpenAI, service: ScriptedService
) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (REPLY, "assistant", "stop")
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    (request,) = service.coordinator.requests
    assert list(request.prompt) == service.tokenizer.encode_chat(HELLO)
    assert request.max_tokens is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(request.prompt)
    assert answer.usage.completion_tokens == len(service.tokenizer.encode(REPLY)) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_a_completion_takes_text_and_ids_in_every_spelling(
    client: AsyncOpenAI, service: ScriptedService
) -> None:
    ids = service.tokenizer.encode("the text")
    prompts: list[Any] = ["the text", ["the text"], ids, [ids]]
    for prompt in prompts:
        answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=100)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (REPLY, "stop")
        assert answer.id.startswith("cmpl-")
    assert {request.prompt for request in service.coordinator.requests} == {tuple(ids)}


async def test_a_completion_without_max_tokens_gets_the_services_default_hot(
    client: AsyncOpenAI, service: ScriptedService
) -> None:
    await client.completions.create(model=MODEL, prompt="x")
    service.options = RouterOptions(limits=LimitOptions(default_max_tokens=3))
    answer = await client.completions.create(model=MODEL, prompt="x")
    assert answer.choices[0].finish_reason == "length"
    await client.completions.create(model=MODEL, prompt=[5] * 199)
    assert [request.max_tokens for request in service.coordinator.requests] == [16, 3, 1]


async def test_a_chat_stream_has_a_role_then_whole_characters_then_the_reason_then_the_usage(
    client: AsyncOpenAI,
) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    first, *deltas, last, usage = [chunk async for chunk in stream]
    assert first.choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content for chunk in deltas]
    assert all(piece and "\ufffd" not in piece for piece in pieces)
    assert "".join(piece or "" for piece in pieces) == REPLY
    assert len(pieces) > 3
    assert last.choices[0].finish_reason == "stop"
    assert all(chunk.choices[0].finish_reason is None for chunk in deltas)
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens > 10
    assert {chunk.id for chunk in (first, *deltas, last, usage)} == {first.id}


async def test_a_stream_without_include_usage_says_nothing_of_usage(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 100, "stream": True}
    reply = await http.post("/v1/completions", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events_of(reply.text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == REPLY
    assert (last["choices"][0]["text"], last["choices"][0]["finish_reason"]) == ("", "stop")
    assert all("usage" not in chunk and "outrider" not in chunk for chunk in (*chunks, last))


async def test_usage_is_null_in_every_chunk_but_the_last(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events_of((await http.post("/v1/completions", json=body)).text)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["usage"]["completion_tokens"] == 16


async def test_a_stop_string_ends_the_text_before_it_and_the_usage_with_its_last_token(
    client: AsyncOpenAI, service: ScriptedService
) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO, stop=["你", "never"])
    assert answer.choices[0].message.content == REPLY[: REPLY.index("你")]
    assert answer.choices[0].finish_reason == "stop"
    tokens = service.tokenizer.encode(REPLY)
    used = next(n for n in range(len(tokens)) if "你" in service.tokenizer.decode(tokens[:n]))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == used


async def test_sampling_and_speculation_reach_the_coordinator(
    client: AsyncOpenAI, service: ScriptedService
) -> None:
    extra: list[Any] = [
        {"speculative": False, "top_k": 7},
        {"speculative": {"max_tokens": 2}, "top_k": -1},
        {"speculative": True, "top_k": 0},
        {},
    ]
    for body in extra:
        await client.chat.completions.create(
            model=MODEL, messages=HELLO, temperature=0.5, top_p=0.9, seed=-3, user="me", extra_body=body
        )
    requests = service.coordinator.requests
    assert [request.max_draft_tokens for request in requests] == [0, 2, None, None]
    assert [request.sampling.top_k for request in requests] == [7, None, None, None]
    sampling = requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.9, -3)


async def test_requests_without_a_seed_never_share_one(client: AsyncOpenAI, service: ScriptedService) -> None:
    for _ in range(5):
        await client.chat.completions.create(model=MODEL, messages=HELLO)
    assert len({request.sampling.seed for request in service.coordinator.requests}) == 5
    assert service.coordinator.requests[0].sampling.temperature == 1.0


async def test_content_parts_and_developer_messages_are_read(
    client: AsyncOpenAI, service: ScriptedService
) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        # As a client sends an answer back:
        {"role": "assistant", "content": "hm", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "go on"},
    ]
    await client.chat.completions.create(model=MODEL, messages=messages)
    prompt = service.tokenizer._hf.decode(list(service.coordinator.requests[0].prompt))
    expected = "<|system|>be brief<|end|><|user|>one\ntwo<|end|><|assistant|>hm<|end|><|user|>go on<|end|>"
    assert prompt == f"{expected}<|assistant|>"


# ---- the extension for drafts


async def test_a_stream_with_detail_marks_every_piece_of_text_and_ends_with_the_figures(
    http: httpx.AsyncClient,
) -> None:
    body = {"model": MODEL, "messages": HELLO, "stream": True, "speculation_detail": True}
    _, *chunks, last = events_of((await http.post("/v1/chat/completions", json=body)).text)
    for chunk in chunks:
        marked = chunk["outrider"]["tokens"]
        assert "".join(one["text"] for one in marked) == chunk["choices"][0]["delta"]["content"]
    assert {one["drafted"] for chunk in chunks for one in chunk["outrider"]["tokens"]} == {True, False}
    assert last["choices"][0]["finish_reason"] == "stop"
    figures = last["outrider"]
    assert figures["rounds"] > 3
    assert figures["acceptance_rate"] == 1.0
    assert figures["mean_acceptance_length"] == 1 + figures["accepted_tokens"] / figures["rounds"]
    assert set(figures) >= {"draft_tokens", "duration_s", "time_to_first_token_s"}


async def test_with_usage_the_figures_come_beside_it(http: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": "x", "speculation_detail": True, "max_tokens": 100}
    *_, ending, last = events_of(
        (
            await http.post(
                "/v1/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
            )
        ).text
    )
    assert "outrider" not in ending
    assert last["choices"] == []
    assert last["outrider"]["rounds"] > 3
    whole = (await http.post("/v1/completions", json=body)).json()
    assert "".join(one["text"] for one in whole["outrider"]["tokens"]) == whole["choices"][0]["text"] == REPLY
    assert whole["outrider"]["draft_tokens"] == last["outrider"]["draft_tokens"]


async def test_plain_decoding_has_no_acceptance_to_report(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "messages": HELLO, "speculative": False, "speculation_detail": True}
    detail = (await http.post("/v1/chat/completions", json=body)).json()["outrider"]
    assert (detail["rounds"], detail["acceptance_rate"], detail["mean_acceptance_length"]) == (0, None, None)
    assert not any(one["drafted"] for one in detail["tokens"])


# ---- several choices


async def test_choices_are_independent_generations_that_differ_in_their_index_alone(
    client: AsyncOpenAI, service: ScriptedService
) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO, n=3, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {REPLY}
    requests = service.coordinator.requests
    assert [request.sampling.choice for request in requests] == [0, 1, 2]
    assert {request.sampling.seed for request in requests} == {5}
    reply = len(service.tokenizer.encode(REPLY)) + 1
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(requests[0].prompt), "the prompt counts once"
    assert answer.usage.completion_tokens == 3 * reply


async def test_streamed_choices_interleave_and_each_has_a_role_and_a_reason(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=HELLO, n=3, stream=True, stream_options={"include_usage": True}
    )
    *chunks, usage = [chunk async for chunk in stream]
    order = [chunk.choices[0].index for chunk in chunks]
    assert order != sorted(order), "one after the other would make the last wait for the first"
    for index in range(3):
        first, *deltas, last = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert (first.delta.role, first.delta.content) == ("assistant", "")
        assert "".join(choice.delta.content or "" for choice in deltas) == REPLY
        assert (last.finish_reason, last.delta.content) == ("stop", None)
        assert all(choice.finish_reason is None for choice in deltas)
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens > 30


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failing_choice_ends_the_answer_and_frees_the_others(
    http: httpx.AsyncClient, service: ScriptedService, stream: bool
) -> None:
    service.coordinator.midway, service.coordinator.fails = GenerationError("NaN in the logits"), 1
    reply = await http.post("/v1/chat/completions", json=CHAT | {"n": 3, "stream": stream})
    if stream:
        assert reply.status_code == 200
        assert "NaN in the logits" in events_of(reply.text)[-1]["error"]["message"]
    else:
        assert reply.status_code == 500
    assert service.coordinator.active == 0
    assert value(service.telemetry, "vllm:num_requests_running") == 0


async def test_a_client_that_leaves_cancels_every_choice(
    client: AsyncOpenAI, service: ScriptedService
) -> None:
    service.coordinator.may_go_on.clear()
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, n=4, stream=True)
    await anext(aiter(stream))
    await until(lambda: service.coordinator.active == 4)
    await stream.close()
    await until(lambda: service.coordinator.active == 0)
    assert service.coordinator.cancelled == 4


async def test_the_figures_of_several_choices_are_their_sums(http: httpx.AsyncClient) -> None:
    body = CHAT | {"speculation_detail": True}
    one = (await http.post("/v1/chat/completions", json=body)).json()["outrider"]
    three = (await http.post("/v1/chat/completions", json=body | {"n": 3})).json()["outrider"]
    for key in ("rounds", "draft_tokens", "accepted_tokens"):
        assert three[key] == 3 * one[key] > 0
    assert three["acceptance_rate"] == one["acceptance_rate"]
    assert "tokens" not in three, "whose they are could not be told"


# ---- log-probabilities


async def test_chat_logprobs_have_an_entry_a_token_with_its_bytes_and_alternatives(
    client: AsyncOpenAI, service: ScriptedService
) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    entries = logprobs.content
    assert entries is not None
    tokens = [*service.tokenizer.encode(REPLY), *service.tokenizer.eos_token_ids]
    assert answer.usage is not None
    assert len(entries) == len(tokens) == answer.usage.completion_tokens
    assert b"".join(bytes(entry.bytes or ()) for entry in entries).decode() == REPLY
    assert entries[-1].bytes is None, "the end has a name and no text"
    assert entries[-1].token == "<|end|>"
    assert [entry.logprob for entry in entries] == [-float(place) for place in range(len(tokens))]
    assert all([one.logprob for one in entry.top_logprobs] == [-1.0, -2.0] for entry in entries)


async def test_logprobs_of_a_stream_come_once_a_token_also_where_the_text_is_held_back(
    client: AsyncOpenAI, service: ScriptedService
) -> None:
    """A round of one token: the first bytes of an emoji have an entry and no text yet."""
    service.coordinator.num_drafts = 0
    whole = await client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True)
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, stream=True)
    choices = [chunk.choices[0] async for chunk in stream]
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or ()]
    assert whole.choices[0].logprobs is not None
    assert entries == whole.choices[0].logprobs.content
    assert any(choice.logprobs and not choice.delta.content for choice in choices)


async def test_completion_logprobs_say_where_in_the_text_each_token_begins(
    client: AsyncOpenAI, service: ScriptedService
) -> None:
    answer = await client.completions.create(model=MODEL, prompt="x", max_tokens=100, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    tokens, offsets = logprobs.tokens, logprobs.text_offset
    assert tokens is not None
    assert offsets is not None
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        if not token.startswith("bytes:") and token != "<|end|>":
            assert REPLY[offset : offset + len(token)] == token
    assert len(tokens) == len(service.tokenizer.encode(REPLY)) + 1
    assert logprobs.top_logprobs is not None
    assert all(tokens[place] in top for place, top in enumerate(logprobs.top_logprobs))
    bare = await client.completions.create(model=MODEL, prompt="x", logprobs=0)
    assert bare.choices[0].logprobs is not None
    assert bare.choices[0].logprobs.top_logprobs is None
    assert bare.choices[0].logprobs.token_logprobs is not None


async def test_logprobs_end_with_the_token_that_completed_the_stop_string(
    client: AsyncOpenAI, service: ScriptedService
) -> None:
    """Public report 16: ids and log-probabilities past the stop were reported."""
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO, stop="你", logprobs=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    assert "你" in b"".join(bytes(entry.bytes or ()) for entry in logprobs.content).decode(errors="ignore")


async def test_without_logprobs_every_choice_says_null(http: httpx.AsyncClient) -> None:
    for route, body in (("chat/completions", CHAT), ("completions", TEXT)):
        answer = (await http.post(f"/v1/{route}", json=body)).json()
        assert answer["choices"][0]["logprobs"] is None


# ---- what is passed on


async def test_every_field_of_a_request_reaches_the_coordinator(
    http: httpx.AsyncClient, service: ScriptedService
) -> None:
    body = TEXT | {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "min_p": 0.1,
        "logit_bias": {"5": -100, "7": 2.5},
        "stop_token_ids": [9],
        "ignore_eos": True,
        "min_tokens": 2,
        "logprobs": 3,
    }
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    (request,) = service.coordinator.requests
    sampling = request.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.min_p) == (1.2, 0.1)
    assert sampling.logit_bias == ((5, -100.0), (7, 2.5))
    assert (request.stop_token_ids, request.ignore_eos, request.min_tokens) == ((9,), True, 2)
    assert request.logprobs == 3


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("field", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "json_schema",
            json.dumps(SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"structured_outputs": {"regex": "[a-z]+"}}, "regex", "[a-z]+"),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, "ebnf", 'root ::= "a" | "b"'),
    ],
)
@pytest.mark.parametrize(("route", "body"), [("chat/completions", "chat"), ("completions", "text")])
async def test_what_the_text_must_match_is_spelled_as_openai_and_vllm_do(
    http: httpx.AsyncClient,
    service: ScriptedService,
    route: str,
    body: str,
    field: dict[str, Any],
    kind: Any,
    text: str,
) -> None:
    reply = await http.post(f"/v1/{route}", json=(CHAT if body == "chat" else TEXT) | field)
    assert reply.status_code == 200
    assert service.coordinator.requests[0].grammar == Grammar(kind, text)


@pytest.mark.parametrize(
    ("field", "param"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "blob"}},
                }
            },
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "root ::="}}, "structured_outputs.grammar"),
    ],
)
async def test_a_grammar_that_is_none_is_400_naming_the_field(
    http: httpx.AsyncClient, service: ScriptedService, field: dict[str, Any], param: str
) -> None:
    reply = await http.post("/v1/chat/completions", json=CHAT | field)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert service.coordinator.requests == []


@pytest.mark.parametrize(
    "content", ["two words", [{"type": "text", "text": "two"}, {"type": "text", "text": " words"}]]
)
async def test_a_prediction_is_tokens_of_the_answer_without_those_around_a_prompt(
    client: AsyncOpenAI, service: ScriptedService, content: Any
) -> None:
    await client.chat.completions.create(
        model=MODEL, messages=HELLO, prediction={"type": "content", "content": content}
    )
    (request,) = service.coordinator.requests
    assert list(request.prediction) == service.tokenizer.encode_piece("two words")


@pytest.mark.parametrize("prompt", ["the text", None])
@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_in_front_of_every_choice(
    http: httpx.AsyncClient, service: ScriptedService, prompt: str | None, stream: bool
) -> None:
    asked = prompt or service.tokenizer.encode("the text")
    body = {"model": MODEL, "prompt": asked, "max_tokens": 100, "echo": True, "n": 2, "stream": stream}
    reply = await http.post("/v1/completions", json=body)
    texts = ["", ""]
    for document in events_of(reply.text) if stream else [reply.json()]:
        for choice in document["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["the text" + REPLY] * 2


async def test_min_tokens_that_cannot_fit_the_context_are_refused_with_both_numbers(
    http: httpx.AsyncClient,
) -> None:
    reply = await http.post("/v1/chat/completions", json=CHAT | {"min_tokens": 10**30})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


# ---- vLLM's block of one request

METRICS = {"per_request_spec_decode_metrics": "summary"}


async def test_the_acceptance_of_a_request_is_told_to_who_asks_in_vllms_shape(
    http: httpx.AsyncClient, service: ScriptedService
) -> None:
    plain = (await http.post("/v1/chat/completions", json=CHAT)).json()
    assert "metrics" not in plain, "off by default: it is a side channel"
    answer = (await http.post("/v1/chat/completions", json=CHAT | METRICS)).json()
    block = answer["metrics"]["speculative_decoding"]
    size = len(service.tokenizer.encode(REPLY)) + 1
    full, rest = divmod(size, 5)
    assert block["num_spec_steps"] == full + (rest > 1)
    assert block["num_draft_tokens"] == block["num_accepted_draft_tokens"] == 4 * full + max(rest - 1, 0)
    assert block["draft_acceptance_rate"] == 1.0
    assert block["mean_acceptance_length"] == 1 + block["num_accepted_draft_tokens"] / block["num_spec_steps"]
    assert sum(block["acceptance_histogram"]) == block["num_spec_steps"]
    assert sum(sum(row) for row in block["acceptance_histogram_by_draft_length"].values()) == sum(
        block["acceptance_histogram"]
    )
    assert all(len(row) == int(k) + 1 for k, row in block["acceptance_histogram_by_draft_length"].items())
    assert "per_step_accepted" not in block
    detailed = {"per_request_spec_decode_metrics": "detailed"}
    answer = (await http.post("/v1/chat/completions", json=CHAT | detailed)).json()
    block = answer["metrics"]["speculative_decoding"]
    assert block["per_step_accepted"] == block["per_step_drafted"]
    assert sum(block["per_step_drafted"]) == block["num_draft_tokens"]


async def test_the_block_is_null_for_several_choices_and_where_nobody_drafts(
    http: httpx.AsyncClient,
) -> None:
    for other in ({"n": 2}, {"speculative": False}):
        answer = (await http.post("/v1/chat/completions", json=CHAT | METRICS | other)).json()
        assert answer["metrics"] == {"speculative_decoding": None}


async def test_a_stream_has_the_block_beside_its_usage_only(http: httpx.AsyncClient) -> None:
    body = CHAT | METRICS | {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events_of((await http.post("/v1/chat/completions", json=body)).text)
    assert all("metrics" not in chunk for chunk in chunks)
    assert last["metrics"]["speculative_decoding"]["num_spec_steps"] > 3
    refused = await http.post("/v1/chat/completions", json=CHAT | METRICS | {"stream": True})
    assert refused.json()["error"]["param"] == "per_request_spec_decode_metrics"


async def test_usage_says_nothing_of_predictions_that_nobody_gave(client: AsyncOpenAI) -> None:
    """Drafts of the service are not the client's prediction."""
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
    assert details.reasoning_tokens == 0


# ---- what clients do wrong


CHAT: dict[str, Any] = {"model": MODEL, "messages": HELLO}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "x"}


@pytest.mark.parametrize(
    ("route", "body", "param", "says"),
    [
        ("chat/completions", CHAT | {"tools": [{"type": "function"}]}, "tools", "not supported"),
        ("chat/completions", CHAT | {"max_tokens": -1}, "max_tokens", "greater than or equal to 1"),
        ("completions", TEXT | {"prompt": ""}, "prompt", "at least one token"),
        ("completions", TEXT | {"prompt": [-1]}, "prompt", "-1 is outside the vocabulary"),
        ("completions", TEXT | {"prompt": [10**6]}, "prompt", "1000000 is outside the vocabulary"),
        ("completions", [], None, "JSON object"),
    ],
)
async def test_a_wrong_body_is_answered_400_naming_the_field(
    http: httpx.AsyncClient, service: ScriptedService, route: str, body: object, param: str | None, says: str
) -> None:
    reply = await http.post(f"/v1/{route}", json=body)
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (reply.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert says in error["message"]
    assert service.coordinator.requests == []


@pytest.mark.parametrize("length", [199, 200, 250])
async def test_what_does_not_fit_the_context_is_refused_with_both_numbers(
    client: AsyncOpenAI, length: int
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model=MODEL, prompt=[7] * length, max_tokens=2)
    assert refused.value.code == "context_length_exceeded"
    assert f"{length} tokens" in refused.value.message
    assert "200" in refused.value.message


async def test_a_prompt_that_leaves_room_for_one_token_is_answered(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt=[7] * 199, max_tokens=1)
    assert answer.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="context"):
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 500}])


async def test_another_model_is_404(client: AsyncOpenAI) -> None:
    for call in (
        client.chat.completions.create(model="other", messages=HELLO),
        client.completions.create(model="other", prompt="x"),
        client.models.retrieve("other"),
    ):
        with pytest.raises(openai.NotFoundError) as unknown:
            await call
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        assert MODEL in unknown.value.message


async def test_the_served_model_is_listed_and_found(client: AsyncOpenAI, service: ScriptedService) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    card = await client.models.retrieve(MODEL)
    assert (card.created, card.object) == (service.created, "model")


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_of_ten_megabytes_is_413_and_the_service_goes_on(
    http: httpx.AsyncClient, declared: bool
) -> None:
    body = json.dumps(TEXT | {"prompt": "x" * 10_000_000}).encode()

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    reply = await http.post("/v1/completions", content=body if declared else parts())
    assert reply.status_code == 413
    assert reply.json()["error"]["code"] == "body_too_large"
    assert (await http.post("/v1/completions", json=TEXT)).status_code == 200


async def test_the_body_limit_may_change_while_the_service_runs(
    http: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.options = RouterOptions(limits=LimitOptions(max_body_bytes=10))
    assert (await http.post("/v1/completions", json=TEXT)).status_code == 413


async def test_other_routes_and_methods_are_answered_in_the_same_shape(http: httpx.AsyncClient) -> None:
    lost, wrong = await http.get("/v1/embeddings"), await http.get("/v1/completions")
    assert (lost.status_code, lost.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert (await http.get("/docs")).status_code == (await http.get("/openapi.json")).status_code == 404


# ---- what goes wrong behind the routes


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (OverloadedError("full", retry_after_s=2.4), 429, "rate_limit_error", "rate_limit_exceeded"),
        (UnavailableError("no verifier"), 503, "server_error", "service_unavailable"),
        (GenerationError("NaN in the logits"), 500, "server_error", "generation_failed"),
        (ZeroDivisionError("secret"), 500, "server_error", None),
    ],
)
async def test_an_error_before_the_first_token_has_its_status(
    http: httpx.AsyncClient,
    service: ScriptedService,
    stream: bool,
    error: Exception,
    status: int,
    kind: str,
    code: str | None,
) -> None:
    service.coordinator.before = error
    reply = await http.post(
        "/v1/chat/completions", json=CHAT | {"stream": stream}, headers={"X-Request-Id": "r7"}
    )
    body = reply.json()["error"]
    assert (reply.status_code, body["type"], body["code"]) == (status, kind, code)
    assert reply.headers["x-request-id"] == "r7"
    assert ("2" if status == 429 else None) == reply.headers.get("retry-after")
    if isinstance(error, OutriderError):
        assert body["message"] == str(error)
    assert "secret" not in reply.text
    assert "Traceback" not in reply.text
    service.coordinator.before = None
    assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200


@pytest.mark.parametrize("error", [GenerationError("NaN in the logits"), ZeroDivisionError("secret")])
async def test_an_error_in_a_stream_is_an_event_that_the_client_raises(
    client: AsyncOpenAI, service: ScriptedService, error: Exception
) -> None:
    service.coordinator.midway = error
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    chunks = aiter(stream)
    assert [(await anext(chunks)).object for _ in range(2)] == ["chat.completion.chunk"] * 2
    with pytest.raises(openai.APIError) as failed:
        await anext(chunks)
    assert "secret" not in failed.value.message
    assert ("NaN" in failed.value.message) == isinstance(error, OutriderError)
    assert service.coordinator.active == 0


async def test_a_client_that_leaves_a_stream_cancels_its_generation(
    client: AsyncOpenAI, service: ScriptedService
) -> None:
    service.coordinator.may_go_on.clear()
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    await anext(aiter(stream))
    assert service.coordinator.active == 1
    await stream.close()
    await until(lambda: service.coordinator.active == 0)
    assert service.coordinator.cancelled == 1
    assert value(service.telemetry, "outrider_requests_cancelled_total") == 1
    assert value(service.telemetry, "vllm:num_requests_running") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_cancels_its_generation(
    http: httpx.AsyncClient, service: ScriptedService, stream: bool
) -> None:
    service.coordinator.may_begin.clear()
    asking = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT | {"stream": stream}))
    await asyncio.wait_for(service.coordinator.begun.wait(), 10)
    assert value(service.telemetry, "vllm:num_requests_waiting") == 1
    asking.cancel()
    await until(lambda: service.coordinator.active == 0)
    assert service.coordinator.cancelled == 1
    assert value(service.telemetry, "vllm:num_requests_waiting") == 0


# ---- headers, health, metrics


async def test_trace_context_is_passed_on_when_it_is_well_formed(
    http: httpx.AsyncClient, service: ScriptedService
) -> None:
    good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for given in (good, "00-" + "0" * 32 + "-b7ad6b7169203331-01", good.upper(), good + "-x", ""):
        await http.post("/v1/completions", json=TEXT, headers={"traceparent": given})
    assert [request.traceparent for request in service.coordinator.requests] == [good, None, None, None, None]


async def test_every_answer_has_a_request_id_its_clients_own_if_it_is_sane(http: httpx.AsyncClient) -> None:
    own = await http.get("/v1/models", headers={"X-Request-Id": "mine-1"})
    assert own.headers.get_list("x-request-id") == ["mine-1"]
    odd = await http.get("/nowhere", headers={"X-Request-Id": "a" * 200})
    assert re.fullmatch("[0-9a-f]{32}", odd.headers["x-request-id"])


async def test_health_tells_readiness_and_speculation_apart(
    http: httpx.AsyncClient, service: ScriptedService
) -> None:
    assert (await http.get("/health/live")).json() == {"status": "live"}
    ready = await http.get("/health/ready")
    assert (ready.status_code, ready.json()["status"]) == (200, "ready")
    assert ready.json()["speculation"] == {"active": True, "reason": None}
    assert ready.json()["refused_changes"] == []
    assert ready.json()["numerics"] == "strict"
    service.readiness = Readiness(False, "no verifier answers", False, "no speculative_config")
    for route in ("/health/ready", "/health"):
        down = await http.get(route)
        assert (down.status_code, down.json()["reason"]) == (503, "no verifier answers")
        assert down.json()["speculation"] == {"active": False, "reason": "no speculative_config"}
    assert (await http.get("/health/live")).status_code == 200


async def test_health_names_the_replicas_that_refused_a_change_and_stays_ready(
    http: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.readiness = Readiness(
        True, None, True, None, "fast", (Refusal("Verifier v1", "unknown key 'dtype'"),)
    )
    ready = await http.get("/health/ready")
    assert (ready.status_code, ready.json()["speculation"]["active"]) == (200, True)
    assert ready.json()["refused_changes"] == [{"replica": "Verifier v1", "reason": "unknown key 'dtype'"}]


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for metric in text_string_to_metric_families(text)
        for sample in metric.samples
    }


def value(telemetry: Telemetry, name: str) -> float:
    return sum(
        sample.value for family in telemetry.snapshot() for sample in family.samples if sample.name == name
    )


async def test_metrics_are_those_of_all_routers_side_by_side_whichever_is_asked(
    tokenizer: Tokenizer, running: Running
) -> None:
    one, other = ScriptedService(tokenizer, "r1"), ScriptedService(tokenizer, "r2")
    one.peers, other.peers = [other.telemetry], [one.telemetry]
    async with running(one) as here, running(other) as there, httpx.AsyncClient(timeout=20) as http:
        for address, times in ((here, 1), (there, 2)):
            for _ in range(times):
                await http.post(f"{address}/v1/chat/completions", json=CHAT)
        await http.post(f"{here}/v1/chat/completions", json=CHAT | {"max_tokens": 3})
        await http.post(f"{there}/v1/chat/completions", json=CHAT | {"top_k": -9})
        seen, also = [samples((await http.get(f"{a}/metrics")).text) for a in (here, there)]
    assert seen == also

    def by_router(name: str, **labels: str) -> list[float | None]:
        labels |= {"model_name": MODEL}
        keys = [(name, tuple(sorted((labels | {"engine": engine}).items()))) for engine in ("r1", "r2")]
        return [seen.get(key) for key in keys]

    assert by_router("outrider_routers") == [1, 1]
    assert by_router("vllm:request_success_total", finished_reason="stop") == [1, 2]
    assert by_router("vllm:request_success_total", finished_reason="length") == [1, 0]
    assert by_router("vllm:time_to_first_token_seconds_count") == [2, 2]
    assert by_router("vllm:num_requests_running") == [0, 0]
    assert by_router("outrider_requests_refused_total", status="400") == [None, 1]


async def test_the_counters_add_up_to_what_the_answers_report(
    http: httpx.AsyncClient, service: ScriptedService
) -> None:
    """vLLM's rule: where every request has one choice, the sums of its blocks are the counters.

    Public report 43: two tools disagreed on the acceptance length.
    """
    bodies = [
        CHAT | extra | {"speculation_detail": True, "per_request_spec_decode_metrics": "summary"}
        for extra in ({}, {"stop": "你"}, {"max_tokens": 7})
    ]
    answers = [(await http.post("/v1/chat/completions", json=body)).json() for body in bodies]
    seen = samples((await http.get("/metrics")).text)
    base = (("engine", "r1"), ("model_name", MODEL))
    blocks = [answer["metrics"]["speculative_decoding"] for answer in answers]

    def reported(key: str, also: str) -> int:
        total = sum(int(block[key]) for block in blocks)
        assert total == sum(int(answer["outrider"][also]) for answer in answers)
        return total

    assert seen["vllm:spec_decode_num_drafts_total", base] == reported("num_spec_steps", "rounds") > 0
    assert seen["vllm:spec_decode_num_draft_tokens_total", base] == reported(
        "num_draft_tokens", "draft_tokens"
    )
    accepted = reported("num_accepted_draft_tokens", "accepted_tokens")
    assert seen["vllm:spec_decode_num_accepted_tokens_total", base] == accepted
    by_position = [
        seen["vllm:spec_decode_num_accepted_tokens_per_pos_total", (*base, ("position", str(place)))]
        for place in range(4)
    ]
    assert by_position == [
        sum(sum(block["acceptance_histogram"][place + 1 :]) for block in blocks) for place in range(4)
    ]
    for block, answer in zip(blocks, answers, strict=True):
        assert block["mean_acceptance_length"] == answer["outrider"]["mean_acceptance_length"]
    completion = sum(answer["usage"]["completion_tokens"] for answer in answers)
    assert seen["vllm:generation_tokens_total", base] == completion
    wasted = sum(answer["outrider"]["wasted_draft_tokens"] for answer in answers)
    assert seen["outrider_wasted_draft_tokens_total", base] == wasted
