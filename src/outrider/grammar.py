"""What a text must match, token by token, by xgrammar.

The router checks a grammar's text (`check`); the verifier compiles it against the target's vocabulary on a
thread of its own (`GrammarCompiler`) and keeps a matcher a sequence (`GrammarState`), which gives each row of
a verify block the mask that follows from the drafts before it. The matcher only ever advances over committed
tokens.

JSON is generated without freedom of whitespace (xgrammar's `any_whitespace=False`), `{"a": 1, "b": [2, 3]}`:
a model that may write spaces may write nothing else (public reports of endless spaces). No token with a
control character is allowed in it, and special tokens in no text. A JSON object is an object at the top, as
OpenAI has it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import RequestError
from outrider.grammar_limits import MAX_PATTERN_LENGTH, check_regex, check_schema, with_lines
from outrider.messages import Grammar

if TYPE_CHECKING:
    from torch import Tensor
    from xgrammar import CompiledGrammar, GrammarMatcher
    from xgrammar import GrammarCompiler as XGrammarCompiler

MAX_GRAMMAR_BYTES = {
    "json_object": 0,
    "json_schema": 64 << 10,
    "regex": 4 * MAX_PATTERN_LENGTH,
    "ebnf": 16 << 10,
}
"""By kind: what compiles within the time that the verifier gives it."""

CACHED_GRAMMARS = 64

_ANY_OBJECT = '{"type": "object"}'


def check(grammar: Grammar) -> None:
    """Raise `RequestError` where the text is no grammar of its kind, or asks for what cannot be kept.

    Needs no tokenizer. The caller knows which field it was.
    """
    if grammar.kind not in MAX_GRAMMAR_BYTES:
        raise RequestError(f"a grammar's kind is {grammar.kind!r}: allowed is {', '.join(MAX_GRAMMAR_BYTES)}")
    try:
        size = len(grammar.text.encode())
    except UnicodeEncodeError:
        raise RequestError(f"the {grammar.kind} has half a character (a lone surrogate)") from None
    if size > MAX_GRAMMAR_BYTES[grammar.kind]:
        limit = MAX_GRAMMAR_BYTES[grammar.kind]
        raise RequestError(f"the {grammar.kind} has {size} bytes; at most {limit} are taken")
    if grammar.kind == "json_schema":
        try:
            schema = json.loads(grammar.text)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the schema is no JSON: {error}") from None
        check_schema(schema)
    if grammar.kind == "regex":
        check_regex(grammar.text)
    try:
        _parsed(grammar)
    except RuntimeError as error:  # what xgrammar raises for every fault
        raise RequestError(f"the {grammar.kind} cannot be used: {_reason(error)}") from None


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
            return xgrammar.Grammar.from_regex(with_lines(grammar.text))
        case "ebnf":
            return xgrammar.Grammar.from_ebnf(grammar.text)


class GrammarState:
    """Where one sequence's text is in its grammar."""

    def __init__(self, compiled: CompiledGrammar, vocab_size: int, candidates: Tensor) -> None:
        """`candidates`: bitmask (words,) int32 of the only tokens that may occur, by the grammar's kind."""
        import xgrammar

        self._candidates = candidates
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
            masks[row] &= self._candidates
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
        if not int(self._candidates[token // 32]) >> (token % 32) & 1:
            return False
        return bool(self._matcher.accept_token(token))


class GrammarCompiler:
    """Compiles grammars for one vocabulary, one after the other, on a thread of its own."""

    def __init__(self, tokenizer_folder: str | Path, *, vocab_size: int) -> None:
        """`vocab_size`: ids that may be drawn. The model's own ends end a text, where it is complete."""
        self._folder = tokenizer_folder
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-compiler")
        self._vocabulary: _Vocabulary | None = None  # made for the first grammar
        self._cache: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()

    def submit(self, grammar: Grammar) -> Future[GrammarState]:
        """A matcher at the start of the text, once compiled; the future has the error where it cannot be."""
        return self._thread.submit(self._state, grammar)

    def _state(self, grammar: Grammar) -> GrammarState:
        if self._vocabulary is None:
            self._vocabulary = _Vocabulary(self._folder, self._vocab_size)
        compiled = self._cache.get(grammar)
        if compiled is None:
            compiled = self._vocabulary.compiler.compile_grammar(_parsed(grammar))
        self._cache[grammar] = compiled
        self._cache.move_to_end(grammar)
        while len(self._cache) > CACHED_GRAMMARS:
            self._cache.popitem(last=False)
        in_json = grammar.kind in ("json_object", "json_schema")
        candidates = self._vocabulary.in_json if in_json else self._vocabulary.written
        return GrammarState(compiled, self._vocab_size, candidates)


class _Vocabulary:
    """A tokenizer as xgrammar needs it, and which of its tokens may occur: bitmasks (words,) int32."""

    def __init__(self, folder: str | Path, size: int) -> None:
        import xgrammar

        from outrider.text import Tokenizer

        tokenizer = Tokenizer(folder)
        ends = [token for token in tokenizer.eos_token_ids if token < size]
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer.hf, vocab_size=size, stop_token_ids=ends)
        self.compiler: XGrammarCompiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        # xgrammar takes a special token for the text of its name, and the client never sees that text.
        written = [token in ends or tokenizer.is_visible(token) for token in range(size)]
        self.written = _bitmask(written)
        # It lets control characters into strings that have a length, and JSON forbids them.
        texts = info.decoded_vocab
        self.in_json = _bitmask(
            [seen and all(byte >= 0x20 for byte in text) for seen, text in zip(written, texts, strict=True)]
        )


def _bitmask(tokens: Sequence[bool]) -> Tensor:
    import numpy as np
    import torch

    bits = np.zeros(-(-len(tokens) // 32) * 32, dtype=np.uint8)
    bits[: len(tokens)] = tokens
    return torch.from_numpy(np.packbits(bits, bitorder="little").view("<i4").astype(np.int32))
