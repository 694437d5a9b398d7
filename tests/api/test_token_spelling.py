"""Tokens in words: text, bytes of a part of a character, names of what has no text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from outrider.generation import Chunk
from outrider.messages import TokenLogprobs
from outrider.text import Tokenizer
from outrider_serve.token_spelling import LogprobTexts, TokenSpeller


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Tokenizer:
    return Tokenizer(tiny_llama)


@pytest.mark.parametrize("text", ["plain words", " two  spaces\n", "Ağaç 草稿", "🙂🚀 naïve\x00", "\ufffd!"])
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    speller = TokenSpeller(tokenizer)
    spelled = [speller.spell(token) for token in tokenizer.encode_piece(text)]
    assert b"".join(one.bytes or b"" for one in spelled) == text.encode()


def test_no_two_tokens_of_a_vocabulary_are_spelled_alike(tokenizer: Tokenizer) -> None:
    """Alternatives are listed by their spelling: a shared one would drop all but the last."""
    speller = TokenSpeller(tokenizer)
    assert len({speller.spell(token).name for token in range(tokenizer.size)}) == tokenizer.size


def test_a_special_token_has_a_name_and_no_bytes(tokenizer: Tokenizer) -> None:
    spelled = TokenSpeller(tokenizer).spell(tokenizer.eos_token_ids[0])
    assert (spelled.name, spelled.bytes) == ("<|end|>", None)


class Sentencepiece:
    """A vocabulary in which `▁` is a space that a first token loses, with byte tokens."""

    pieces = ("▁a", "▁the", "the", "<0xF0>", "<0x9F>")

    def __init__(self) -> None:
        self.backend = Backend(models.WordLevel({piece: i for i, piece in enumerate(self.pieces)}, "▁a"))
        self.backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )

    @property
    def hf(self) -> Sentencepiece:
        return self

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.pieces[token]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.backend.decode(list(tokens)))

    def encode_piece(self, text: str) -> list[int]:
        return [self.pieces.index("▁" + text)]

    def token_text(self, token: int) -> str:
        return self.pieces[token]

    def is_visible(self, token: int) -> bool:
        return True

    def is_byte(self, token: int) -> bool:
        return self.pieces[token].startswith("<0x")


def test_a_word_keeps_its_space_where_the_tokenizer_drops_that_of_a_first_token() -> None:
    speller = TokenSpeller(Sentencepiece())
    assert [speller.spell(token).name for token in range(5)] == [
        " a",
        " the",
        "the",
        r"bytes:\xf0",
        r"bytes:\x9f",
    ]
    assert speller.spell(3).bytes == b"\xf0"


def test_places_count_whole_characters_and_do_not_depend_on_the_cut_into_chunks(tokenizer: Tokenizer) -> None:
    tokens = tuple(tokenizer.encode_piece("a🙂b 草"))
    reported = tuple(TokenLogprobs(-1.0) for _ in tokens)

    def chunk(begin: int, end: int) -> Chunk:
        cut = slice(begin, end)
        return Chunk("", tokens[cut], tuple(False for _ in tokens[cut]), None, reported[cut])

    whole = LogprobTexts(TokenSpeller(tokenizer)).of(chunk(0, len(tokens)))
    texts = LogprobTexts(TokenSpeller(tokenizer))
    one_by_one = [entry for place in range(len(tokens)) for entry in texts.of(chunk(place, place + 1))]
    assert whole == one_by_one
    assert [entry.offset for entry in whole if entry.token.name in ("a", "b")] == [0, 2]
