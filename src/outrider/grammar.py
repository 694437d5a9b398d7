"""What a text must match, token by token, by xgrammar.

The router checks a grammar's text (`check`); the verifier compiles it against the target's vocabulary on a
thread of its own (`GrammarCompiler`) and keeps a matcher a sequence (`GrammarState`), which gives each row of
a verify block the mask that follows from the drafts before it. The matcher only ever advances over committed
tokens.

JSON is generated without freedom of whitespace, `{"a": 1, "b": [2, 3]}`: a model that may write spaces may
write nothing else (public reports of endless spaces). No token with a control character is allowed in it. A
JSON object is an object at the top, as OpenAI has it.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import RequestError
from outrider.messages import Grammar

if TYPE_CHECKING:
    from torch import Tensor
    from xgrammar import CompiledGrammar, GrammarMatcher, TokenizerInfo
    from xgrammar import GrammarCompiler as XGrammarCompiler

MAX_GRAMMAR_BYTES = 64 << 10
CACHED_GRAMMARS = 64

_ANY_OBJECT = '{"type": "object"}'

# Keywords that change which documents are valid and that xgrammar does not look at.
_IGNORED_KEYWORDS = frozenset(
    {
        "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains",
        "minContains", "maxContains", "uniqueItems", "multipleOf", "unevaluatedItems", "propertyNames",
        "contentEncoding", "contentMediaType", "contentSchema",
    }
)  # fmt: skip
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "unevaluatedProperties", "additionalItems")


def check(grammar: Grammar) -> None:
    """Raise `RequestError` where the text is no grammar of its kind, or asks for what cannot be kept.

    Needs no tokenizer. The caller knows which field it was.
    """
    size = len(grammar.text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise RequestError(f"the grammar has {size} bytes; at most {MAX_GRAMMAR_BYTES} are taken")
    if grammar.kind == "json_schema":
        try:
            schema = json.loads(grammar.text)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the schema is no JSON: {error}") from None
        _refuse_ignored(schema, "schema")
    try:
        _parsed(grammar)
    except RuntimeError as error:  # what xgrammar raises for every fault
        raise RequestError(f"the {grammar.kind} cannot be used: {_reason(error)}") from None


def _refuse_ignored(schema: Any, place: str) -> None:
    """Name the first keyword that would be ignored: the text could then break the schema unseen."""
    if not isinstance(schema, dict):
        return
    for key in schema:
        if key in _IGNORED_KEYWORDS:
            raise RequestError(f"{place}.{key} is not supported: leave the keyword out")
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        raise RequestError(f"{place}.allOf with several schemas is not supported: merge them into one")
    for key in _SCHEMAS_BY_NAME:
        if isinstance(schema.get(key), dict):
            for name, inner in schema[key].items():
                _refuse_ignored(inner, f"{place}.{key}.{name}")
    for key in _SCHEMA_LISTS:
        if isinstance(schema.get(key), list):
            for index, inner in enumerate(schema[key]):
                _refuse_ignored(inner, f"{place}.{key}[{index}]")
    for key in _SCHEMAS:
        _refuse_ignored(schema.get(key), f"{place}.{key}")


def _reason(error: RuntimeError) -> str:
    """What xgrammar says, without its own source line."""
    text = str(error).strip()
    return text.split(": ", 1)[-1] if text.startswith("[") else text


def _parsed(grammar: Grammar) -> Any:
    import xgrammar

    match grammar.kind:
        case "json_object":
            return xgrammar.Grammar.from_json_schema(_ANY_OBJECT, any_whitespace=False, strict_mode=False)
        case "json_schema":
            return xgrammar.Grammar.from_json_schema(grammar.text, any_whitespace=False)
        case "regex":
            return xgrammar.Grammar.from_regex(grammar.text)
        case "ebnf":
            return xgrammar.Grammar.from_ebnf(grammar.text)


class GrammarState:
    """Where one sequence's text is in its grammar."""

    def __init__(self, compiled: CompiledGrammar, vocab_size: int, plain: Tensor | None) -> None:
        """`plain`: bitmask (words,) of the only tokens that may occur; None: all."""
        import xgrammar

        self._plain = plain
        self._matcher: GrammarMatcher = xgrammar.GrammarMatcher(compiled)
        self._vocab_size = vocab_size

    @property
    def terminated(self) -> bool:
        """The end was generated: nothing may follow."""
        return bool(self._matcher.is_terminated())

    def allowed_prefix(self, drafts: Sequence[int]) -> int:
        """How many leading drafts may follow the committed text. The state stays where it is."""
        taken = self._walk(drafts)
        self._matcher.rollback(taken)
        return taken

    def masks(self, drafts: Sequence[int]) -> Tensor:
        """What may follow each prefix of the drafts: (1 + len(drafts), words) int32, a bit a token.

        Rows that no legal text reaches allow everything: they are never drawn from.
        """
        import torch
        import xgrammar

        masks = xgrammar.allocate_token_bitmask(1 + len(drafts), self._vocab_size)
        masks.fill_(-1)
        taken = 0
        for row in range(1 + len(drafts)):
            if self.terminated:
                break
            self._matcher.fill_next_token_bitmask(masks, row)
            if self._plain is not None:
                masks[row] &= self._plain
            if row == len(drafts) or not self._accept(drafts[row]):
                break
            taken += 1
        self._matcher.rollback(taken)
        assert isinstance(masks, torch.Tensor)
        return masks

    def advance(self, tokens: Sequence[int]) -> None:
        """Committed tokens. One that the grammar forbids is a fault of ours: ValueError."""
        taken = self._walk(tokens)
        if taken < len(tokens):
            raise ValueError(f"token {tokens[taken]} was committed against the grammar")

    def _walk(self, tokens: Sequence[int]) -> int:
        """Accept tokens as far as they are legal; how many."""
        for index, token in enumerate(tokens):
            if self.terminated or not self._accept(token):
                return index
        return len(tokens)

    def _accept(self, token: int) -> bool:
        if not 0 <= token < self._vocab_size:
            return False
        if self._plain is not None and not int(self._plain[token // 32]) >> (token % 32) & 1:
            return False
        return bool(self._matcher.accept_token(token))


class GrammarCompiler:
    """Compiles grammars for one vocabulary, one after the other, on a thread of its own."""

    def __init__(self, tokenizer_folder: str | Path, *, vocab_size: int) -> None:
        """`vocab_size`: ids that may be drawn. The model's own ends end a text, where it is complete."""
        self._folder = tokenizer_folder
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-compiler")
        self._compiler: XGrammarCompiler | None = None
        self._plain: Tensor | None = None  # tokens without a control character, once compiled
        self._cache: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def submit(self, grammar: Grammar) -> Future[GrammarState]:
        """A matcher at the start of the text, once compiled; the future has the error where it cannot be."""
        return self._thread.submit(self._state, grammar)

    def _state(self, grammar: Grammar) -> GrammarState:
        with self._lock:
            compiled = self._cache.get(grammar)
        if compiled is None:
            compiled = self._compile(grammar)
        with self._lock:
            self._cache[grammar] = compiled
            self._cache.move_to_end(grammar)
            while len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        json_only = grammar.kind in ("json_object", "json_schema")
        return GrammarState(compiled, self._vocab_size, self._plain if json_only else None)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        import xgrammar

        if self._compiler is None:
            info = self._tokenizer_info()
            self._plain = _without_control_characters(info)
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        return self._compiler.compile_grammar(_parsed(grammar))

    def _tokenizer_info(self) -> TokenizerInfo:
        import xgrammar

        from outrider.text import Tokenizer

        tokenizer = Tokenizer(self._folder)
        ends = [token for token in tokenizer.eos_token_ids if token < self._vocab_size]
        return xgrammar.TokenizerInfo.from_huggingface(
            tokenizer.hf, vocab_size=self._vocab_size, stop_token_ids=ends
        )


def _without_control_characters(info: TokenizerInfo) -> Tensor:
    """Bitmask (words,) int32 of the tokens that JSON strings may hold unescaped.

    xgrammar lets control characters into strings that have a length, and JSON forbids them.
    """
    import numpy as np
    import torch

    vocabulary = info.decoded_vocab
    plain = np.ones(-(-info.vocab_size // 32) * 32, dtype=np.uint8)
    for token, text in enumerate(vocabulary):
        plain[token] = not any(byte < 0x20 for byte in text)
    return torch.from_numpy(np.packbits(plain, bitorder="little").view("<i4").astype(np.int32))
