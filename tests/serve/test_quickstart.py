"""The quickstart file with its real model on a real cluster, used through the official `openai` client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import yaml
from ray import serve

from outrider_serve.launch import deploy, local_ray, with_port
from outrider_serve.router import ask_all
from outrider_serve.verifier import VerifierStats

pytestmark = [pytest.mark.ray, pytest.mark.smollm2]

MANIFEST = Path(__file__).resolve().parents[2] / "manifests" / "quickstart.yaml"
PATIENCE_S = 60.0
REWRITE = [
    {
        "role": "user",
        "content": "Copy this list of towns in the same order, one a line: Bremen, Coimbra, Izmir, Bergen, "
        "Bremen, Coimbra, Izmir, Bergen, Bremen, Coimbra, Izmir, Bergen",
    }
]


@pytest.fixture(scope="module")
def url(smollm2: Path) -> Iterator[str]:
    configuration = with_port(yaml.safe_load(MANIFEST.read_text(encoding="utf-8")), 0)
    with local_ray() as cluster:
        yield deploy(configuration, cluster, timeout_s=180, report=lambda progress: None).url
        serve.shutdown()


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    http = httpx.Client(trust_env=False, timeout=PATIENCE_S)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http) as client:
        yield client


def chat(client: openai.OpenAI, **options: object) -> str:
    arguments = {"model": "smollm2", "messages": REWRITE, "max_tokens": 48, "temperature": 0, **options}
    answer = client.chat.completions.create(**arguments)
    return str(answer.choices[0].message.content)


def test_models_lists_the_one_that_is_served(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").id == "smollm2"


def test_a_chat_has_the_same_text_plain_drafted_and_streamed(client: openai.OpenAI) -> None:
    drafted = chat(client)
    assert "Coimbra" in drafted
    assert chat(client, extra_body={"speculative": False}) == drafted
    stream = client.chat.completions.create(
        model="smollm2",
        messages=REWRITE,
        max_tokens=48,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"speculation_detail": True},
    )
    events = list(stream)
    assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == drafted
    assert events[-1].choices == []
    assert (
        events[-1].usage.total_tokens == events[-1].usage.prompt_tokens + events[-1].usage.completion_tokens
    )
    assert events[-1].outrider["accepted_tokens"] > 0


def test_a_completion_takes_text_or_ids_and_a_seed_repeats_it(client: openai.OpenAI) -> None:
    def sampled(seed: int) -> str:
        answer = client.completions.create(
            model="smollm2", prompt="The sea is", max_tokens=16, temperature=0.9, seed=seed
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 16
        return str(answer.choices[0].text)

    assert sampled(3) == sampled(3) != sampled(4)
    by_ids = client.completions.create(model="smollm2", prompt=[504, 3575, 314], max_tokens=4, temperature=0)
    assert by_ids.choices[0].finish_reason == "length"


def test_characters_of_several_bytes_arrive_whole(client: openai.OpenAI) -> None:
    prompt = "Ağaç, çiçek, şeker, 草稿, 🙂🚀. Ağaç, çiçek, şeker, 草稿, 🙂🚀. Ağaç, çiçek,"
    options = {"model": "smollm2", "prompt": prompt, "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**options).choices[0].text
    pieces = [event.choices[0].text for event in client.completions.create(**options, stream=True)]
    assert "".join(pieces) == whole
    assert "şeker" in whole
    assert "\ufffd" not in whole.rstrip("\ufffd")  # the last token may end inside a character


def test_errors_come_as_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        chat(client, model="gpt-9")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        chat(client, max_tokens=-5)
    with pytest.raises(openai.BadRequestError, match="tools"):
        chat(client, tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="smollm2", prompt="word " * 5000, max_tokens=4)
    assert chat(client, max_tokens=4)


async def test_a_cancelled_stream_frees_its_sequence(url: str) -> None:
    http = httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http) as client:
        stream = await client.completions.create(
            model="smollm2", prompt="One two three four", max_tokens=2000, temperature=0, stream=True
        )
        async for _ in stream:
            break
        await stream.close()
        async with asyncio.timeout(PATIENCE_S):
            await until_free()
    assert sum(one.engine.cancelled for one in await verifiers()) == 1


async def until_free() -> None:
    while True:
        if not any(one.leased + one.engine.running for one in await verifiers()):
            return
        await asyncio.sleep(0.1)


async def verifiers() -> list[VerifierStats]:
    return await ask_all(serve.get_deployment_handle("Verifier", "quickstart"), "stats", VerifierStats)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b'"text"', 400),
        (json.dumps({"model": "smollm2", "messages": []}).encode(), 400),
        (json.dumps({"model": "smollm2", "messages": "hello"}).encode(), 400),
        (json.dumps({"model": ["smollm2"], "messages": REWRITE}).encode(), 400),
        (json.dumps({"model": "smollm2", "messages": REWRITE, "temprature": 1}).encode(), 400),
        (b'{"model": "' + b"x" * 10_000_000 + b'"}', 413),
    ],
)
def test_bad_bodies_are_answered_and_the_service_serves_on(
    url: str, client: openai.OpenAI, content: bytes, status: int
) -> None:
    answer = httpx.post(
        f"{url}/v1/chat/completions",
        content=content,
        headers={"Content-Type": "application/json"},
        timeout=PATIENCE_S,
        trust_env=False,
    )
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text
    assert chat(client, max_tokens=2)
