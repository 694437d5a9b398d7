"""HTTP: the OpenAI routes, health and metrics, on top of whatever a `Service` gives.

    body → `openai_schema` → tokens → coordinator → `answer` → `openai_answers` → JSON or server-sent events

Knows nothing of Ray. Everything that goes wrong is answered in OpenAI's error shape, by `replies`. A client
that leaves cancels its generations.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fastapi import FastAPI, Request, Response
from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.config import RouterOptions
from outrider.errors import OutriderError, RequestError, UnknownModelError
from outrider.generation import GenerationRequest
from outrider.grammar import check as check_grammar
from outrider.messages import Grammar
from outrider.text import ChatMessage
from outrider_serve.answer import (
    Answer,
    Choice,
    EventStream,
    Generation,
    TokenTexts,
    client_left,
    while_connected,
)
from outrider_serve.hot_options import Refusal
from outrider_serve.openai_answers import Answers, ChatAnswers, CompletionAnswers, ModelCard, ModelList
from outrider_serve.openai_body import parse_body
from outrider_serve.openai_grammars import Constraint
from outrider_serve.openai_schema import ChatBody, CompletionBody
from outrider_serve.replies import BodyTooLargeError, error_reply, json_response
from outrider_serve.telemetry import Snapshot, Telemetry, exposition
from outrider_serve.token_spelling import LogprobTexts, TokenSpeller, Vocabulary

INLINE_CHARACTERS = 8192
"""Longer texts are tokenized in a thread, beside the streams of other clients."""

DRAINED_BYTES = 64 << 20
"""How much of a body that is too large is read and dropped, so that its sender gets to read the answer."""

# ---- what a router gives -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests can be answered, and whether they would be speculated on; with the reasons if not."""

    ready: bool
    reason: str | None
    speculation_active: bool
    speculation_reason: str | None
    numerics: str | None = None  # strict, or fast where any verifier is; None: no verifier answers
    refusals: tuple[Refusal, ...] = ()  # hot changes that replicas of any deployment did not take


class Coordinator(Protocol):
    def start(self, request: GenerationRequest) -> Generation: ...


class Tokenizer(Vocabulary, Protocol):
    """What HTTP needs of `outrider.text.Tokenizer`."""

    size: int

    def encode(self, text: str) -> list[int]: ...
    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]: ...


class Service(Protocol):
    """What stands behind the routes: a router replica, or any process that can generate."""

    @property
    def model_name(self) -> str: ...
    @property
    def created(self) -> int:
        """Unix time at which the service came up."""
        ...

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def options(self) -> RouterOptions:
        """Read anew for every request: may change at any time."""
        ...

    @property
    def coordinator(self) -> Coordinator: ...
    @property
    def telemetry(self) -> Telemetry: ...
    async def ready(self) -> Readiness: ...
    async def snapshots(self) -> list[Snapshot]:
        """Metrics of this router, and of the other routers and the verifiers that answer in time."""
        ...


# ---- the application -----------------------------------------------------------------------------


def build_app(service: Service) -> FastAPI:
    """The HTTP face of `service`."""
    # FastAPI's own tracing would root a second trace a request; there is no body model to document.
    app = FastAPI(
        telemetry={"tracing": False}, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.add_middleware(RequestId)
    speller = TokenSpeller(service.tokenizer)

    async def answer_error(request: Request, error: Exception) -> Response:
        reply = error_reply(error)
        service.telemetry.refused(reply.status)
        return reply.response()

    async def answer_bug(request: Request, error: Exception) -> Response:
        # Starlette answers these outside the middleware, then raises them again for the server's log.
        response = await answer_error(request, error)
        response.headers["X-Request-Id"] = request.state.request_id
        return response

    async def answer_nobody(request: Request, error: Exception) -> Response:
        return client_left()

    app.add_exception_handler(ClientDisconnect, answer_nobody)
    app.add_exception_handler(OutriderError, answer_error)
    app.add_exception_handler(HTTPException, answer_error)
    app.add_exception_handler(Exception, answer_bug)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = parse_body(ChatBody, await read_body(request, service.options.limits.max_body_bytes))
        check_model(service, body.model)
        messages = body.conversation()
        size = sum(len(message["content"]) for message in messages)
        prompt = await in_thread_if_long(size, lambda: service.tokenizer.encode_chat(messages))
        answers = ChatAnswers(
            f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), body.model, body.include_usage
        )
        check_lengths(prompt, body.limit or body.min_tokens, service.max_model_len, "messages")
        return await send_answer(service, speller, request, body, prompt, body.limit, answers)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = parse_body(CompletionBody, await read_body(request, service.options.limits.max_body_bytes))
        check_model(service, body.model)
        text = body.prompt
        if isinstance(text, str):
            prompt = await in_thread_if_long(len(text), lambda: service.tokenizer.encode(text))
        else:
            prompt = checked_ids(text, service.tokenizer.size)
        limit = body.max_tokens
        if limit is None:  # a default of ours may shrink to fit; what the client asked for may not
            limit = min(
                service.options.limits.default_max_tokens, max(1, service.max_model_len - len(prompt))
            )
        echo = ""
        if body.echo:
            echo = text if isinstance(text, str) else service.tokenizer.decode(prompt)
        answers = CompletionAnswers(
            f"cmpl-{uuid.uuid4().hex}", int(time.time()), body.model, body.include_usage, echo
        )
        check_lengths(prompt, limit, service.max_model_len, "prompt")
        return await send_answer(service, speller, request, body, prompt, limit, answers)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response(ModelList([model_card(service)]))

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        check_model(service, name)
        return json_response(model_card(service))

    @app.get("/health/live")
    async def live() -> Response:
        return json_response({"status": "live"})

    @app.get("/health")
    @app.get("/health/ready")
    async def ready() -> Response:
        readiness = await service.ready()
        report = HealthReport(
            status="ready" if readiness.ready else "unavailable",
            reason=readiness.reason,
            model=service.model_name,
            numerics=readiness.numerics,
            speculation=SpeculationHealth(readiness.speculation_active, readiness.speculation_reason),
            refused_changes=list(readiness.refusals),
        )
        return json_response(report, status=200 if readiness.ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(exposition(await service.snapshots()), media_type=CONTENT_TYPE_LATEST)

    return app


class SpeculationHealth(Struct):
    active: bool
    reason: str | None


class HealthReport(Struct):
    status: str
    reason: str | None
    model: str
    numerics: str | None
    speculation: SpeculationHealth
    refused_changes: list[Refusal]


def model_card(service: Service) -> ModelCard:
    return ModelCard(service.model_name, service.created, service.max_model_len)


class RequestId:
    """Middleware: every answer carries the request's X-Request-Id, the client's own or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, b"x-request-id")
        request_id = given if given is not None and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)


_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


# ---- from the body to a generation ---------------------------------------------------------------


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, or `BodyTooLargeError` once it is longer than `limit` bytes, declared or not."""
    body = bytearray()
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            body += part
        elif size > limit + DRAINED_BYTES:
            break
    if size > limit:
        raise BodyTooLargeError(
            f"the body has more than {limit} bytes, which is all that is taken", code="body_too_large"
        )
    return bytes(body)


async def in_thread_if_long(characters: int, tokenize: Callable[[], list[int]]) -> list[int]:
    """Tokenize, out of the way of other clients' streams where it takes long."""
    return tokenize() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(tokenize)


def check_model(service: Service, name: str) -> None:
    if name != service.model_name:
        raise UnknownModelError(
            f"the model {name[:100]!r} is not served here; served: {service.model_name!r}",
            param="model",
            code="model_not_found",
        )


def checked_ids(tokens: list[int], vocab_size: int) -> list[int]:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"prompt: token id {token} is outside the vocabulary of {vocab_size}", param="prompt"
            )
    return tokens


def check_lengths(prompt: Sequence[int], asked: int | None, max_model_len: int, param: str) -> None:
    """Refuse a prompt and what is asked for that cannot fit the context together, with the numbers."""
    if not prompt:
        raise RequestError(f"{param}: the prompt is empty: give at least one token", param=param)
    wanted = asked or 1
    if len(prompt) + wanted > max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens and {wanted} more are asked for, "
            f"{len(prompt) + wanted} in all; the context of this model is {max_model_len}: shorten either",
            param=param,
            code="context_length_exceeded",
        )


_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def traceparent_of(request: Request) -> str | None:
    """The caller's W3C trace context; one that is not well-formed is dropped."""
    given: str | None = request.headers.get("traceparent")
    return given if given is not None and _TRACEPARENT.fullmatch(given) else None


async def grammar_of(constraint: Constraint | None) -> Grammar | None:
    """What the text has to match, checked, out of the way of other clients' streams."""
    if constraint is None:
        return None
    try:
        await asyncio.to_thread(check_grammar, constraint.grammar)
    except RequestError as error:
        raise RequestError(
            f"{constraint.param}: {error}", param=constraint.param, code="invalid_value"
        ) from None
    return constraint.grammar


async def send_answer(
    service: Service,
    speller: TokenSpeller,
    request: Request,
    body: ChatBody | CompletionBody,
    prompt: list[int],
    max_tokens: int | None,
    answers: Answers,
) -> Response:
    """Generate what a checked body asks for: n generations, which differ in their noise alone."""
    options = service.options
    predicted = body.predicted_text
    wanted = GenerationRequest(
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        sampling=body.sampling(),
        stop=tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        grammar=await grammar_of(body.constraint),
        logprobs=body.reported_logprobs,
        prediction=tuple(
            await in_thread_if_long(len(predicted), lambda: service.tokenizer.encode_piece(predicted))
        ),
        max_draft_tokens=body.max_draft_tokens,
        traceparent=traceparent_of(request),
    )
    choices = [
        Choice(
            index,
            service.coordinator.start(replace(wanted, sampling=replace(wanted.sampling, choice=index))),
            TokenTexts(service.tokenizer) if body.speculation_detail else None,
            LogprobTexts(speller) if wanted.logprobs is not None else None,
        )
        for index in range(body.choices)
    ]
    if options.speculative_config is not None:
        service.telemetry.expect_drafts(options.speculative_config.num_speculative_tokens)
    answer = Answer(choices, service.telemetry, answers, body.include_usage, body.reported_metrics)
    if body.stream:
        return EventStream(answer.events())
    return await while_connected(request.receive, answer.whole()) or client_left()
