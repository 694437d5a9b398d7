"""Replies as OpenAI shapes them: JSON, server-sent events, errors. The error tree meets HTTP here only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import Response
from msgspec import Struct
from starlette.exceptions import HTTPException

from outrider.errors import (
    OutriderError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnknownModelError,
)
from outrider_serve.openai_answers import ErrorBody, ErrorDetail


def json_response(document: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(document), status_code=status, headers=headers, media_type="application/json"
    )


def event(document: Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


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
