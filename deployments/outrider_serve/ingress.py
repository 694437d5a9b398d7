"""HTTP: the OpenAI routes, health and metrics, on top of whatever a `Service` gives.

    body → `openai_schema` → tokens → coordinator → chunks → `openai_answers` → JSON or server-sent events

Knows nothing of Ray. Everything that goes wrong is answered in OpenAI's error shape; `error_reply` is the
one place that maps the error tree to HTTP. A client that leaves cancels its generation.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Literal, Protocol, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from msgspec import UNSET, Struct, UnsetType
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.config import RouterOptions
from outrider.errors import (
    OutriderError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnknownModelError,
)
from outrider.generation import Chunk, GenerationRequest, GenerationStats
from outrider.grammar import check as check_grammar
from outrider.messages import FinishReason, Grammar
from outrider.text import ChatMessage, IncrementalDetokenizer, TokenDecoder
from outrider_serve.hot_options import Refusal
from outrider_serve.openai_answers import (
    Answers,
    ChatAnswers,
    ChatChunk,
    Closing,
    Completion,
    CompletionAnswers,
    ErrorBody,
    ErrorDetail,
    MarkedText,
    ModelCard,
    ModelList,
    Piece,
    Reported,
    SpeculationDetail,
    figures_of,
    metrics_of,
    usage_of,
)
from outrider_serve.openai_schema import ChatBody, CompletionBody, GenerationBody, parse_body
from outrider_serve.telemetry import Snapshot, Telemetry, exposition

log = logging.getLogger(__name__)
T = TypeVar("T")

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
    refusals: tuple[Refusal, ...] = ()  # hot changes that replicas of any deployment did not take


class Generation(Protocol):
    """One generation under way; see `outrider.coordinator`."""

    @property
    def stats(self) -> GenerationStats: ...
    def __aiter__(self) -> AsyncIterator[Chunk]: ...
    async def aclose(self) -> None: ...


class Coordinator(Protocol):
    def start(self, request: GenerationRequest) -> Generation: ...


class Tokenizer(TokenDecoder, Protocol):
    """What HTTP needs of `outrider.text.Tokenizer`."""

    size: int

    def encode(self, text: str) -> list[int]: ...
    def encode_piece(self, text: str) -> list[int]: ...
    def token_text(self, token: int) -> str: ...
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


# ---- errors --------------------------------------------------------------------------------------


class BodyTooLargeError(RequestError):
    """The body exceeds `limits.max_body_bytes`."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error as HTTP says it."""

    status: int
    detail: ErrorDetail
    headers: Mapping[str, str] = field(default_factory=dict)

    def response(self) -> Response:
        return json_response(ErrorBody(self.detail), status=self.status, headers=self.headers)

    def event(self) -> bytes:
        return event(ErrorBody(self.detail))


def error_reply(error: Exception) -> ErrorReply:
    """The error tree in HTTP's words. What is none of ours says nothing but that it happened."""
    match error:
        case BodyTooLargeError():
            return _request_fault(413, error)
        case UnknownModelError():
            return _request_fault(404, error)
        case RequestError():
            return _request_fault(400, error)
        case OverloadedError():
            detail = ErrorDetail(str(error), "rate_limit_error", code="rate_limit_exceeded")
            return ErrorReply(429, detail, {"Retry-After": str(max(1, round(error.retry_after_s)))})
        case UnavailableError():
            return ErrorReply(503, ErrorDetail(str(error), "server_error", code="service_unavailable"))
        case OutriderError():
            return ErrorReply(500, ErrorDetail(str(error), "server_error", code="generation_failed"))
        case HTTPException():
            phrase = HTTPStatus(error.status_code).phrase
            detail = ErrorDetail(error.detail, "invalid_request_error", code=phrase.lower().replace(" ", "_"))
            return ErrorReply(error.status_code, detail, error.headers or {})
        case _:
            detail = ErrorDetail("the server had an error; its log has the details", "server_error")
            return ErrorReply(500, detail)


def _request_fault(status: int, error: RequestError) -> ErrorReply:
    return ErrorReply(status, ErrorDetail(str(error), "invalid_request_error", error.param, error.code))


# ---- the application -----------------------------------------------------------------------------


def build_app(service: Service) -> FastAPI:
    """The HTTP face of `service`."""
    # FastAPI's own tracing would root a second trace a request; there is no body model to document.
    app = FastAPI(
        telemetry={"tracing": False}, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.add_middleware(RequestId)

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
        check_lengths(prompt, body.limit, service.max_model_len, "messages")
        return await send_answer(service, request, body, prompt, body.limit, answers)

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
        return await send_answer(service, request, body, prompt, limit, answers)

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
    speculation: SpeculationHealth
    refused_changes: list[Refusal]


def json_response(document: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(document), status_code=status, headers=headers, media_type="application/json"
    )


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


def check_lengths(prompt: Sequence[int], max_tokens: int | None, max_model_len: int, param: str) -> None:
    """Refuse what cannot fit the context, with the numbers."""
    if not prompt:
        raise RequestError(f"{param}: the prompt is empty: give at least one token", param=param)
    wanted = 1 if max_tokens is None else max_tokens
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


async def grammar_of(body: GenerationBody) -> Grammar | None:
    """What the text has to match, checked; out of the way of other clients' streams."""
    asked = body.grammar
    if asked is None:
        return None
    field, grammar = asked
    try:
        await asyncio.to_thread(check_grammar, grammar)
    except RequestError as error:
        raise RequestError(f"{field}: {error}", param=field) from None
    return grammar


async def send_answer(
    service: Service,
    request: Request,
    body: GenerationBody,
    prompt: list[int],
    max_tokens: int | None,
    answers: Answers,
) -> Response:
    """Generate what a checked body asks for: `n` generations, one unless said otherwise."""
    options = service.options
    predicted = body.predicted_text
    wanted = GenerationRequest(
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        sampling=body.sampling(),
        stop=tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        grammar=await grammar_of(body),
        logprobs=body.alternatives,
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
            LogprobTexts(service.tokenizer),
        )
        for index in range(body.choices)
    ]
    if options.speculative_config is not None:
        service.telemetry.expect_drafts(options.speculative_config.num_speculative_tokens)
    answer = Answer(choices, service.telemetry, answers, body.include_usage, body.speculation_metrics)
    if body.stream:
        return EventStream(answer.events())
    return await while_connected(request.receive, answer.whole()) or client_left()


# ---- from a generation to the client -------------------------------------------------------------


class TokenTexts:
    """Tells for each piece of text which token it came from, and whether that was an accepted draft.

    The text of a chunk is what the coordinator says it is; this only cuts it up. A character spread over
    several tokens belongs to the one that completes it.
    """

    def __init__(self, decoder: TokenDecoder) -> None:
        self._detokenizer = IncrementalDetokenizer(decoder)
        self._pending: deque[MarkedText] = deque()  # text of tokens seen whose chunk has not come yet

    def of(self, chunk: Chunk) -> list[MarkedText]:
        """The chunk's text, token by token."""
        for token, drafted in zip(chunk.tokens, chunk.drafted, strict=True):
            self._pending.append(MarkedText(self._detokenizer.feed((token,)), drafted))
        if chunk.finish is not None:
            drafted = bool(chunk.drafted) and chunk.drafted[-1]
            self._pending.append(MarkedText(self._detokenizer.flush(), drafted))
        marked, wanted = [], len(chunk.text)
        while wanted and self._pending:
            head = self._pending.popleft()
            taken, left = head.text[:wanted], head.text[wanted:]
            if left:
                self._pending.appendleft(MarkedText(left, head.drafted))
            if taken:
                marked.append(MarkedText(taken, head.drafted))
            wanted -= len(taken)
        return marked


class LogprobTexts:
    """Puts reported log-probabilities in words, token by token, with their places in the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._offset = 0

    def of(self, chunk: Chunk) -> list[Reported]:
        """One entry for each token of the chunk; none where no log-probabilities were asked for."""
        entries = []
        for token, reported in zip(chunk.tokens, chunk.logprobs, strict=bool(chunk.logprobs)):
            top = tuple((self._tokenizer.token_text(other), logprob) for other, logprob in reported.top)
            entries.append(Reported(self._tokenizer.token_text(token), reported.logprob, top, self._offset))
            self._offset += len(self._detokenizer.feed((token,)))
        return entries


@dataclass(slots=True)
class Choice:
    """One of the n generations of a request."""

    index: int
    generation: Generation
    texts: TokenTexts | None  # set when the client asked for speculation_detail
    logprobs: LogprobTexts

    def piece(self, chunk: Chunk) -> Piece:
        detail = SpeculationDetail(self.texts.of(chunk)) if self.texts is not None else UNSET
        return Piece(self.index, chunk.text, self.logprobs.of(chunk), detail)


@dataclass(slots=True)
class Answer:
    """The generations of one request on their way to the client, whole or as events."""

    choices: Sequence[Choice]
    telemetry: Telemetry
    answers: Answers
    include_usage: bool
    metrics: Literal["summary", "detailed"] | None

    async def chunks(self, choice: Choice) -> AsyncGenerator[tuple[Choice, Chunk], None]:
        """One generation's chunks, counted; however this ends, the generation is closed."""
        try:
            with self.telemetry.request(choice.generation.stats) as meter:
                async for chunk in choice.generation:
                    meter.chunk(chunk)
                    yield choice, chunk
        finally:
            await choice.generation.aclose()

    async def merged(self) -> AsyncGenerator[tuple[Choice, Chunk], None]:
        """The chunks of all generations as they come. The first error ends the others."""
        if len(self.choices) == 1:
            async with aclosing(self.chunks(self.choices[0])) as chunks:
                async for one in chunks:
                    yield one
            return
        ready: asyncio.Queue[tuple[Choice, Chunk] | BaseException | None] = asyncio.Queue()

        async def pump(choice: Choice) -> None:
            try:
                async with aclosing(self.chunks(choice)) as chunks:
                    async for one in chunks:
                        ready.put_nowait(one)
                ready.put_nowait(None)
            except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to who reads
                ready.put_nowait(error)

        pumps = [asyncio.create_task(pump(choice)) for choice in self.choices]
        left = len(pumps)
        try:
            while left:  # every pump ends with an item, and every generation within its own bound
                item = await ready.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def whole(self) -> Response:
        """One JSON object once all generations have ended."""
        texts: dict[int, list[Piece]] = {choice.index: [] for choice in self.choices}
        ends: dict[int, FinishReason] = {}
        async with aclosing(self.merged()) as chunks:
            async for choice, chunk in chunks:
                texts[choice.index].append(choice.piece(chunk))
                if chunk.finish is not None:
                    ends[choice.index] = chunk.finish
        pieces = [(_joined(index, parts), ends[index]) for index, parts in texts.items()]
        return json_response(self.answers.whole(pieces, self._closing(pieces[0][0].detail)))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events. An error before the first is raised, a later one is an event."""
        begun: set[int] = set()
        ended = 0
        try:
            async with aclosing(self.merged()) as chunks:
                async for choice, chunk in chunks:
                    if choice.index not in begun:
                        begun.add(choice.index)
                        if (opening := self.answers.opening(choice.index)) is not None:
                            yield event(opening)
                    piece = choice.piece(chunk)
                    if piece.text or piece.logprobs:
                        yield event(self.answers.piece(piece))
                    if chunk.finish is not None:
                        ended += 1
                        for document in self._endings(choice.index, chunk.finish, ended):
                            yield event(document)
        except Exception as error:  # whatever it is, the client of a stream can only be told in the stream
            if not begun:
                raise
            if not isinstance(error, OutriderError):
                log.exception("a stream failed")
            yield error_reply(error).event()
        yield b"data: [DONE]\n\n"

    def _endings(self, index: int, finish: FinishReason, ended: int) -> list[ChatChunk | Completion]:
        """The chunk with the finish reason and, after the last and where asked for, the usage; the last of an
        answer has the figures."""
        last = ended == len(self.choices)
        if not (last and self.include_usage):
            figures = self._figures(UNSET) if last else UNSET
            return [self.answers.ending(index, finish, figures)]
        return [self.answers.ending(index, finish, UNSET), self.answers.closing(self._closing(UNSET))]

    def _closing(self, marked: SpeculationDetail | UnsetType) -> Closing:
        stats = [choice.generation.stats for choice in self.choices]
        metrics = UNSET if self.metrics is None else metrics_of(stats, detailed=self.metrics == "detailed")
        return Closing(usage_of(stats), metrics, self._figures(marked))

    def _figures(self, marked: SpeculationDetail | UnsetType) -> SpeculationDetail | UnsetType:
        """The closing figures, where asked for, and the marked tokens where the answer is one object."""
        (choice, *_) = self.choices
        if choice.texts is None:
            return UNSET
        return figures_of(choice.generation.stats, UNSET if isinstance(marked, UnsetType) else marked.tokens)


def _joined(index: int, parts: Sequence[Piece]) -> Piece:
    """The pieces of one choice as one."""
    details = [part.detail for part in parts if not isinstance(part.detail, UnsetType)]
    marked = [token for detail in details if detail.tokens is not UNSET for token in detail.tokens]
    return Piece(
        index,
        "".join(part.text for part in parts),
        [entry for part in parts for entry in part.logprobs],
        SpeculationDetail(marked) if details else UNSET,
    )


def event(document: Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


class EventStream(Response):
    """Sends events as they come. Headers go out with the first, so that an error before it has its status."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for one in events:
                await send({"type": "http.response.body", "body": one, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when the client left first: then `work` is cancelled and cleaned up."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def client_left() -> Response:
    """For the server's log; nobody is there to read it. 499 is what nginx calls this."""
    return Response(status_code=499)
