"""What an OpenAI request body may say here; `openai_answers` has the way back.

    openai_body         how a body is read, and what is said of a wrong one
    openai_unsupported  what is known and refused
    openai_grammars     what the text must match
    here                every field that is honoured, and the bodies

`python -m outrider_serve.openai_schema docs/api.md` rewrites the tables of the documentation.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from outrider.messages import SamplingParams
from outrider.text import ChatMessage
from outrider_serve.openai_body import Body, refusal, short
from outrider_serve.openai_grammars import Constraint, ResponseFormat, StructuredOutputs
from outrider_serve.openai_unsupported import (
    IN_BOTH,
    IN_CHAT,
    IN_COMPLETIONS,
    IN_MESSAGES,
    IN_STREAM_OPTIONS,
    OUT_OF_SCOPE,
)

MAX_CHOICES = 16
"""Each choice holds a place of a verifier, 32 by default: one request takes at most half of them."""

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256  # characters
MAX_STOP_TOKENS = 128
MAX_BIASED_TOKENS = 1024  # each is added to every row that is verified
INT64 = 2**63
MAX_TOP_K = 2**31 - 1  # beyond any vocabulary, so that a larger one means the same

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


class StreamOptions(Body):
    unsupported = IN_STREAM_OPTIONS

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
            raise refusal(
                "type",
                f"a content part of type {short(kind)} is not supported: send text",
                "unsupported_value",
            )
        return values


def _as_parts(content: Any) -> Any:
    """A string is one part."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ValueError("must be a string or a list of content parts")
    return content


class Message(Body):
    unsupported = IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant"]
    content: list[TextPart]

    _parts = field_validator("content", mode="before")(_as_parts)

    @property
    def text(self) -> str:
        """The content; parts are joined by a line break, as vLLM does."""
        return "\n".join(part.text for part in self.content)


class Prediction(Body):
    """OpenAI's Predicted Outputs: what the client expects the answer to be."""

    type: Literal["content"]
    content: list[TextPart]

    _parts = field_validator("content", mode="before")(_as_parts)

    @property
    def text(self) -> str:
        """The content; parts follow one another without a break, as the pieces of one text."""
        return "".join(part.text for part in self.content)


_Bias: TypeAlias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
_Penalty: TypeAlias = Annotated[float | None, Field(ge=-2, le=2, allow_inf_nan=False)]
_MaxTokens: TypeAlias = Annotated[int | None, Field(ge=1)]


class GenerationBody(Body):
    """What both generating routes honour."""

    model: Annotated[str, Field(description="name of the served model; another one is 404")]
    temperature: Annotated[
        float | None, Field(ge=0, le=2, allow_inf_nan=False, description="0 to 2; 0 is greedy; default 1")
    ] = None
    top_p: Annotated[
        float | None, Field(gt=0, le=1, allow_inf_nan=False, description="nucleus; above 0, default 1")
    ] = None
    top_k: Annotated[
        int | None,
        Field(
            ge=-1,
            description="draw from the k likeliest tokens, of all where k is larger; -1 or 0 is off (vLLM)",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        Field(
            ge=0,
            le=1,
            allow_inf_nan=False,
            description="0 to 1: no token below this share of the likeliest one's probability (vLLM)",
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
    n: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_CHOICES,
            description=f"1 to {MAX_CHOICES} choices, drawn independently; each holds a place of its own",
        ),
    ] = None
    presence_penalty: Annotated[
        _Penalty, Field(description="-2 to 2: off the logit of every token of the output so far")
    ] = None
    frequency_penalty: Annotated[
        _Penalty, Field(description="-2 to 2: the same, times how often the token is there")
    ] = None
    repetition_penalty: Annotated[
        float | None,
        Field(
            gt=0,
            le=2,
            allow_inf_nan=False,
            description="above 0, at most 2: divides positive logits of tokens of prompt and output, "
            "multiplies negative ones; default 1 (vLLM)",
        ),
    ] = None
    logit_bias: Annotated[
        dict[str, _Bias] | None,
        Field(
            description=f"token id, as a string, to -100 … 100, added to its logit; at most "
            f"{MAX_BIASED_TOKENS} tokens, all of the vocabulary"
        ),
    ] = None
    stop: list[str] = Field(
        default_factory=list,
        description=f"a string, or up to {MAX_STOP_STRINGS}, of at most {MAX_STOP_LENGTH} characters; "
        "the text ends before the first that is completed",
    )
    stop_token_ids: Annotated[
        list[int] | None,
        Field(
            max_length=MAX_STOP_TOKENS,
            description=f"up to {MAX_STOP_TOKENS} tokens that end the answer beside the model's own ends "
            "(vLLM)",
        ),
    ] = None
    ignore_eos: Annotated[
        bool | None, Field(description="the model's own ends are tokens like any other (vLLM)")
    ] = None
    min_tokens: Annotated[
        int | None,
        Field(ge=0, description="no end before so many tokens, by a token or by a stop string (vLLM)"),
    ] = None
    response_format: Annotated[
        ResponseFormat | None,
        Field(
            description="`text`, `json_object`, or `json_schema` with `name` and `schema`: an answer that "
            "ends with `stop` parses, and matches; keywords that cannot be kept are refused"
        ),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        Field(description="one of `json`, `json_object`, `regex`, `grammar` (EBNF): the same (vLLM)"),
    ] = None
    stream: Annotated[bool | None, Field(description="server-sent events, one a verdict")] = None
    stream_options: Annotated[
        StreamOptions | None,
        Field(description="`include_usage`: a last chunk with the usage; needs `stream: true`"),
    ] = None
    user: Annotated[str | None, Field(description="taken and not used")] = None
    per_request_spec_decode_metrics: Annotated[
        Literal["none", "summary", "detailed"] | None,
        Field(
            description="adds vLLM's `metrics.speculative_decoding`; named and valued as vLLM's server "
            "option; in a stream it needs `include_usage`; default `none`"
        ),
    ] = None
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

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _token_ids(cls, bias: Any) -> Any:
        if isinstance(bias, dict):
            if len(bias) > MAX_BIASED_TOKENS:
                raise ValueError(f"at most {MAX_BIASED_TOKENS} tokens are taken, {len(bias)} were given")
            for key, added in bias.items():
                if not _TOKEN_ID.fullmatch(key):
                    raise ValueError(f"the key {short(key)} is no token id")
                if isinstance(added, int | float) and not -100 <= added <= 100:
                    raise ValueError(f"the bias of token {key} is {short(added)}; allowed is -100 to 100")
        return bias

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
            raise refusal("stream_options", "stream_options is only allowed with stream: true")
        if self.reported_metrics != "none" and self.stream and not self.include_usage:
            raise refusal(
                "per_request_spec_decode_metrics",
                "per_request_spec_decode_metrics come with a stream's usage: ask for it with "
                "stream_options.include_usage",
            )
        return self

    @model_validator(mode="after")
    def _one_grammar(self) -> Self:
        formatted = self.response_format is not None and self.response_format.type != "text"
        if formatted and self.structured_outputs is not None:
            raise refusal(
                "structured_outputs", "structured_outputs and response_format exclude each other: give one"
            )
        return self

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def constraint(self) -> Constraint | None:
        """What the text must match, its grammar still unchecked."""
        if self.structured_outputs is not None:
            return self.structured_outputs.constraint()
        return None if self.response_format is None else self.response_format.constraint()

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def reported_metrics(self) -> Literal["none", "summary", "detailed"]:
        return self.per_request_spec_decode_metrics or "none"

    @property
    def max_draft_tokens(self) -> int | None:
        """Upper K of this request; None leaves it to the service."""
        return None if self.speculative is None else self.speculative.max_tokens

    def sampling(self) -> SamplingParams:
        """How to draw the first choice. Without a seed of the client, with one that nobody else has."""
        seed = self.seed if self.seed is not None else int.from_bytes(os.urandom(8)) % INT64
        return SamplingParams(
            temperature=1.0 if self.temperature is None else float(self.temperature),
            top_p=1.0 if self.top_p is None else float(self.top_p),
            top_k=min(self.top_k, MAX_TOP_K) if self.top_k is not None and self.top_k > 0 else None,
            min_p=float(self.min_p or 0),
            seed=seed,
            presence_penalty=float(self.presence_penalty or 0),
            frequency_penalty=float(self.frequency_penalty or 0),
            repetition_penalty=float(self.repetition_penalty or 1),
            logit_bias=tuple((int(token), float(bias)) for token, bias in (self.logit_bias or {}).items()),
        )


class ChatBody(GenerationBody):
    """The body of /v1/chat/completions."""

    unsupported = IN_BOTH + IN_CHAT

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
    logprobs: Annotated[
        bool | None, Field(description="report the target's own log-probability of each token")
    ] = None
    top_logprobs: Annotated[
        int | None, Field(ge=0, le=20, description="0 to 20 likeliest tokens beside it; needs `logprobs`")
    ] = None
    prediction: Annotated[
        Prediction | None,
        Field(
            description="`content`, a string or parts of type text, is drafted where the answer follows it; "
            "not with n > 1 or without speculation"
        ),
    ] = None

    @model_validator(mode="after")
    def _fields_fit_together(self) -> Self:
        if self.max_tokens is not None and self.limit != self.max_tokens:
            raise refusal("max_tokens", "max_tokens and max_completion_tokens differ: give one of them")
        if self.top_logprobs and not self.logprobs:
            raise refusal("top_logprobs", "top_logprobs is only allowed with logprobs: true")
        if self.prediction is not None and self.choices > 1:
            raise refusal("n", f"n is {self.n}, and a request with a prediction has 1 choice: leave one out")
        return self

    @property
    def limit(self) -> int | None:
        """Tokens to generate, by whichever name; None: until the context ends."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def reported_logprobs(self) -> int | None:
        """Alternatives to report beside each token's own log-probability; None: report nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def predicted_text(self) -> str:
        """What the client expects the answer to be; empty where it says nothing."""
        return "" if self.prediction is None else self.prediction.text

    def conversation(self) -> list[ChatMessage]:
        """The messages for the chat template, which seldom knows the role developer."""
        return [
            ChatMessage(role="system" if m.role == "developer" else m.role, content=m.text)
            for m in self.messages
        ]


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    unsupported = IN_BOTH + IN_COMPLETIONS

    prompt: Annotated[
        str | list[int],
        Field(description="a string or a list of token ids; also a list that holds one of these"),
    ]
    max_tokens: Annotated[
        _MaxTokens, Field(description="tokens to generate; default: 16 (`limits.default_max_tokens`)")
    ] = None
    logprobs: Annotated[
        int | None,
        Field(
            ge=0,
            le=5,
            description="report the target's own log-probability of each token, and 0 to 5 likeliest ones",
        ),
    ] = None
    echo: Annotated[
        bool | None, Field(description="the text begins with the prompt; not with `logprobs`")
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
                    raise ValueError(f"a list of token ids cannot hold {short(token)}")
        elif not isinstance(prompt, str):
            raise ValueError("must be a string, a list of token ids, or a list that holds one of these")
        if not prompt:
            raise ValueError("is empty: give at least one token")
        return prompt

    @model_validator(mode="after")
    def _prompts_have_no_logprobs(self) -> Self:
        if self.echo and self.logprobs is not None:
            raise refusal(
                "echo", "echo with logprobs is not supported: the prompt's are not kept; leave one out"
            )
        return self

    @property
    def reported_logprobs(self) -> int | None:
        """Alternatives to report beside each token's own log-probability; None: report nothing."""
        return self.logprobs

    @property
    def predicted_text(self) -> str:
        """OpenAI has predictions in chat only."""
        return ""


# ---- documentation -------------------------------------------------------------------------------


def field_table(model: type[Body]) -> str:
    """Markdown: every field that is known, honoured or refused."""
    lines = ["| field | |", "|---|---|"]
    lines += [f"| `{name}` | {field.description} |" for name, field in model.model_fields.items()]
    lines += [
        f"| `{field.name}` | **refused**; accepted with {field.accepted_values()} |"
        for field in model.unsupported
    ]
    return "\n".join(lines)


def scope_table() -> str:
    """Markdown: what this service does not do."""
    lines = ["| not in scope | where it would be asked for | answer |", "|---|---|---|"]
    lines += [f"| {one.what} | {one.asked_by} | {one.answer} |" for one in OUT_OF_SCOPE]
    return "\n".join(lines)


def with_current_tables(document: str) -> str:
    """The document with the tables between its `fields` markers written anew."""
    tables = {
        "chat": field_table(ChatBody),
        "completions": field_table(CompletionBody),
        "scope": scope_table(),
    }
    for name, table in tables.items():
        block = re.compile(rf"(<!-- fields: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        document, found = block.subn(lambda match, table=table: f"{match[1]}{table}\n{match[2]}", document)  # type: ignore[misc]
        if found != 1:
            raise ValueError(f"the document needs one block '<!-- fields: {name} -->', it has {found}")
    return document


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_current_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
