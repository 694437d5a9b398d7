"""Grammars token by token: what a random model writes under the masks always matches; bad grammars are
named."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
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
        ("json_schema", "false", "cannot accept"),
        ("regex", "[a-", "regex cannot be used"),
        ("regex", "(?=a)b", "Lookahead"),
        ("ebnf", "root ::= other", "other"),
        ("ebnf", "a ::= b", "root"),
        ("regex", "a" * (MAX_GRAMMAR_BYTES + 1), "at most"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(
    kind: Literal["json_schema", "regex", "ebnf"], text: str, named: str
) -> None:
    with pytest.raises(RequestError, match=named):
        check(Grammar(kind, text))


def test_names_of_properties_are_no_keywords() -> None:
    check(Grammar("json_schema", '{"type": "object", "properties": {"not": {"type": "string"}, "if": {}}}'))
    check(Grammar("json_object"))


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
