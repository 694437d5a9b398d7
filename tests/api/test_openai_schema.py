"""Every field of the OpenAI bodies: honoured, refused by name, or unknown; never ignored silently."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as OpenAIChat
from openai.types.completion_create_params import CompletionCreateParamsBase as OpenAICompletion

from outrider.errors import RequestError
from outrider.messages import SamplingParams
from outrider_serve.openai_body import parse_body
from outrider_serve.openai_schema import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    Message,
    with_current_tables,
)
from outrider_serve.openai_unsupported import OUT_OF_SCOPE

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CHAT: dict[str, Any] = {"model": "m", "messages": HELLO}
TEXT: dict[str, Any] = {"model": "m", "prompt": "x"}
DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"


def parse(body: dict[str, Any]) -> GenerationBody:
    model = CompletionBody if "prompt" in body else ChatBody
    return parse_body(model, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"model": "m"}, "messages", "missing"),
        ({"messages": HELLO}, "model", "missing"),
        (CHAT | {"messages": []}, "messages", "at least 1"),
        (CHAT | {"messages": "hi"}, "messages", "list"),
        (
            CHAT | {"messages": [{"role": "tool", "content": "x"}]},
            "messages[0].role",
            "user",
        ),
        (CHAT | {"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        (
            CHAT | {"messages": [{"role": "user", "content": None}]},
            "messages[0].content",
            "parts",
        ),
        (
            CHAT
            | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "image_url",
        ),
        (CHAT | {"tools": [{"type": "function"}]}, "tools", "not supported"),
        (CHAT | {"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        (CHAT | {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        (
            CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "missing",
        ),
        (CHAT | {"structured_outputs": {}}, "structured_outputs", "exactly one"),
        (CHAT | {"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs", "exactly one"),
        (CHAT | {"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice", "not supported"),
        (
            CHAT | {"structured_outputs": {"regex": "a"}} | {"response_format": {"type": "json_object"}},
            "structured_outputs",
            "exclude each other",
        ),
        (CHAT | {"n": 0}, "n", "allowed is at least 1 and at most 16"),
        (CHAT | {"n": 17}, "n", "allowed is at least 1 and at most 16"),
        (CHAT | {"presence_penalty": 2.1}, "presence_penalty", "allowed is at least -2 and at most 2"),
        (CHAT | {"frequency_penalty": -3}, "frequency_penalty", "allowed is at least -2 and at most 2"),
        (CHAT | {"repetition_penalty": 0}, "repetition_penalty", "allowed is above 0 and at most 2"),
        (CHAT | {"min_p": 1.5}, "min_p", "allowed is at least 0 and at most 1"),
        (CHAT | {"min_tokens": -1}, "min_tokens", "allowed is at least 0"),
        (CHAT | {"logit_bias": {"the": 1}}, "logit_bias", "no token id"),
        (CHAT | {"logit_bias": {"-1": 1}}, "logit_bias", "no token id"),
        (CHAT | {"logit_bias": {"05": 1}}, "logit_bias", "no token id"),
        (CHAT | {"logit_bias": {"5": 100.5}}, "logit_bias", "allowed is -100 to 100"),
        (CHAT | {"logit_bias": {"5": True}}, "logit_bias.5", "number"),
        (CHAT | {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024"),
        (CHAT | {"stop_token_ids": [1] * 129}, "stop_token_ids", "at most 128"),
        (CHAT | {"stop": ["a"] * 10_000}, "stop", "at most 16"),
        (CHAT | {"top_logprobs": 3}, "top_logprobs", "logprobs: true"),
        (CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
        (CHAT | {"prediction": {"type": "content"}}, "prediction.content", "missing"),
        (
            CHAT | {"prediction": {"type": "content", "content": "x"}, "n": 2},
            "n",
            "1 choice",
        ),
        (CHAT | {"per_request_spec_decode_metrics": "all"}, "per_request_spec_decode_metrics", "summary"),
        (
            CHAT | {"max_tokens": 3, "max_completion_tokens": 4},
            "max_tokens",
            "differ",
        ),
        (CHAT | {"max_token": 3}, "max_token", "did you mean max_tokens?"),
        (CHAT | {"max_tokens": -1}, "max_tokens", "greater than or equal to 1"),
        (CHAT | {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        (CHAT | {"max_tokens": "5"}, "max_tokens", "integer"),
        (CHAT | {"max_tokens": True}, "max_tokens", "integer"),
        (CHAT | {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differ"),
        (CHAT | {"temperature": 2.5}, "temperature", "2"),
        (CHAT | {"temperature": -0.1}, "temperature", "0"),
        (CHAT | {"temperature": "warm"}, "temperature", "number"),
        (CHAT | {"top_p": 0}, "top_p", "greater than 0"),
        (CHAT | {"top_k": -2}, "top_k", "-1"),
        (CHAT | {"seed": 2**63}, "seed", "less"),
        (CHAT | {"stop": ["a"] * 17}, "stop", "16"),
        (CHAT | {"stop": [""]}, "stop", "1 to 256"),
        (CHAT | {"stop": [1]}, "stop", "list of strings"),
        (CHAT | {"stream": "yes"}, "stream", "boolean"),
        (
            CHAT | {"stream_options": {"include_usage": True}},
            "stream_options",
            "stream: true",
        ),
        (
            CHAT | {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "not supported",
        ),
        (CHAT | {"speculative": 3}, "speculative", "true, false or"),
        (CHAT | {"speculative": {"max_tokens": 65}}, "speculative.max_tokens", "64"),
        (TEXT | {"prompt": ""}, "prompt", "at least one token"),
        (TEXT | {"prompt": []}, "prompt", "at least one token"),
        (TEXT | {"prompt": [[]]}, "prompt", "at least one token"),
        (TEXT | {"prompt": ["a", "b"]}, "prompt", "send them apart"),
        (TEXT | {"prompt": [1, "a"]}, "prompt", '"a"'),
        (TEXT | {"prompt": [1.5]}, "prompt", "1.5"),
        (TEXT | {"prompt": 3}, "prompt", "string"),
        (TEXT | {"echo": True, "logprobs": 1}, "echo", "leave one out"),
        (TEXT | {"suffix": "."}, "suffix", "not supported"),
        (TEXT | {"logprobs": 6}, "logprobs", "allowed is at least 0 and at most 5"),
        (TEXT | {"logprobs": True}, "logprobs", "integer"),
        (TEXT | {"use_beam_search": True}, "use_beam_search", "not supported"),
        (TEXT | {"best_of": 2}, "best_of", "not supported"),
        (TEXT | {"temperature": -1}, "temperature", "allowed is at least 0 and at most 2"),
        (TEXT | {"top_p": 0}, "top_p", "allowed is above 0 and at most 1"),
        (TEXT | {"top_p": 2}, "top_p", "allowed is above 0 and at most 1"),
    ],
)
def test_a_wrong_body_is_refused_naming_the_field(body: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse(body)
    assert refused.value.param == param
    assert says in str(refused.value)
    assert param.rpartition(".")[2] in str(refused.value) or "is not supported" in str(refused.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"hello",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"model": "\\ud800"}',
        b'{"temperature": NaN}',
        b"[" * 5000,
        b'{"model": "tiny/scripted", "prompt": "x", "temperature": 1e999}',
        b'{"model": "tiny/scripted", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_no_json_object_is_refused(content: bytes) -> None:
    for model in (ChatBody, CompletionBody):
        with pytest.raises(RequestError):
            parse_body(model, content)


NEUTRAL: dict[str, Any] = dict.fromkeys(
    (
        *("n", "stop", "temperature", "top_p", "min_p", "seed", "stream", "stream_options", "max_tokens"),
        *("logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs"),
        *("stop_token_ids", "ignore_eos", "min_tokens", "response_format", "structured_outputs"),
    )
)


def test_null_is_as_good_as_nothing() -> None:
    for body in (CHAT, TEXT):
        parsed = parse(body | NEUTRAL)
        assert replace(parsed.sampling(), seed=0) == SamplingParams()
        assert (parsed.choices, parsed.constraint, parsed.stop, parsed.include_usage) == (1, None, [], False)


def test_known_fields_with_values_that_change_nothing_are_taken() -> None:
    both: dict[str, Any] = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}}
    both |= {"repetition_penalty": 1, "min_p": 0, "ignore_eos": False, "use_beam_search": False}
    chat: dict[str, Any] = {"logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "none"}
    chat |= {"response_format": {"type": "text"}, "max_completion_tokens": None, "store": False}
    text = {"logprobs": None, "echo": False, "suffix": None, "best_of": 1}
    for body in (CHAT | both | chat, TEXT | both | text):
        assert replace(parse(body).sampling(), seed=0) == SamplingParams()


@pytest.mark.parametrize("top_k", [2**31, 2**64, 10**300])
def test_a_top_k_beyond_any_vocabulary_is_taken_and_fits_a_message(top_k: int) -> None:
    assert parse(TEXT | {"top_k": top_k}).sampling().top_k == 2**31 - 1


@pytest.mark.parametrize(("model", "theirs"), [(ChatBody, OpenAIChat), (CompletionBody, OpenAICompletion)])
def test_every_field_of_the_official_client_is_known(model: type[GenerationBody], theirs: type) -> None:
    known = {*model.model_fields, *(field.name for field in model.unsupported)}
    assert set(theirs.__annotations__) <= known


@pytest.mark.parametrize("model", [ChatBody, CompletionBody, Message])
def test_no_field_is_both_honoured_and_refused(model: type[GenerationBody]) -> None:
    names = [*model.model_fields, *(field.name for field in model.unsupported)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("body", [CHAT, TEXT])
def test_every_known_field_is_refused_with_another_value(body: dict[str, Any]) -> None:
    """Public report 46: best_of and beam search changed what speculation means without a word."""
    for field in parse(body).unsupported:
        with pytest.raises(RequestError) as refused:
            parse(body | {field.name: "something else"})
        assert (refused.value.param, refused.value.code) == (field.name, "unsupported_parameter")
        parse(body | {field.name: None})


def test_a_completion_needs_a_prompt() -> None:
    with pytest.raises(RequestError, match="prompt is missing"):
        parse_body(CompletionBody, b'{"model": "m"}')


def test_true_is_not_one() -> None:
    for field, value in (("n", True), ("logprobs", 0), ("best_of", True)):
        with pytest.raises(RequestError, match=field):
            parse(CHAT | {field: value})


def test_a_long_value_is_not_repeated_in_full() -> None:
    with pytest.raises(RequestError) as refused:
        parse(CHAT | {"temperature": "x" * 10_000})
    assert len(str(refused.value)) < 200


def test_what_is_not_in_scope_is_refused_by_the_fields_that_ask_for_it() -> None:
    refused = {*(field.name for body in (ChatBody, CompletionBody) for field in body.unsupported)}
    for field in ("tools", "tool_choice", "functions", "audio", "modalities", "use_beam_search", "best_of"):
        assert field in refused
        assert any(f"`{field}`" in one.asked_by for one in OUT_OF_SCOPE)


def test_the_tables_of_the_documentation_are_current() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    assert document == with_current_tables(document), (
        "run: python -m outrider_serve.openai_schema docs/api.md"
    )
