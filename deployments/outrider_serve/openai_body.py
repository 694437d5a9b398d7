"""How a request body is read: strictly, field by field, every fault naming its field and the cure.

A field is honoured (a field of a `Body`), or known but refused (`Unsupported`: accepted with a value that
changes nothing, refused by name otherwise), or unknown (refused). Nothing is ignored silently. Everything
wrong with a body is a `RequestError`. Which fields there are is `openai_schema`'s affair.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import msgspec
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from outrider.errors import RequestError

OUT_OF_RANGE = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
"""pydantic's faults of a number beyond a bound: it names the one that was passed, we name both."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A known field: `neutral` are the values besides null that change nothing, and are accepted."""

    name: str
    neutral: tuple[Any, ...] = ()

    def accepts(self, value: Any) -> bool:
        return value is None or any(_same(value, neutral) for neutral in self.neutral)

    def accepted_values(self) -> str:
        return " or ".join(f"`{short(value)}`" for value in (*self.neutral, None))


def _same(left: Any, right: Any) -> bool:
    """Equality that keeps true apart from 1."""
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def refusal(param: str, message: str, code: str | None = None) -> PydanticCustomError:
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
                raise refusal(
                    name,
                    f"{name} is not supported here: leave it out, or send {field.accepted_values()}",
                    "unsupported_parameter",
                )
        return kept


B = TypeVar("B", bound=Body)


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
        return RequestError(f"unknown field {short(param)}{hint}", param=param, code="unknown_parameter")
    if fault["type"] == "missing":
        return RequestError(f"{param} is missing", param=param, code="missing_required_parameter")
    got = fault["input"]
    shown = f", not {short(got)}" if got is None or isinstance(got, str | int | float) else ""
    if fault["type"] in OUT_OF_RANGE and len(path) == 1:
        shown += f"; allowed is {_allowed(model, str(path[0]))}"
    return RequestError(
        f"{param}: {message[0].lower()}{message[1:]}{shown}", param=param, code="invalid_value"
    )


def _allowed(model: type[Body], name: str) -> str:
    """Both bounds of a number: `at least 0 and at most 2`."""
    words = []
    for bound in model.model_fields[name].metadata:
        match bound:
            case Ge():
                words.append(f"at least {bound.ge}")
            case Gt():
                words.append(f"above {bound.gt}")
            case Le():
                words.append(f"at most {bound.le}")
            case Lt():
                words.append(f"below {bound.lt}")
    return " and ".join(words)


def _dotted(path: Iterable[int | str]) -> str:
    """messages, 0, content → messages[0].content"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def short(value: Any) -> str:
    """A value for an error message: as JSON, at most 60 characters of it."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:60]}…"
