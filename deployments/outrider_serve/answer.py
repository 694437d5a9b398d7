"""From the generations of one request to its client: one JSON object, or server-sent events.

    generations → chunks, as they come → pieces of text with what was asked for beside it → `openai_answers`

However it ends, every generation is closed: a choice that fails ends the others, and so does a client that
leaves.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from fastapi import Response
from msgspec import UNSET, UnsetType
from starlette.types import Receive, Scope, Send

from outrider.errors import OutriderError
from outrider.generation import Chunk, GenerationStats
from outrider.messages import FinishReason
from outrider.text import IncrementalDetokenizer, TokenDecoder
from outrider_serve.openai_answers import (
    Answers,
    ChatChunk,
    Closing,
    Completion,
    MarkedText,
    Piece,
    SpeculationDetail,
    figures_of,
    metrics_of,
    usage_of,
)
from outrider_serve.replies import error_reply, event, json_response
from outrider_serve.telemetry import Telemetry
from outrider_serve.token_spelling import LogprobTexts

log = logging.getLogger(__name__)
T = TypeVar("T")


class Generation(Protocol):
    """One generation under way; see `outrider.coordinator`."""

    @property
    def stats(self) -> GenerationStats: ...
    def __aiter__(self) -> AsyncIterator[Chunk]: ...
    async def aclose(self) -> None: ...


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


@dataclass(slots=True)
class Choice:
    """One of the n generations of a request, and who puts in words what is wanted of it beside its text."""

    index: int
    generation: Generation
    texts: TokenTexts | None  # set when the client asked for speculation_detail
    logprobs: LogprobTexts | None

    def piece(self, chunk: Chunk) -> Piece:
        detail = SpeculationDetail(self.texts.of(chunk)) if self.texts is not None else UNSET
        logprobs = self.logprobs.of(chunk) if self.logprobs is not None else None
        return Piece(self.index, chunk.text, logprobs, detail)


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A chunk and the choice that it belongs to."""

    choice: Choice
    chunk: Chunk


@dataclass(slots=True)
class Answer:
    """The generations of one request on their way to the client, whole or as events."""

    choices: Sequence[Choice]
    telemetry: Telemetry
    answers: Answers
    include_usage: bool
    metrics: Literal["none", "summary", "detailed"]  # of vLLM's per-request block

    async def whole(self) -> Response:
        """One JSON object once all generations have ended."""
        pieces: dict[int, list[Piece]] = {choice.index: [] for choice in self.choices}
        ends: dict[int, FinishReason] = {}
        async with aclosing(self._arriving()) as arriving:
            async for arrived in arriving:
                index = arrived.choice.index
                pieces[index].append(arrived.choice.piece(arrived.chunk))
                if arrived.chunk.finish is not None:
                    ends[index] = arrived.chunk.finish
        joined = [(_joined(index, parts), ends[index]) for index, parts in pieces.items()]
        marked = joined[0][0].detail if len(joined) == 1 else UNSET
        return json_response(self.answers.whole(joined, self._closing(marked)))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events. An error before the first is raised, a later one is an event."""
        begun: set[int] = set()
        ended = 0
        try:
            async with aclosing(self._arriving()) as arriving:
                async for arrived in arriving:
                    index, finish = arrived.choice.index, arrived.chunk.finish
                    if index not in begun:
                        begun.add(index)
                        if (opening := self.answers.opening(index)) is not None:
                            yield event(opening)
                    piece = arrived.choice.piece(arrived.chunk)
                    if piece.text or piece.logprobs:
                        yield event(self.answers.piece(piece))
                    if finish is not None:
                        ended += 1
                        for document in self._endings(index, finish, last=ended == len(self.choices)):
                            yield event(document)
        except Exception as error:  # whatever it is, the client of a stream can only be told in the stream
            if not begun:
                raise
            if not isinstance(error, OutriderError):
                log.exception("a stream failed")
            yield error_reply(error).event()
        yield b"data: [DONE]\n\n"

    async def _arriving(self) -> AsyncGenerator[_Arrived, None]:
        """The chunks of all generations as they come. The first error ends the others."""
        if len(self.choices) == 1:
            async with aclosing(self._chunks(self.choices[0])) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        arrived: asyncio.Queue[_Arrived | Exception | None] = asyncio.Queue()

        async def pump(choice: Choice) -> None:
            try:
                async with aclosing(self._chunks(choice)) as chunks:
                    async for chunk in chunks:
                        arrived.put_nowait(chunk)
                arrived.put_nowait(None)
            except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to who reads
                arrived.put_nowait(error)

        pumps = [asyncio.create_task(pump(choice)) for choice in self.choices]
        left = len(pumps)
        try:
            while left:  # every pump ends with an item, as every generation ends within its own bound
                item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _chunks(self, choice: Choice) -> AsyncGenerator[_Arrived, None]:
        """One generation's chunks, counted; however this ends, the generation is closed."""
        try:
            with self.telemetry.request(choice.generation.stats) as meter:
                async for chunk in choice.generation:
                    meter.chunk(chunk)
                    yield _Arrived(choice, chunk)
        finally:
            await choice.generation.aclose()

    def _endings(self, index: int, finish: FinishReason, *, last: bool) -> list[ChatChunk | Completion]:
        """The chunk with a choice's finish reason; after the last one and where asked for, the usage.

        The figures go with the last of these.
        """
        if not (last and self.include_usage):
            return [self.answers.ending(index, finish, self._figures(UNSET) if last else UNSET)]
        return [self.answers.ending(index, finish, UNSET), self.answers.closing(self._closing(UNSET))]

    def _closing(self, marked: SpeculationDetail | UnsetType) -> Closing:
        stats = [choice.generation.stats for choice in self.choices]
        metrics = UNSET if self.metrics == "none" else metrics_of(stats, detailed=self.metrics == "detailed")
        return Closing(usage_of(stats), metrics, self._figures(marked))

    def _figures(self, marked: SpeculationDetail | UnsetType) -> SpeculationDetail | UnsetType:
        """The closing figures, where asked for, and the marked tokens where the answer is one object."""
        if self.choices[0].texts is None:
            return UNSET
        stats = [choice.generation.stats for choice in self.choices]
        return figures_of(stats, UNSET if isinstance(marked, UnsetType) else marked.tokens)


def _joined(index: int, parts: Sequence[Piece]) -> Piece:
    """The pieces of one choice as one."""
    details = [part.detail for part in parts if not isinstance(part.detail, UnsetType)]
    marked = [token for detail in details if detail.tokens is not UNSET for token in detail.tokens]
    reported = [entry for part in parts for entry in part.logprobs or ()]
    return Piece(
        index,
        "".join(part.text for part in parts),
        None if parts[0].logprobs is None else reported,
        SpeculationDetail(marked) if details else UNSET,
    )


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
