"""What an OpenAI request body may say here; `openai_answers` has the way back.

A field is honoured (a field of the models below), or known but not honoured yet (`UNSUPPORTED`: accepted
with a value that changes nothing, refused by name otherwise), or unknown (refused). Nothing is ignored
silently. Everything wrong with a body is a `RequestError` that names the field.

`python -m outrider_serve.openai_schema docs/api.md` rewrites the tables of the documentation.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError, from_json

from outrider.errors import RequestError
from outrider.messages import SamplingParams
from outrider.text import ChatMessage

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256  # characters
INT64 = 2**63
MAX_TOP_K = 2**31 - 1  # beyond any vocabulary, so that a larger one means the same

# ---- known to OpenAI or vLLM, not honoured yet -------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A known field: `neutral` are the values besides null that change nothing, and are accepted."""

    name: str
    neutral: tuple[Any, ...] = ()

    def accepts(self, value: Any) -> bool:
        return value is None or any(_same(value, neutral) for neutral in self.neutral)

    def accepted_values(self) -> str:
        return " or ".join(f"`{_short(value)}`" for value in (*self.neutral, None))


def _same(left: Any, right: Any) -> bool:
    """Equality that keeps true apart from 1."""
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


_UNSUPPORTED_IN_BOTH = (
    # OpenAI
    Unsupported("n", (1,)),
    Unsupported("frequency_penalty", (0,)),
    Unsupported("presence_penalty", (0,)),
    Unsupported("logit_bias", ({},)),
    # vLLM
    Unsupported("add_special_tokens"),
    Unsupported("allowed_token_ids"),
    Unsupported("bad_words", ([],)),
    Unsupported("cache_salt"),
    Unsupported("ignore_eos", (False,)),
    Unsupported("include_stop_str_in_output", (False,)),
    Unsupported("kv_transfer_params"),
    Unsupported("length_penalty", (1,)),
    Unsupported("min_p", (0,)),
    Unsupported("min_tokens", (0,)),
    Unsupported("priority", (0,)),
    Unsupported("prompt_logprobs"),
    Unsupported("repetition_detection"),
    Unsupported("repetition_penalty", (1,)),
    Unsupported("request_id"),
    Unsupported("return_token_ids", (False,)),
    Unsupported("return_tokens_as_token_ids", (False,)),
    Unsupported("skip_special_tokens", (True,)),
    Unsupported("spaces_between_special_tokens", (True,)),
    Unsupported("stop_token_ids", ([],)),
    Unsupported("structured_outputs"),
    Unsupported("truncate_prompt_tokens"),
    Unsupported("truncation_side"),
    Unsupported("use_beam_search", (False,)),
    Unsupported("vllm_xargs", ({},)),
)
_UNSUPPORTED_IN_CHAT = (
    # OpenAI
    Unsupported("audio"),
    Unsupported("function_call", ("none", "auto")),
    Unsupported("functions", ([],)),
    Unsupported("logprobs", (False,)),
    Unsupported("metadata", ({},)),
    Unsupported("modalities", (["text"],)),
    Unsupported("moderation"),
    Unsupported("parallel_tool_calls", (True,)),
    Unsupported("prediction"),
    Unsupported("prompt_cache_key"),
    Unsupported("prompt_cache_options"),
    Unsupported("prompt_cache_retention"),
    Unsupported("reasoning_effort", ("none",)),
    Unsupported("response_format", ({"type": "text"},)),
    Unsupported("safety_identifier"),
    Unsupported("service_tier", ("auto", "default")),
    Unsupported("store", (False,)),
    Unsupported("tool_choice", ("none", "auto")),
    Unsupported("tools", ([],)),
    Unsupported("top_logprobs", (0,)),
    Unsupported("verbosity", ("medium",)),
    Unsupported("web_search_options"),
    # vLLM
    Unsupported("add_generation_prompt", (True,)),
    Unsupported("chat_template"),
    Unsupported("chat_template_kwargs", ({},)),
    Unsupported("continue_final_message", (False,)),
    Unsupported("documents", ([],)),
    Unsupported("echo", (False,)),
    Unsupported("include_reasoning", (True,)),
    Unsupported("mm_processor_kwargs", ({},)),
    Unsupported("thinking_token_budget"),
)
_UNSUPPORTED_IN_COMPLETIONS = (
    # OpenAI
    Unsupported("best_of", (1,)),
    Unsupported("echo", (False,)),
    Unsupported("logprobs"),
    Unsupported("suffix", ("",)),
    # vLLM
    Unsupported("prompt_embeds"),
    Unsupported("response_format", ({"type": "text"},)),
)
_UNSUPPORTED_IN_MESSAGES = (
    # Clients send an answer's message back as they got it, with these set to null.
    Unsupported("annotations", ([],)),
    Unsupported("audio"),
    Unsupported("function_call"),
    Unsupported("name"),
    Unsupported("reasoning"),
    Unsupported("reasoning_content"),
    Unsupported("refusal"),
    Unsupported("tool_call_id"),
    Unsupported("tool_calls", ([],)),
)
_UNSUPPORTED_IN_STREAM_OPTIONS = (
    Unsupported("continuous_usage_stats", (False,)),
    Unsupported("include_obfuscation", (False,)),
)

# ---- request bodies ------------------------------------------------------------------------------


def _refusal(param: str, message: str, code: str | None = None) -> PydanticCustomError:
    """A fault of a field that pydantic would report against the whole body."""
    return PydanticCustomError("refusal", "{message}", {"param": param, "message": message, "code": code})


class Body(BaseModel):
    """Base of what clients send: types are not coerced, unknown fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())
    unsupported: ClassVar[tuple[Unsupported, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_fields(cls, values: Any) -> Any:
        """Take out known fields with a neutral value; refuse them with any other."""
        if not isinstance(values, dict):
            return values
        known = {field.name: field for field in cls.unsupported}
        kept = {}
        for name, value in values.items():
            field = known.get(name)
            if field is None:
                kept[name] = value
            elif not field.accepts(value):
                raise _refusal(
                    name,
                    f"{name} is not supported here: leave it out, or send {field.accepted_values()}",
                    "unsupported_parameter",
                )
        return kept


class StreamOptions(Body):
    unsupported = _UNSUPPORTED_IN_STREAM_OPTIONS

    include_usage: bool | None = None


class SpeculativeOptions(Body):
    max_tokens: Annotated[int, Field(ge=0, le=64)]


class TextPart(Body):
    """A content part. Other kinds than text are refused: this service reads text only."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, values: Any) -> Any:
        kind = values.get("type") if isinstance(values, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise _refusal(
                "type",
                f"a content part of type {_short(kind)} is not supported: send text",
                "unsupported_value",
            )
        return values


class Message(Body):
    unsupported = _UNSUPPORTED_IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant"]
    content: list[TextPart]

    @field_validator("content", mode="before")
    @classmethod
    def _string_is_one_part(cls, content: Any) -> Any:
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise ValueError("must be a string or a list of content parts")
        return content

    @property
    def text(self) -> str:
        """The content; parts are joined by a line break, as vLLM does."""
        return "\n".join(part.text for part in self.content)


class GenerationBody(Body):
    """What both generating routes honour."""

    model: Annotated[str, Field(description="name of the served model; another one is 404")]
    temperature: Annotated[
        float | None, Field(ge=0, le=2, allow_inf_nan=False, description="0 is greedy; default 1")
    ] = None
    top_p: Annotated[
        float | None, Field(gt=0, le=1, allow_inf_nan=False, description="nucleus; default 1")
    ] = None
    top_k: Annotated[
        int | None,
        Field(
            ge=-1,
            description="draw from the k likeliest tokens, of all where k is larger; -1 or 0 is off (vLLM)",
        ),
    ] = None
    seed: Annotated[
        int | None,
        Field(
            ge=-INT64,
            lt=INT64,
            description="same seed, same text, with or without speculation; default: a fresh one a request",
        ),
    ] = None
    stop: Annotated[
        list[str],
        Field(
            description=f"a string, or up to {MAX_STOP_STRINGS}, of at most {MAX_STOP_LENGTH} characters; "
            "the text ends before the first that is completed"
        ),
    ] = []
    stream: Annotated[bool | None, Field(description="server-sent events, one a verdict")] = None
    stream_options: Annotated[
        StreamOptions | None,
        Field(description="`include_usage`: a last chunk with the usage; needs `stream: true`"),
    ] = None
    user: Annotated[str | None, Field(description="taken and not used")] = None
    speculative: Annotated[
        SpeculativeOptions | None,
        Field(
            description='`false`: plain decoding; `{"max_tokens": n}`: at most n drafts a round; '
            "`true` or left out: as the service does (Outrider)"
        ),
    ] = None
    speculation_detail: Annotated[
        bool | None,
        Field(description="mark accepted draft tokens and report acceptance, in `outrider` (Outrider)"),
    ] = None

    @field_validator("stop", mode="before")
    @classmethod
    def _list_of_stop_strings(cls, stop: Any) -> Any:
        listed = [] if stop is None else [stop] if isinstance(stop, str) else stop
        if not (isinstance(listed, list) and all(isinstance(one, str) for one in listed)):
            raise ValueError("must be a string or a list of strings")
        if len(listed) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings are taken, {len(listed)} were given")
        for one in listed:
            if not 1 <= len(one) <= MAX_STOP_LENGTH:
                raise ValueError(f"a stop string has 1 to {MAX_STOP_LENGTH} characters, this one {len(one)}")
        return listed

    @field_validator("speculative", mode="before")
    @classmethod
    def _switch_or_options(cls, speculative: Any) -> Any:
        if isinstance(speculative, bool):
            return None if speculative else {"max_tokens": 0}
        if not (speculative is None or isinstance(speculative, dict)):
            raise ValueError('must be true, false or {"max_tokens": n}')
        return speculative

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _refusal("stream_options", "stream_options is only allowed with stream: true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def max_draft_tokens(self) -> int | None:
        """Upper K of this request; None leaves it to the service."""
        return None if self.speculative is None else self.speculative.max_tokens

    def sampling(self) -> SamplingParams:
        """How to draw. Without a seed of the client, with one that nobody else has."""
        seed = self.seed if self.seed is not None else int.from_bytes(os.urandom(8)) % INT64
        return SamplingParams(
            temperature=1.0 if self.temperature is None else float(self.temperature),
            top_p=1.0 if self.top_p is None else float(self.top_p),
            top_k=min(self.top_k, MAX_TOP_K) if self.top_k is not None and self.top_k > 0 else None,
            seed=seed,
        )


_MaxTokens: TypeAlias = Annotated[int | None, Field(ge=1)]


class ChatBody(GenerationBody):
    """The body of /v1/chat/completions."""

    unsupported = _UNSUPPORTED_IN_BOTH + _UNSUPPORTED_IN_CHAT

    messages: Annotated[
        list[Message],
        Field(
            min_length=1,
            description="`role` system, developer (read as system), user or assistant; `content` a string "
            "or parts of type text",
        ),
    ]
    max_completion_tokens: Annotated[
        _MaxTokens, Field(description="tokens to generate; default: until the context ends")
    ] = None
    max_tokens: Annotated[_MaxTokens, Field(description="older name of max_completion_tokens")] = None

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.max_tokens is not None and self.limit != self.max_tokens:
            raise _refusal("max_tokens", "max_tokens and max_completion_tokens differ: give one of them")
        return self

    @property
    def limit(self) -> int | None:
        """Tokens to generate, by whichever name; None: until the context ends."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def conversation(self) -> list[ChatMessage]:
        """The messages for the chat template, which seldom knows the role developer."""
        return [
            ChatMessage(role="system" if m.role == "developer" else m.role, content=m.text)
            for m in self.messages
        ]


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    unsupported = _UNSUPPORTED_IN_BOTH + _UNSUPPORTED_IN_COMPLETIONS

    prompt: Annotated[
        str | list[int],
        Field(description="a string or a list of token ids; also a list that holds one of these"),
    ]
    max_tokens: Annotated[
        _MaxTokens, Field(description="tokens to generate; default: 16 (`limits.default_max_tokens`)")
    ] = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            if len(prompt) > 1:
                raise ValueError(f"one prompt a request is taken, {len(prompt)} were given: send them apart")
            prompt = prompt[0]
        if isinstance(prompt, list):
            for token in prompt:
                if not isinstance(token, int) or isinstance(token, bool):
                    raise ValueError(f"a list of token ids cannot hold {_short(token)}")
        elif not isinstance(prompt, str):
            raise ValueError("must be a string, a list of token ids, or a list that holds one of these")
        if not prompt:
            raise ValueError("is empty: give at least one token")
        return prompt


B = TypeVar("B", bound=GenerationBody)


def parse_body(model: type[B], body: bytes) -> B:
    """The checked body, or `RequestError` naming the field and the cure."""
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise RequestError("the body must be a JSON object")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _first_fault(model, error) from None


def _first_fault(model: type[Body], error: ValidationError) -> RequestError:
    fault = error.errors(include_url=False)[0]
    path = list(fault["loc"])
    message, code = fault["msg"].removeprefix("Value error, "), None
    if fault["type"] == "refusal":
        path.append(fault["ctx"]["param"])
        code = fault["ctx"]["code"]
        return RequestError(message, param=_dotted(path), code=code)
    param = _dotted(path)
    if fault["type"] == "extra_forbidden":
        known = [*model.model_fields, *(field.name for field in model.unsupported)] if len(path) == 1 else []
        near = difflib.get_close_matches(str(path[-1]), known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return RequestError(f"unknown field {_short(param)}{hint}", param=param, code="unknown_parameter")
    if fault["type"] == "missing":
        return RequestError(f"{param} is missing", param=param, code="missing_required_parameter")
    got = fault["input"]
    shown = f", not {_short(got)}" if got is None or isinstance(got, str | int | float) else ""
    return RequestError(
        f"{param}: {message[0].lower()}{message[1:]}{shown}", param=param, code="invalid_value"
    )


def _dotted(path: Iterable[int | str]) -> str:
    """messages, 0, content → messages[0].content"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _short(value: Any) -> str:
    """A value for an error message: as JSON, at most 60 characters of it."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:60]}…"


# ---- documentation -------------------------------------------------------------------------------


def field_tables(model: type[Body]) -> str:
    """Markdown: the honoured fields of a body, then the known ones that are not honoured yet."""
    lines = ["| field | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {field.description} |" for name, field in model.model_fields.items()]
    lines += ["", "| not honoured yet | accepted with |", "|---|---|"]
    lines += [f"| `{field.name}` | {field.accepted_values()} |" for field in model.unsupported]
    return "\n".join(lines)


def with_current_tables(document: str) -> str:
    """The document with the tables between its `fields` markers written anew."""
    for name, model in (("chat", ChatBody), ("completions", CompletionBody)):
        block = re.compile(rf"(<!-- fields: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        tables = field_tables(model)
        document, found = block.subn(lambda match, tables=tables: f"{match[1]}{tables}\n{match[2]}", document)  # type: ignore[misc]
        if found != 1:
            raise ValueError(f"the document needs one block '<!-- fields: {name} -->', it has {found}")
    return document


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_current_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
