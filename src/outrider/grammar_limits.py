"""What xgrammar would read otherwise than it was meant, refused by name.

xgrammar passes over keywords that it does not know, and over known ones in company it does not expect. The
text would then break its schema without a word. Each rule here stands for such a case; tests/test_grammar.py
lets a random model write under schemas that pass.
"""

from __future__ import annotations

import json
import re
from typing import Any

from outrider.errors import RequestError

MAX_NESTING = 64  # levels of a schema's JSON: the time to read one grows with their cube
MAX_PATTERN_LENGTH = 8 << 10  # characters; the time to compile one grows with their square
MAX_BRANCHES = 64  # of a oneOf, which are compared with each other

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Formats that are kept, in shape: a date may be the 31st of June."""

_UNREAD = frozenset(
    {
        "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains",
        "minContains", "maxContains", "uniqueItems", "multipleOf", "unevaluatedItems", "propertyNames",
        "contentEncoding", "contentMediaType", "contentSchema", "$dynamicRef", "$recursiveRef",
    }
)  # fmt: skip
_OWNER = {
    "properties": "object", "required": "object", "additionalProperties": "object",
    "patternProperties": "object", "unevaluatedProperties": "object",
    "minProperties": "object", "maxProperties": "object",
    "items": "array", "prefixItems": "array", "minItems": "array", "maxItems": "array",
    "pattern": "string", "format": "string", "minLength": "string", "maxLength": "string",
    "minimum": "number", "maximum": "number", "exclusiveMinimum": "number", "exclusiveMaximum": "number",
}  # fmt: skip
"""Each keyword that bounds values, and the type whose values it bounds."""

_TELLING = ("properties", "additionalProperties", "unevaluatedProperties", "items", "prefixItems")
"""Keywords that say the type where none is given."""

_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords beside which no other that bounds values is read."""

_PIECES = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)
"""What an expression is made of: escapes, classes, single characters."""

_ESCAPES = frozenset("dDwWsSnrtfvxuca" + "bBkpP")  # the latter are refused by xgrammar itself

_NOT_IN_JSON = re.compile(
    r'"|\\\\|[\x00-\x1f]|\\[cnrtfva0]|\\(?:x|u00)(?:[01][0-9a-f]|22|5c)|\\u\{0*(?:1?[0-9a-f]|22|5c)\}',
    re.IGNORECASE,
)
"""Characters that a JSON string holds escaped only."""


def check_schema(document: Any) -> None:
    """Raise `RequestError` for what would be passed over, by its place: `schema.properties.a.not`."""
    _refuse_nesting(document)
    waiting: list[tuple[Any, str]] = [(document, "schema")]
    seen: set[int] = set()
    while waiting:
        schema, place = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        _check_keywords(schema, place)
        _check_alternatives(document, schema, place)
        waiting += _inner(document, schema, place)


def check_regex(expression: str, place: str = "the regex") -> None:
    """Raise `RequestError` for escapes that would be letters, and anchors that would be nothing."""
    if len(expression) > MAX_PATTERN_LENGTH:
        raise RequestError(
            f"{place} has {len(expression)} characters; at most {MAX_PATTERN_LENGTH} are taken"
        )
    pieces = _PIECES.findall(expression)
    for before, piece, after in zip(["", *pieces], pieces, [*pieces[1:], ""], strict=False):
        if piece[0] == "\\" and piece[1:].isalpha() and piece[1:] not in _ESCAPES:
            raise RequestError(f"{place} has {piece}, which is not supported")
        if (piece == "^" and before not in ("", "(", "|", ":")) or (
            piece == "$" and after not in ("", ")", "|")
        ):
            raise RequestError(
                f"{place} has {piece} inside: it always matches from begin to end, leave it out"
            )


def with_lines(expression: str) -> str:
    """The expression with a dot that is no line break, as elsewhere; xgrammar's is any character."""
    return _PIECES.sub(lambda piece: r"[^\n\r]" if piece[0] == "." else piece[0], expression)


def _refuse_nesting(document: Any) -> None:
    level = [document]
    for _ in range(MAX_NESTING):
        level = [
            inner
            for outer in level
            for inner in (
                outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ()
            )
        ]
    if level:
        raise RequestError(f"the schema is nested deeper than {MAX_NESTING} levels: move parts into $defs")


def _check_keywords(schema: dict[str, Any], place: str) -> None:
    """Whether every keyword of one schema is read."""
    unread = next((key for key in schema if key in _UNREAD), None)
    if unread is not None:
        raise RequestError(f"{place}.{unread} is not supported: leave the keyword out")
    alone = next((key for key in _ALONE if key in schema), None)
    bounds = [key for key in schema if key in _OWNER]
    if alone is not None:
        beside = [key for key in schema if key in _ALONE and key != alone] + bounds
        if "type" in schema and not _all_of_type(schema, alone):
            beside.append("type")
        if beside:
            raise RequestError(
                f"{place}.{beside[0]} is not supported beside {alone}: write it inside, or alone"
            )
        return
    types = _types(schema)
    if types is None:
        telling = next((key for key in _TELLING if key in schema), None)
        types = frozenset() if telling is None else frozenset({_OWNER[telling]})
        if bounds and telling is None:
            raise RequestError(f"{place}.{bounds[0]} needs a type beside it: {_OWNER[bounds[0]]}")
    # What bounds values of another type is met by all of these.
    if "string" in types:
        _check_string(schema, place)
    if "object" in types:
        _check_object(schema, place)


def _check_string(schema: dict[str, Any], place: str) -> None:
    given = [key for key in ("pattern", "format", "minLength", "maxLength") if key in schema]
    if len(given) > 1 and given[0] in ("pattern", "format"):
        raise RequestError(f"{place}.{given[1]} is not supported beside {given[0]}: leave one of them out")
    if "format" in given and schema["format"] not in FORMATS:
        raise RequestError(
            f"{place}.format {schema['format']!r} is not supported; these are: {', '.join(FORMATS)}"
        )
    if "pattern" in given:
        _check_pattern(schema["pattern"], f"{place}.pattern")


def _check_object(schema: dict[str, Any], place: str) -> None:
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if isinstance(required, list) and isinstance(properties, dict):
        names = [name for name in required if isinstance(name, str)]  # xgrammar refuses others
        undescribed = next((name for name in names if name not in properties), None)
        if undescribed is not None:
            raise RequestError(f"{place}.required names {undescribed!r}: describe it in properties")
    others = schema.get(
        "additionalProperties", schema.get("unevaluatedProperties", "properties" not in schema)
    )
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict):
        if properties or len(patterns) > 1 or schema.get("additionalProperties", False) is not False:
            raise RequestError(
                f"{place}.patternProperties is supported with one pattern and without other properties"
            )
        for pattern in patterns:
            _check_pattern(pattern, f"{place}.patternProperties")
    least = schema.get("minProperties", 0)
    if isinstance(least, int) and least > 1 and (others is not False or patterns):
        raise RequestError(
            f"{place}.minProperties above 1 is not supported where properties does not list all there may be"
        )


def _check_pattern(pattern: Any, place: str) -> None:
    if not isinstance(pattern, str):
        return  # xgrammar says so
    check_regex(pattern, place)
    positive = "".join(piece for piece in _PIECES.findall(pattern) if not piece.startswith("[^"))
    if (raw := _NOT_IN_JSON.search(positive)) is not None:
        raise RequestError(f"{place} has {raw[0]!r}: JSON holds such a character escaped only, leave it out")


def _check_alternatives(document: Any, schema: dict[str, Any], place: str) -> None:
    every = schema.get("allOf")
    if isinstance(every, list) and len(every) > 1:
        raise RequestError(f"{place}.allOf with several schemas is not supported: merge them into one")
    branches = schema.get("oneOf")
    if not isinstance(branches, list):
        return
    if len(branches) > MAX_BRANCHES:
        raise RequestError(f"{place}.oneOf has {len(branches)} schemas; at most {MAX_BRANCHES} are taken")
    resolved = [_resolved(document, branch, place) for branch in branches]
    for index, branch in enumerate(resolved):
        if not all(_apart(document, branch, other, place) for other in resolved[:index]):
            raise RequestError(
                f"{place}.oneOf[{index}] may match what another one does, which is not supported: use anyOf, "
                "or require a property of another const in each"
            )


def _inner(document: Any, schema: dict[str, Any], place: str) -> list[tuple[Any, str]]:
    """The schemas that this one is made of, with their places."""
    found: list[tuple[Any, str]] = []
    for key in ("properties", "patternProperties"):
        if isinstance(schema.get(key), dict):
            found += [(inner, f"{place}.{key}.{name}") for name, inner in schema[key].items()]
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(schema.get(key), list):
            found += [(inner, f"{place}.{key}[{index}]") for index, inner in enumerate(schema[key])]
    found += [
        (schema[key], f"{place}.{key}")
        for key in ("items", "additionalProperties", "unevaluatedProperties")
        if key in schema
    ]
    if "$ref" in schema:
        found.append((_target(document, schema["$ref"], place), str(schema["$ref"])))
    return found


def _target(document: Any, reference: Any, place: str) -> Any:
    """What a reference means; raises `RequestError` unless it is a place of this document."""
    if not isinstance(reference, str) or not re.match("#(/|$)", reference):
        raise RequestError(
            f"{place}.$ref {reference!r} is not supported: name a place of this schema, #/$defs/..."
        )
    target = document
    for step in reference.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        try:
            target = target[int(name)] if isinstance(target, list) else target[name]
        except (KeyError, IndexError, TypeError, ValueError):
            raise RequestError(f"{place}.$ref {reference!r} leads nowhere") from None
    return target


def _resolved(document: Any, schema: Any, place: str) -> Any:
    """The schema behind a reference to a reference to ..."""
    for _ in range(MAX_NESTING):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = _target(document, schema["$ref"], place)
    return schema


def _apart(document: Any, first: Any, second: Any, place: str) -> bool:
    """Whether no value can match both, as far as constants, types and required constant properties tell."""
    if not isinstance(first, dict) or not isinstance(second, dict):
        return False
    if _differ(_constants(first), _constants(second)) or _differ(_types(first), _types(second)):
        return True
    for name in {*_required(first)} & {*_required(second)}:
        inner = [_resolved(document, one["properties"].get(name), place) for one in (first, second)]
        if _differ(*(_constants(one) if isinstance(one, dict) else None for one in inner)):
            return True
    return False


def _differ(first: frozenset[str] | None, second: frozenset[str] | None) -> bool:
    return first is not None and second is not None and not first & second


def _required(schema: dict[str, Any]) -> list[str]:
    required = schema.get("required")
    described = isinstance(required, list) and isinstance(schema.get("properties"), dict)
    return [name for name in required if isinstance(name, str)] if described and required else []


def _constants(schema: dict[str, Any]) -> frozenset[str] | None:
    """The values that const or enum allow, as JSON."""
    if "const" in schema:
        return frozenset({json.dumps(schema["const"], sort_keys=True)})
    if isinstance(schema.get("enum"), list):
        return frozenset(json.dumps(value, sort_keys=True) for value in schema["enum"])
    return None


def _named_types(schema: dict[str, Any]) -> list[str]:
    given = schema.get("type", [])
    return [str(name) for name in given] if isinstance(given, list) else [str(given)]


def _types(schema: dict[str, Any]) -> frozenset[str] | None:
    """The types of the values, integers as numbers; None: not told."""
    if "type" in schema:
        return frozenset("number" if name == "integer" else name for name in _named_types(schema))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(_type(value) for value in values)
    return None


def _all_of_type(schema: dict[str, Any], alone: str) -> bool:
    """Whether the constants are of the type beside them, which is then no bound."""
    values = {"const": [schema.get("const")], "enum": schema.get("enum")}.get(alone)
    names = _named_types(schema)
    return isinstance(values, list) and all(
        _type(value) in names or ("integer" in names and _is_whole(value)) for value in values
    )


def _is_whole(value: Any) -> bool:
    return _type(value) == "number" and (isinstance(value, int) or value.is_integer())


def _type(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int() | float():
            return "number"
        case list():
            return "array"
        case _:
            return "object"
