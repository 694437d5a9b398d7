"""Grammars token by token: what a random model writes under the masks always matches; bad grammars are
named."""

from __future__ import annotations

import datetime
import json
import random
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from torch import Tensor

from outrider.errors import RequestError
from outrider.grammar import MAX_GRAMMAR_BYTES, GrammarCompiler, GrammarState, check
from outrider.messages import Grammar
from outrider.text import Tokenizer

WAIT_S = 60.0
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"enum": ["S", "M", "L"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "size", "count"],
}


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Tokenizer:
    return Tokenizer(tiny_llama)


@pytest.fixture(scope="module")
def compiler(tiny_llama: Path, tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tiny_llama, vocab_size=tokenizer.size)


def start(compiler: GrammarCompiler, grammar: Grammar) -> GrammarState:
    return compiler.submit(grammar).result(WAIT_S)


def allowed(row: Tensor, size: int) -> list[int]:
    words = row.tolist()
    return [token for token in range(size) if words[token // 32] >> (token % 32) & 1]


def walk(
    state: GrammarState, size: int, eos: tuple[int, ...], rng: random.Random, limit: int = 400
) -> list[int]:
    """Write at random what the masks allow, to the end, which is taken as soon as it may be."""
    written: list[int] = []
    while not state.terminated:
        choices = allowed(state.masks(())[0], size)
        ends = [token for token in choices if token in eos]
        token = ends[0] if ends else rng.choice(choices)
        state.advance([token])
        written.append(token)
        assert len(written) < limit
    return written


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_written_under_a_schema_parses_and_matches(
    compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int
) -> None:
    state = start(compiler, Grammar("json_schema", json.dumps(SCHEMA)))
    written = walk(state, tokenizer.size, tokenizer.eos_token_ids, random.Random(seed))
    document = json.loads(tokenizer.decode(written))
    jsonschema.validate(document, SCHEMA)


@pytest.mark.parametrize("expression", [r"[a-z]{3,8}-\d{2}", r"(yes|no)( indeed)?", r"\{x*\}"])
def test_whatever_is_written_under_an_expression_matches_it(
    compiler: GrammarCompiler, tokenizer: Tokenizer, expression: str
) -> None:
    for seed in range(4):
        state = start(compiler, Grammar("regex", expression))
        written = walk(state, tokenizer.size, tokenizer.eos_token_ids, random.Random(seed))
        assert re.fullmatch(expression, tokenizer.decode(written))


def test_an_ebnf_grammar_is_kept(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = start(compiler, Grammar("ebnf", 'root ::= "a" root | "b"'))
    text = tokenizer.decode(walk(state, tokenizer.size, tokenizer.eos_token_ids, random.Random(1)))
    assert re.fullmatch("a*b", text)


def test_spaces_cannot_go_on_public_report_27(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Public report 27: 250,000 spaces and HTTP 200. Here one place allows no two spaces in a row."""
    state = start(compiler, Grammar("json_object"))
    (brace,) = tokenizer.encode_piece("{")
    state.advance([brace])
    blank = [t for t in allowed(state.masks(())[0], tokenizer.size) if not tokenizer.token_text(t).strip()]
    ends = set(tokenizer.eos_token_ids)
    assert [token for token in blank if token not in ends] == []


def test_drafts_move_the_mask_inside_a_block_and_leave_the_state_alone(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """Public report 25: the grammar held for the first token of a block only."""
    state = start(compiler, Grammar("regex", "abcd"))
    letters = [tokenizer.encode_piece(letter)[0] for letter in "abcd"]
    masks = state.masks(letters)
    for row, letter in enumerate(letters):
        assert letter in allowed(masks[row], tokenizer.size)
        assert not set(letters) - {letter} & set(allowed(masks[row], tokenizer.size)) - {letter}
    assert set(allowed(masks[4], tokenizer.size)) <= set(tokenizer.eos_token_ids)
    assert state.allowed_prefix([letters[0], letters[1], letters[0]]) == 2
    assert state.allowed_prefix([letters[3]]) == 0
    assert (state.masks([letters[3], letters[0]])[1:] == -1).all(), (
        "rows behind an illegal draft are never drawn"
    )
    state.advance(letters[:2])
    assert state.allowed_prefix(letters[2:]) == 2


def test_nothing_follows_the_end_public_report_26(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Public report 26: a matcher was fed after it had terminated, and crashed a valid answer."""
    state = start(compiler, Grammar("regex", "ab"))
    text, end = tokenizer.encode_piece("ab"), tokenizer.eos_token_ids[0]
    assert state.allowed_prefix([*text, end, end, *text]) == len(text) + 1
    masks = state.masks([*text, end, end])
    assert masks.shape[0] == len(text) + 3
    state.advance([*text, end])
    assert state.terminated
    assert state.allowed_prefix([end]) == 0
    assert (state.masks([end]) == -1).all()


def test_a_committed_token_against_the_grammar_is_a_fault_of_ours(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = start(compiler, Grammar("regex", "ab"))
    with pytest.raises(ValueError, match="against the grammar"):
        state.advance(tokenizer.encode_piece("z"))


def test_sequences_of_one_grammar_are_apart(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = Grammar("regex", "ab")
    first, second = start(compiler, grammar), start(compiler, grammar)
    first.advance(tokenizer.encode_piece("a"))
    assert second.allowed_prefix(tokenizer.encode_piece("a")) == 1


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        ("json_schema", "{", "no JSON"),
        ("json_schema", '{"type": "nonsense"}', "nonsense"),
        ("json_schema", '{"type": 12}', "string"),
        ("json_schema", '{"$ref": "#/nope"}', "nope"),
        ("json_schema", '{"type": "array", "items": {"multipleOf": 3}}', r"schema\.items\.multipleOf"),
        ("json_schema", '{"properties": {"a": {"not": {}}}}', r"schema\.properties\.a\.not"),
        ("json_schema", '{"allOf": [{"type": "string"}, {"maxLength": 2}]}', "allOf"),
        ("json_schema", '{"anyOf": [{"uniqueItems": true}]}', r"schema\.anyOf\[0\]\.uniqueItems"),
        ("json_schema", '{"type": "string", "pattern": "a", "maxLength": 2}', "maxLength .* beside pattern"),
        ("json_schema", '{"type": "string", "format": "uuid", "minLength": 2}', "minLength .* beside format"),
        ("json_schema", '{"type": "string", "format": "wibble"}', "wibble.*these are"),
        ("json_schema", '{"minimum": 3}', "minimum needs a type beside it: number"),
        ("json_schema", '{"type": "object", "required": ["a"]}', r"schema\.required names 'a'"),
        ("json_schema", '{"enum": ["a", 1], "type": "string"}', "type .* beside enum"),
        ("json_schema", '{"anyOf": [{"type": "null"}], "required": ["a"]}', "required .* beside anyOf"),
        ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}', r"#/\$defs/a\.not"),
        ("json_schema", '{"$ref": "#/$defs/a", "maxLength": 2, "$defs": {"a": {}}}', r"beside \$ref"),
        ("json_schema", '{"$ref": "https://example.com/schema"}', "place of this schema"),
        ("json_schema", '{"$dynamicRef": "#a"}', "dynamicRef"),
        ("json_schema", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}', r"oneOf\[1\]"),
        ("json_schema", '{"oneOf": [' + "{}," * 64 + "{}]}", "at most 64"),
        ("json_schema", '{"type": "object", "minProperties": 2}', "minProperties"),
        ("json_schema", '{"properties": {"a": {}}, "patternProperties": {"^a": {}}}', "patternProperties"),
        ("json_schema", r'{"type": "string", "pattern": "^\"$"}', "escaped only"),
        ("json_schema", r'{"type": "string", "pattern": "\\x22"}', "escaped only"),
        ("json_schema", r'{"type": "object", "patternProperties": {"a\\\\": {}}}', "escaped only"),
        ("json_schema", '{"items": ' * 99 + "{}" + "}" * 99, "deeper than"),
        ("regex", r"\Aab\Z", r"\\A"),
        ("regex", "a^b", "inside"),
        ("regex", "a\ud800", "half a character"),
        ("json_schema", "false", "cannot accept"),
        ("regex", "[a-", "regex cannot be used"),
        ("regex", "(?=a)b", "Lookahead"),
        ("ebnf", "root ::= other", "other"),
        ("ebnf", "a ::= b", "root"),
        ("regex", "a" * 8193, "at most"),
        ("ebnf", " " * (MAX_GRAMMAR_BYTES["ebnf"] + 1), "at most"),
        ("lark", "start: A", "allowed is json_object"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(
    kind: Literal["json_schema", "regex", "ebnf"],  # one row has another
    text: str,
    named: str,
) -> None:
    with pytest.raises(RequestError, match=named):
        check(Grammar(kind, text))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"not": {"type": "string"}, "if": {}}},
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "T",
            "type": "null",
            "default": 1,
        },
        {"enum": ["a", "b"], "type": "string"},
        {"enum": [1, 2.0, None], "type": ["integer", "null"]},
        {"const": 2.5, "type": "number", "description": "half"},
        {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "Name"},
        {"type": "string", "pattern": '[^"]+'},
        {"type": "string", "minimum": 3},
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    ],
)
def test_what_can_be_kept_is_taken(schema: dict[str, Any]) -> None:
    check(Grammar("json_schema", json.dumps(schema)))


def test_models_as_pydantic_writes_them_are_taken() -> None:
    class Cat(BaseModel):
        kind: Literal["cat"]
        lives: Annotated[int, Field(ge=1, le=9)]

    class Dog(BaseModel):
        kind: Literal["dog"]
        born: datetime.date | None = None
        friends: list[Cat | Dog] = []

    class Owner(BaseModel):
        pet: Annotated[Cat | Dog, Field(discriminator="kind")]
        colour: Literal["red", "green"] = "red"
        weights: dict[str, float] = {}

    check(Grammar("json_schema", json.dumps(Owner.model_json_schema())))


def test_an_object_of_any_kind_is_taken() -> None:
    check(Grammar("json_object"))


BOUNDS: dict[str, st.SearchStrategy[Any]] = {
    "minLength": st.integers(0, 2),
    "maxLength": st.integers(2, 4),
    "pattern": st.sampled_from(["^a*$", "b", "[^x]{2}", r"\w", '"', r"^[ -~]{0,3}$", r"\\", r"\s.\S"]),
    "format": st.sampled_from(["date", "uuid", "time", "json-pointer", "ipv4", "duration"]),
    "minimum": st.integers(-3, 2),
    "exclusiveMaximum": st.integers(3, 9),
    "minItems": st.integers(0, 2),
    "maxItems": st.integers(2, 3),
    "minProperties": st.integers(0, 2),
    "maxProperties": st.integers(2, 3),
    "required": st.lists(st.sampled_from("ab"), unique=True, max_size=2),
    "multipleOf": st.just(2),
}
TYPES = st.sampled_from(["string", "integer", "number", "object", "array", "null", "boolean"])


def around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas made of schemas, sensible or not."""
    parts = {
        "properties": st.dictionaries(st.sampled_from(["a", "b", 'q"']), inner, max_size=2),
        "additionalProperties": st.booleans() | inner,
        "patternProperties": st.dictionaries(st.sampled_from(["^a+$", "b"]), inner, max_size=2),
        "items": inner | st.booleans(),
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "anyOf": st.lists(inner, min_size=1, max_size=2),
        "oneOf": st.lists(inner, min_size=1, max_size=2),
        "allOf": st.lists(inner, min_size=1, max_size=2),
        "enum": st.lists(st.sampled_from([1, "a", None, {"a": [True]}]), min_size=1, max_size=2),
        "type": TYPES | st.lists(TYPES, min_size=1, max_size=2, unique=True),
    }
    return st.fixed_dictionaries({}, optional=BOUNDS | parts).filter(lambda schema: len(schema) < 5)


SCHEMAS = st.recursive(st.fixed_dictionaries({"type": TYPES}, optional=BOUNDS), around, max_leaves=3)


@given(SCHEMAS, st.integers(0, 99))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_under_every_schema_that_is_taken_a_random_model_writes_what_matches(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, Any], seed: int
) -> None:
    """No keyword that is taken is passed over: what would be is refused."""
    grammar = Grammar("json_schema", json.dumps(schema))
    try:
        check(grammar)
    except RequestError:
        assume(False)
    state, rng, written = start(compiler, grammar), random.Random(seed), list[int]()
    while not state.terminated and len(written) < 80:
        choices = allowed(state.masks(())[0], tokenizer.size)
        if not choices:  # a dead end is an error, never an answer
            return
        closing = [token for token in choices if tokenizer.token_text(token) in {'"', "}", "]"}]
        ends = [token for token in choices if token in tokenizer.eos_token_ids]
        written.append(rng.choice(ends or (closing if closing and rng.random() < 0.5 else choices)))
        state.advance(written[-1:])
    if state.terminated:
        jsonschema.Draft202012Validator(schema).validate(json.loads(tokenizer.decode(written)))


@pytest.mark.parametrize(
    "grammar", [Grammar("json_object"), Grammar("regex", ".*"), Grammar("ebnf", "root ::= [^x]*")]
)
def test_special_tokens_are_no_text(
    compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar
) -> None:
    """They have names, which a string could hold, and no text that a client would see."""
    state = start(compiler, grammar)
    if grammar.kind == "json_object":
        state.advance(tokenizer.encode_piece('{"'))
    hidden = {token for token in range(tokenizer.size) if not tokenizer.is_visible(token)}
    assert hidden - set(tokenizer.eos_token_ids)
    assert not hidden & set(allowed(state.masks(())[0], tokenizer.size)) - set(tokenizer.eos_token_ids)
    assert state.allowed_prefix(sorted(hidden - set(tokenizer.eos_token_ids))[:1]) == 0


def test_a_dot_is_no_line_break(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = start(compiler, Grammar("regex", r"[.]\..{3}"))
    state.advance(tokenizer.encode_piece(".."))
    following = allowed(state.masks(())[0], tokenizer.size)
    assert following
    assert not any("\n" in tokenizer.token_text(token) for token in following)


@pytest.mark.smollm2
def test_smollm2_s_own_tokenizer_writes_a_schema(smollm2: Path) -> None:
    tokenizer = Tokenizer(smollm2)
    compiler = GrammarCompiler(smollm2, vocab_size=tokenizer.size)
    state = start(compiler, Grammar("json_schema", json.dumps(SCHEMA)))
    text = '{"name": "Ada", "size": "M", "count": 7}'
    tokens = tokenizer.encode_piece(text)
    assert state.allowed_prefix(tokens) == len(tokens)
    assert state.allowed_prefix(tokenizer.encode_piece('{"size"')) < 3
    state.advance([*tokens, tokenizer.eos_token_ids[0]])
    assert state.terminated
