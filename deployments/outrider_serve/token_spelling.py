"""Tokens and their log-probabilities in words, for readers that have no tokenizer.

A token that is text by itself is spelled as that text; one that is part of a character by its bytes, as in
`bytes:\\xf0\\x9f`, so that two of them never look the same; a special token, which has no text, by its name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.generation import Chunk
from outrider.text import REPLACEMENT, IncrementalDetokenizer, TokenDecoder

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary(TokenDecoder, Protocol):
    """What spelling a token needs of `outrider.text.Tokenizer`."""

    @property
    def hf(self) -> Any: ...
    def encode_piece(self, text: str) -> list[int]: ...
    def token_text(self, token: int) -> str: ...


@dataclass(frozen=True, slots=True)
class Spelling:
    """One token in words, and its bytes where it has text and they are known."""

    name: str
    bytes: bytes | None


@dataclass(frozen=True, slots=True)
class Reported:
    """A token with the log-probabilities that the target gives it and its alternatives, in words."""

    token: Spelling
    logprob: float
    top: tuple[tuple[Spelling, float], ...]  # the likeliest first
    offset: int  # characters of the answer before it


class TokenSpeller:
    """Spells the tokens of one vocabulary, each looked up once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        # Some tokenizers drop the space of a first token: every token is decoded behind this one.
        self._before = vocabulary.encode_piece("a")
        self._known: dict[int, Spelling] = {}

    def spell(self, token: int) -> Spelling:
        if token not in self._known:
            self._known[token] = self._spell(token)
        return self._known[token]

    def _spell(self, token: int) -> Spelling:
        vocabulary = self.vocabulary
        if not vocabulary.is_visible(token):
            return Spelling(vocabulary.token_text(token), None)
        text = vocabulary.decode([*self._before, token])[len(vocabulary.decode(self._before)) :]
        if REPLACEMENT not in text:
            return Spelling(text, text.encode())
        raw = _raw_bytes(str(vocabulary.hf.convert_ids_to_tokens(token)))
        return Spelling(text if raw is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw)


def _raw_bytes(entry: str) -> bytes | None:
    """The bytes of a vocabulary entry, by either convention; None where it follows neither."""
    if match := _BYTE_TOKEN.fullmatch(entry):
        return bytes.fromhex(match[1])
    if all(character in _BYTE_OF for character in entry):
        return bytes(_BYTE_OF[character] for character in entry)
    return None


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


class LogprobTexts:
    """Spells what is reported of one choice's tokens, with their places in its text."""

    def __init__(self, speller: TokenSpeller) -> None:
        self._speller = speller
        self._detokenizer = IncrementalDetokenizer(speller.vocabulary)
        self._offset = 0

    def of(self, chunk: Chunk) -> list[Reported]:
        """One entry for each token of the chunk, also for those whose text is held back."""
        spell = self._speller.spell
        entries = []
        for token, reported in zip(chunk.tokens, chunk.logprobs, strict=True):
            top = tuple((spell(other), logprob) for other, logprob in reported.top)
            entries.append(Reported(spell(token), reported.logprob, top, self._offset))
            self._offset += len(self._detokenizer.feed((token,)))
        return entries
