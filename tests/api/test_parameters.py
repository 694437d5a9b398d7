"""Request fields over HTTP, with the official client, on a real engine whose drafts are nearly all accepted.

The drafter has the target's own weights, so every field acts inside blocks of drafts; the same request with
`speculative: false` is plain decoding, the truth that it must equal. The numbers are rows of the public
reports on speculative decoding that these tests rule out.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeAlias

import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion

import outrider
from outrider.config import RouterOptions
from outrider.inprocess import LocalService
from outrider_serve.ingress import Readiness
from outrider_serve.telemetry import Snapshot, Telemetry

Running: TypeAlias = Callable[[Any], AbstractAsyncContextManager[str]]

MODEL = "tiny"
PROMPT = "The router drafts, the verifier accepts"
K = 4
PLAIN: dict[str, Any] = {"speculative": False}


class LocalHttp:
    """A `Service` over the coordinator of `outrider.local`."""

    model_name = MODEL
    created = 1_790_000_000

    def __init__(self, local: LocalService) -> None:
        self.coordinator = local.coordinator
        self.tokenizer = local.tokenizer
        self.max_model_len = local.coordinator.target.max_model_len
        self.telemetry = Telemetry(MODEL, engine="r1")

    @property
    def options(self) -> RouterOptions:
        return self.coordinator.options

    async def ready(self) -> Readiness:
        return Readiness(True, None, True, None)

    async def snapshots(self) -> list[Snapshot]:
        return [self.telemetry.snapshot()]


@pytest.fixture(scope="module")
def local(tiny_llama: Path) -> Iterator[LocalService]:
    config = {
        "model": str(tiny_llama),
        "device": "cpu",
        "num_kv_blocks": 128,
        "speculative_config": {
            "method": "draft_model",
            "model": str(tiny_llama),
            "num_speculative_tokens": K,
            "extra": {"device": "cpu"},
        },
    }
    with outrider.local(config) as service:
        yield service


@pytest.fixture
def service(local: LocalService) -> LocalHttp:
    return LocalHttp(local)


@pytest.fixture
async def client(service: LocalHttp, running: Running) -> AsyncIterator[AsyncOpenAI]:
    async with (
        running(service) as address,
        AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def complete(client: AsyncOpenAI, **body: Any) -> Completion:
    """A greedy completion of PROMPT with 40 tokens, unless the body says otherwise."""
    extra = body.pop("extra", {})
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0} | body
    return await client.completions.create(model=MODEL, extra_body=extra, **asked)


async def with_and_without_drafts(client: AsyncOpenAI, **body: Any) -> Completion:
    """The answer, once it was found the same with drafts and without: text, reasons, usage, logprobs."""
    extra = body.pop("extra", {})
    speculated = await complete(client, extra=extra | {"speculation_detail": True}, **body)
    plain = await complete(client, extra=extra | PLAIN, **body)
    assert [(one.text, one.finish_reason) for one in speculated.choices] == [
        (one.text, one.finish_reason) for one in plain.choices
    ]
    assert speculated.usage is not None
    assert plain.usage is not None
    assert speculated.usage.completion_tokens == plain.usage.completion_tokens
    for one, other in zip(speculated.choices, plain.choices, strict=True):
        if one.logprobs is not None:
            assert other.logprobs is not None
            assert one.logprobs.tokens == other.logprobs.tokens
            assert one.logprobs.token_logprobs == pytest.approx(other.logprobs.token_logprobs, abs=1e-4)
    return speculated


def text_of(answer: Completion) -> str:
    return str(answer.choices[0].text)


def tokens_of(answer: Completion) -> list[str]:
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    return list(logprobs.tokens)


def drafts_accepted(answer: Completion | ChatCompletion) -> int:
    assert answer.model_extra is not None
    return int(answer.model_extra["outrider"]["accepted_tokens"])


# ---- stops and lengths


async def test_a_stop_string_at_any_place_of_a_block_trims_text_ids_logprobs_and_usage(
    client: AsyncOpenAI,
) -> None:
    """Public report 16."""
    text = text_of(await complete(client))
    stops = [text[at : at + 2] for at in range(6, 30) if text[at : at + 2].isprintable()]
    stops = [stop for stop in stops if "\ufffd" not in stop]
    assert len(stops) > K, "a stop for every place of a block"
    for stop in stops:
        answer = await with_and_without_drafts(client, stop=stop, logprobs=0)
        assert text_of(answer) == text[: text.index(stop)]
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert len(tokens_of(answer)) == answer.usage.completion_tokens < 40


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8])
async def test_exactly_max_tokens_are_delivered_and_counted(client: AsyncOpenAI, length: int) -> None:
    """Public reports 17 and 18."""
    answer = await with_and_without_drafts(client, max_tokens=length, logprobs=0)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert len(tokens_of(answer)) == answer.usage.completion_tokens == length


async def test_reasoning_tokens_are_never_more_than_completion_tokens(client: AsyncOpenAI) -> None:
    """Public report 19, with a stop inside a block."""
    free = await complete(client, logprobs=0)
    answer = await complete(client, stop=tokens_of(free)[6])
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.reasoning_tokens is not None
    assert 0 <= details.reasoning_tokens <= answer.usage.completion_tokens


async def test_a_stop_token_of_the_client_ends_inside_a_block_unless_it_comes_too_early(
    client: AsyncOpenAI, local: LocalService
) -> None:
    free = await complete(client, logprobs=0)
    last = local.generate(PROMPT, max_tokens=7, temperature=0, speculative=False).tokens[6]
    extra: dict[str, Any] = {"stop_token_ids": [last]}
    early = await with_and_without_drafts(client, extra=extra, logprobs=0)
    assert early.choices[0].finish_reason == "stop"
    assert early.usage is not None
    assert early.usage.completion_tokens <= 7
    late = await with_and_without_drafts(client, extra=extra | {"min_tokens": 12}, logprobs=0)
    assert tokens_of(free)[6] not in tokens_of(late)[:12]
    assert late.usage is not None
    assert late.usage.completion_tokens >= 12


# ---- what changes the logits


async def test_a_frequency_penalty_changes_the_text_as_it_does_without_drafts(client: AsyncOpenAI) -> None:
    """Public report 21: -2 and 2 gave the same text, without a word."""
    free = await complete(client)
    low = await with_and_without_drafts(client, frequency_penalty=-2)
    high = await with_and_without_drafts(client, frequency_penalty=2)
    assert len({text_of(one) for one in (free, low, high)}) == 3
    assert drafts_accepted(high) > 0


@pytest.mark.parametrize("k", range(1, K + 1))
async def test_a_penalty_is_as_strong_however_many_drafts_are_accepted(client: AsyncOpenAI, k: int) -> None:
    """Public report 22: only the last accepted token of a round was counted."""
    body: dict[str, Any] = {"frequency_penalty": 1, "presence_penalty": 0.5}
    plain = await complete(client, extra=PLAIN, **body)
    answer = await complete(
        client, extra={"speculative": {"max_tokens": k}, "speculation_detail": True}, **body
    )
    assert text_of(answer) == text_of(plain)
    assert drafts_accepted(answer) > 0


async def test_a_repetition_penalty_breaks_a_loop_as_it_does_without_drafts(client: AsyncOpenAI) -> None:
    """Public report 23."""
    looping = {"prompt": "serving " * 16}
    free = await complete(client, **looping)
    answer = await with_and_without_drafts(client, extra={"repetition_penalty": 1.15}, **looping)
    assert text_of(answer) != text_of(free)


async def test_a_token_banned_by_its_bias_is_at_no_position_of_a_block(
    client: AsyncOpenAI, local: LocalService
) -> None:
    """Public report 24: the bias acted on the bonus token only."""
    free = local.generate(PROMPT, max_tokens=K + 2, temperature=0, speculative=False).tokens
    names = tokens_of(await complete(client, max_tokens=K + 2, logprobs=0))
    for token, banned in zip(free, names, strict=True):
        answer = await with_and_without_drafts(client, logit_bias={str(token): -100}, logprobs=0)
        assert banned not in tokens_of(answer)


@pytest.mark.parametrize("extra", [{"min_p": 0.2}, {"top_k": 5}, {"min_p": 0.05, "repetition_penalty": 1.3}])
async def test_a_sampled_text_is_the_seeds_with_any_cut(client: AsyncOpenAI, extra: dict[str, Any]) -> None:
    """Public report 24: min_p acted on the bonus token only."""
    answer = await with_and_without_drafts(
        client, extra=extra, temperature=1.0, top_p=0.9, seed=11, logprobs=3
    )
    assert drafts_accepted(answer) > 0


async def test_ids_that_are_no_tokens_are_400_naming_the_field(client: AsyncOpenAI) -> None:
    for field, extra in (
        ("logit_bias", {"logit_bias": {"99999": 1}}),
        ("stop_token_ids", {"stop_token_ids": [-1]}),
        ("stop_token_ids", {"stop_token_ids": [2**70]}),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await complete(client, extra=extra)
        assert refused.value.param == field
        assert "ids go from 0 to" in refused.value.message


# ---- several choices


async def test_three_choices_are_three_streams_and_a_greedy_one_thrice_the_same(client: AsyncOpenAI) -> None:
    """Public report 45."""
    body: dict[str, Any] = {"temperature": 1.0, "seed": 3, "logprobs": 0}
    answer = await with_and_without_drafts(client, n=3, **body)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 3
    first = await complete(client, **body)
    assert text_of(first) == text_of(answer), "a choice does not depend on how many there are"
    greedy = await with_and_without_drafts(client, n=3)
    assert len({choice.text for choice in greedy.choices}) == 1


@pytest.mark.parametrize("extra", [{"best_of": 3}, {"use_beam_search": True}])
async def test_beams_are_refused_and_never_something_else(client: AsyncOpenAI, extra: dict[str, Any]) -> None:
    """Public report 46."""
    with pytest.raises(openai.BadRequestError) as refused:
        await complete(client, extra=extra)
    assert refused.value.param in extra


# ---- grammars and predictions

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["one", "two"]}, "fits": {"type": "boolean"}},
    "required": ["name", "fits"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0, 1.0])
async def test_an_answer_with_a_schema_parses_and_is_the_same_without_drafts(
    client: AsyncOpenAI, temperature: float
) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": temperature,
        "seed": 5,
        "max_tokens": 100,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    }
    answer = await client.chat.completions.create(**asked)
    plain = await client.chat.completions.create(**asked, extra_body=PLAIN)
    assert answer.choices[0].finish_reason == "stop"
    document = json.loads(answer.choices[0].message.content or "")
    assert set(document) == {"name", "fits"}
    assert document["name"] in ("one", "two")
    assert answer.choices[0].message.content == plain.choices[0].message.content


async def test_an_answer_with_a_regex_matches_it(client: AsyncOpenAI) -> None:
    answer = await with_and_without_drafts(client, extra={"structured_outputs": {"regex": "(ab|cd){3}!"}})
    assert answer.choices[0].finish_reason == "stop"
    assert len(text_of(answer)) == 7
    assert set(text_of(answer)) <= set("abcd!")


@pytest.mark.parametrize(
    ("param", "extra"),
    [
        ("stop", {"stop": "x"}),
        ("stop_token_ids", {"stop_token_ids": [5]}),
        ("ignore_eos", {"ignore_eos": True}),
        ("min_tokens", {"min_tokens": 3}),
    ],
)
async def test_who_asks_for_a_grammar_may_not_say_where_the_text_ends(
    client: AsyncOpenAI, param: str, extra: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await complete(client, extra=extra | {"structured_outputs": {"regex": "a+"}})
    assert refused.value.param == param


async def test_more_tokens_at_least_than_at_most_are_refused(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await complete(client, max_tokens=5, extra={"min_tokens": 6})
    assert refused.value.param == "min_tokens"
    assert "max_tokens 5" in refused.value.message


async def test_only_what_the_client_predicted_counts_as_prediction(
    client: AsyncOpenAI, service: LocalHttp
) -> None:
    token = service.tokenizer.encode_piece(" the")[0]  # an answer that is made of the same tokens when read
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0,
        "max_tokens": 30,
        "logit_bias": {str(token): 100},
    }
    free = await client.chat.completions.create(**asked)
    text = free.choices[0].message.content or ""
    right = await client.chat.completions.create(
        **asked, prediction={"type": "content", "content": text}, extra_body={"speculation_detail": True}
    )
    wrong = await client.chat.completions.create(
        **asked, prediction={"type": "content", "content": " the the zzzz qqqq"}
    )
    for answer in (right, wrong):
        assert answer.choices[0].message.content == text
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 30
    assert right.usage is not None
    assert right.usage.completion_tokens_details is not None
    assert (right.usage.completion_tokens_details.accepted_prediction_tokens or 0) > 20
    assert wrong.usage is not None
    assert wrong.usage.completion_tokens_details is not None
    assert (wrong.usage.completion_tokens_details.accepted_prediction_tokens or 0) <= 2
    assert (wrong.usage.completion_tokens_details.rejected_prediction_tokens or 0) > 0
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(
            **asked, prediction={"type": "content", "content": text}, extra_body=PLAIN
        )
    assert refused.value.param == "prediction"


# ---- what it cost


async def test_blocks_of_requests_add_up_to_the_counters_and_so_does_the_work(
    client: AsyncOpenAI, service: LocalHttp
) -> None:
    """vLLM's rule, with what real rounds have: rejected drafts, a grammar's, the end inside a block.

    Public report 43.
    """
    bodies: list[dict[str, Any]] = [
        {},
        {"temperature": 1.5, "seed": 2},
        {"extra": {"structured_outputs": {"regex": "(ab|cd){3}!"}}},
        {"extra": {"repetition_penalty": 1.3}},
    ]
    wanted = {"per_request_spec_decode_metrics": "detailed", "speculation_detail": True}
    answers: list[Completion | ChatCompletion] = [
        await complete(client, **body | {"extra": body.get("extra", {}) | wanted}) for body in bodies
    ]
    answers.append(
        await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hello"}],
            temperature=0,
            max_tokens=30,
            logit_bias={str(service.tokenizer.encode_piece(" the")[0]): 100},
            prediction={"type": "content", "content": " the the zzzz qqqq"},
            extra_body=wanted,
        )
    )

    def counted(name: str, **labels: str) -> float:
        return sum(
            sample.value
            for family in service.telemetry.snapshot()
            for sample in family.samples
            if sample.name == name and labels.items() <= dict(sample.labels).items()
        )

    extras = [answer.model_extra or {} for answer in answers]
    blocks = [extra["metrics"]["speculative_decoding"] for extra in extras]
    details = [extra["outrider"] for extra in extras]
    for name, key in (
        ("num_drafts", "num_spec_steps"),
        ("num_draft_tokens", "num_draft_tokens"),
        ("num_accepted_tokens", "num_accepted_draft_tokens"),
    ):
        total = sum(block[key] for block in blocks)
        assert counted(f"vllm:spec_decode_{name}_total") == total > 0
    for block in blocks:
        assert len(block["per_step_drafted"]) == len(block["per_step_accepted"]) == block["num_spec_steps"]
        assert sum(block["acceptance_histogram"]) == block["num_spec_steps"]
        assert len(block["acceptance_histogram"]) == block["num_spec_tokens"] + 1 == K + 1
    assert counted("outrider_wasted_draft_tokens_total") == sum(one["wasted_draft_tokens"] for one in details)
    for kind, key in (
        ("target_committed", "committed_flops"),
        ("target_rejected", "rejected_flops"),
        ("drafter", "drafter_flops"),
    ):
        assert counted("outrider_estimated_flops_total", kind=kind) == sum(one[key] for one in details) > 0


async def test_work_is_two_flops_a_weight_and_row(client: AsyncOpenAI, service: LocalHttp) -> None:
    weights = service.coordinator.target.parameters
    prompt = f"a prompt that no other test has computed, {time.monotonic_ns()}"
    answer = await complete(client, prompt=prompt, max_tokens=10, extra=PLAIN | {"speculation_detail": True})
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    rows = answer.usage.prompt_tokens + 10 - (answer.usage.prompt_tokens_details.cached_tokens or 0)
    detail = (answer.model_extra or {})["outrider"]
    assert detail["committed_flops"] == 2 * weights * rows > 0
    assert detail["rejected_flops"] == detail["drafter_flops"] == detail["wasted_draft_tokens"] == 0
