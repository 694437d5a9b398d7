"""Text from tokens and stop strings, against plain decoding, for the three kinds of decoder in use."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from outrider.errors import ConfigError, RequestError
from outrider.text import IncrementalDetokenizer, StopStrings, TextStream, Tokenizer

TURKISH = "Iğdır'da yağmur çiseliyor, İstanbul'da güneş; şoför öğlen üzümünü yedi."
CJK = "投机解码让大模型更快。日本語も、한국어도."
EMOJI = "👨‍👩‍👧‍👦 👍🏽 🇹🇷 🤖é"
MIXED = f"{TURKISH} {CJK} {EMOJI}"

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|start|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)


def byte_level() -> Backend:
    """GPT-2's kind: any byte string is a token string."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([MIXED, "the theme of the thesis"], trainer)
    backend.add_tokens([AddedToken("<think>", special=False)])
    return backend


def byte_fallback() -> Backend:
    """Llama 2's kind: words with a marked space, and byte tokens for what the vocabulary lacks."""
    words = ["<unk>", "<|end|>", "<|start|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", *"abcdefghijklmnopqrstuvwxyz:.,!", "▁t", "th", "▁th", "▁the"]
    merges = [("▁", "t"), ("t", "h"), ("▁t", "h"), ("▁th", "e")]
    vocab = {word: id for id, word in enumerate(words)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<|end|>", "<|start|>"])
    return backend


def word_pieces() -> Backend:
    """BERT's kind: the decoder puts the spaces between words."""
    words = ["[UNK]", "<|end|>", "<|start|>", "the", "##me", "##sis", "of", ",", ".", "a", "##b"]
    backend = Backend(models.WordPiece({word: id for id, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["<|end|>", "<|start|>"])
    return backend


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "word_pieces": word_pieces}


def save(backend: Backend, folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", bos_token="<|start|>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=sorted(KINDS))
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save(KINDS[request.param](), tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save(byte_level(), tmp_path_factory.mktemp("words")))


def blocks(data: st.DataObject, tokens: list[int]) -> list[list[int]]:
    """The tokens cut at random places."""
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(tokens) - 1)), max_size=len(tokens))))
    edges = [0, *(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    return [tokens[start:end] for start, end in itertools.pairwise(edges)]


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_pieces_of_any_tokens_in_any_blocks_add_up_to_decode(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    # Ids beyond the vocabulary, special tokens and broken bytes included.
    tokens = data.draw(st.lists(st.integers(0, tokenizer.size + 3), max_size=60))
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.feed(block) for block in blocks(data, tokens)]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(tokens)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_no_character_of_real_text_is_broken(words: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.text(st.sampled_from(MIXED), max_size=40))
    detokenizer = IncrementalDetokenizer(words)
    pieces = [detokenizer.feed(block) for block in blocks(data, words.encode(text))]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""


def test_text_comes_out_as_soon_as_its_characters_are_whole(words: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(words)
    given_out = ""
    tokens = words.encode(MIXED)
    for count, token in enumerate(tokens, start=1):
        given_out += detokenizer.feed([token])
        assert given_out == words.decode(tokens[:count]).rstrip("\ufffd")


def test_an_unfinished_character_at_the_end_is_a_replacement_character(words: Tokenizer) -> None:
    tokens = words.encode("x🤖")[:-1]
    detokenizer = IncrementalDetokenizer(words)
    assert detokenizer.feed(tokens) == "x"
    assert detokenizer.flush() == "\ufffd"


class CountingDecoder:
    """Counts how many tokens were decoded in all."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoded = 0
        self.is_visible = tokenizer.is_visible
        self.is_byte = tokenizer.is_byte

    def decode(self, tokens: Sequence[int]) -> str:
        self.decoded += len(tokens)
        return self._tokenizer.decode(tokens)


@pytest.mark.parametrize("kind", ["text", "broken bytes"])
def test_work_grows_with_the_number_of_tokens_only(words: Tokenizer, kind: str) -> None:
    (lone_byte,) = [id for id in range(words.size) if words._backend.id_to_token(id) == "ÿ"]
    tokens = [lone_byte] * 3000 if kind == "broken bytes" else words.encode(MIXED * 20)[:3000]
    counting = CountingDecoder(words)
    detokenizer = IncrementalDetokenizer(counting)
    pieces = [detokenizer.feed([token]) for token in tokens]
    assert "".join(pieces) + detokenizer.flush() == words.decode(tokens)
    assert counting.decoded < 60 * len(tokens)


def expected_text(text: str, stop: list[str]) -> tuple[str, bool]:
    """By reading on: cut at the first character that completes a stop string, at the longest one."""
    for end in range(1, len(text) + 1):
        done = [word for word in stop if text[:end].endswith(word)]
        if done:
            return text[: end - max(map(len, done))], True
    return text, False


@given(
    pieces=st.lists(st.text("abc", max_size=6), max_size=8),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
)
@settings(max_examples=500, deadline=None)
def test_stop_strings_cut_the_same_text_however_it_is_cut_into_pieces(
    pieces: list[str], stop: list[str]
) -> None:
    finder = StopStrings(stop)
    text = "".join(finder.feed(piece) for piece in pieces)
    assert (text + finder.flush(), finder.stopped) == expected_text("".join(pieces), stop)


def test_a_possible_stop_string_is_held_back_and_given_when_it_was_none() -> None:
    finder = StopStrings(["###"])
    assert [finder.feed("a#"), finder.feed("#"), finder.feed("b##"), finder.flush()] == ["a", "", "##b", "##"]
    assert not finder.stopped


def test_a_stop_string_completed_inside_a_block_trims_text_and_tokens(words: Tokenizer) -> None:
    tokens = words.encode("one two STOP three")
    at = next(n for n in range(len(tokens)) if "STOP" in words.decode(tokens[: n + 1]))
    stream = TextStream(words, ["STOP"])
    piece = stream.feed(tokens)
    assert (piece.text, piece.used, piece.stopped) == ("one two ", at + 1, True)
    assert at + 1 < len(tokens)
    assert stream.finish() == ""


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_tokens_used_up_to_a_stop_string_do_not_depend_on_the_blocks(
    words: Tokenizer, data: st.DataObject
) -> None:
    tokens = words.encode(data.draw(st.text("abç🤖 .", min_size=1, max_size=30)))
    stop = data.draw(st.lists(st.text("abç🤖 .", min_size=1, max_size=3), max_size=3))
    results = []
    for cut in (blocks(data, tokens), [[token] for token in tokens]):
        stream, text, used, stopped = TextStream(words, stop), "", 0, False
        for block in cut:
            piece = stream.feed(block)
            text, used, stopped = text + piece.text, used + piece.used, piece.stopped
            if stopped:
                break
        results.append((text + stream.finish(), used, stopped))
    assert results[0] == results[1]
    assert results[0][0] == expected_text(words.decode(tokens), stop)[0]


def test_an_unfinished_character_can_complete_a_stop_string_at_the_end(words: Tokenizer) -> None:
    stream = TextStream(words, ["\ufffd"])
    assert stream.feed(words.encode("x🤖")[:-1]).text == "x"
    assert stream.finish() == ""


def test_a_prompt_is_tokenized_as_transformers_does(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(" the theme of") == tokenizer._hf(" the theme of")["input_ids"]


def test_a_conversation_is_tokenized_as_transformers_does(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "theme"}]
    theirs = tokenizer._hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode_chat(messages) == theirs  # type: ignore[arg-type]


def test_a_template_that_refuses_a_message_is_the_clients_mistake(words: Tokenizer) -> None:
    with pytest.raises(RequestError, match="no tools here") as refused:
        words.encode_chat([{"role": "tool", "content": "x"}])
    assert refused.value.param == "messages"


def test_a_model_without_chat_template_says_where_to_go(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(byte_level(), tmp_path, chat_template=None))
    with pytest.raises(RequestError, match="/v1/completions"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("listed", "expected"), [(7, (0, 7)), ([7, 0, 9], (0, 7, 9)), (None, (0, 5)), ("absent", (0, 5))]
)
def test_every_eos_id_of_the_folder_is_known(
    tmp_path: Path, listed: object, expected: tuple[int, ...]
) -> None:
    folder = save(byte_level(), tmp_path)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    if listed != "absent":
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    assert Tokenizer(folder).eos_token_ids == expected


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        Tokenizer(tmp_path)
