"""Text in, text out: the tokenizer, text made from tokens as they come, and stop strings.

One generation's way from tokens to text is `TextStream`: tokens go through an `IncrementalDetokenizer`,
which holds back what later tokens can still change (half a character), and then through `StopStrings`,
which holds back what may become a stop string. Whatever the split of the tokens into blocks, the text is
the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, cast

from outrider.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet."""

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_MAX_HELD_TOKENS = 16  # a character is at most 4 bytes; beyond this the held tokens are mostly garbage


class ChatMessage(TypedDict):
    """One message of a conversation, as chat templates read it."""

    role: str
    content: str


class TokenDecoder(Protocol):
    """What a detokenizer needs of a tokenizer."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens; special tokens and ids beyond the vocabulary have none."""
        ...

    def is_visible(self, token: int) -> bool:
        """False: the token never has text (a special token, or padding of the vocabulary)."""
        ...

    def is_byte(self, token: int) -> bool:
        """True: the token is one raw byte (`<0xE4>`) whose run of neighbours decodes as a whole."""
        ...


class Tokenizer:
    """The tokenizer of a model folder. Needs a fast one (`tokenizer.json`), else raises `ConfigError`."""

    def __init__(self, folder: str | Path) -> None:
        from transformers import AutoTokenizer

        try:
            loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"no tokenizer could be read from {str(folder)!r}: {error}") from error
        if not loaded.is_fast:
            raise ConfigError(f"the tokenizer in {str(folder)!r} has no tokenizer.json: a fast one is needed")
        self._hf = cast("PreTrainedTokenizerFast", loaded)
        self._backend: Any = self._hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._special = frozenset(id for id, token in self._hf.added_tokens_decoder.items() if token.special)
        self._byte_tokens = frozenset(
            id for token, id in self._backend.get_vocab().items() if _BYTE_TOKEN.fullmatch(token)
        )
        self.size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = _eos_token_ids(Path(folder), self._hf.eos_token_id)
        """Every id that ends a generation, the tokenizer's own first."""

    @property
    def hf(self) -> PreTrainedTokenizerFast:
        """The tokenizer that is wrapped, for libraries that want transformers' own."""
        return self._hf

    @property
    def has_chat_template(self) -> bool:
        return self._hf.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """Tokens of a text prompt, with the special tokens the model wants around one."""
        return cast(list[int], self._backend.encode(text, add_special_tokens=True).ids)

    def encode_piece(self, text: str) -> list[int]:
        """Tokens of a text that stands inside another, such as a predicted answer: no special tokens."""
        return cast(list[int], self._backend.encode(text, add_special_tokens=False).ids)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Tokens of a conversation up to where the assistant speaks.

        Raises `RequestError` when the model's chat template refuses the messages or is missing.
        """
        from jinja2 import TemplateError

        if not self.has_chat_template:
            raise RequestError(
                "this model has no chat template: send a prompt to /v1/completions", param="messages"
            )
        try:
            text = self._hf.apply_chat_template(
                cast(list[dict[str, str]], list(messages)), tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        # The template writes the special tokens itself.
        return cast(list[int], self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens. Special tokens have none; spaces are left as the model wrote them."""
        return cast(str, self._backend.decode(tokens, skip_special_tokens=True))

    def token_text(self, token: int) -> str:
        """One token in words, special ones by their names; a part of a character has U+FFFD in it."""
        return cast(str, self._backend.decode([token], skip_special_tokens=False))

    def is_visible(self, token: int) -> bool:
        return token not in self._special and self._backend.id_to_token(token) is not None

    def is_byte(self, token: int) -> bool:
        return token in self._byte_tokens


def _eos_token_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """The tokenizer's id and those of generation_config.json (config.json where that one is absent)."""
    found: list[int] = [] if tokenizer_eos is None else [tokenizer_eos]
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.exists():
            listed = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            if listed is not None:
                found += listed if isinstance(listed, list) else [listed]
                break
    return tuple(dict.fromkeys(found))


class IncrementalDetokenizer:
    """Tokens of one generation to text. All pieces and the `flush` together are `decode` of all tokens.

    Held back is only what later tokens can change: the bytes of an unfinished character. A character made
    of several code points (a family emoji, a letter with a combining mark) may come in several pieces,
    each of them valid text.

    Each call decodes a short window only: the tokens since the last clean boundary, behind those of the
    boundary before it, since how a token decodes can depend on whether it is the first.
    """

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        self._fresh = 0  # index in the window of the first token after the last clean boundary
        self._given = 0  # characters of decode(window) that were given out

    def feed(self, tokens: Sequence[int]) -> str:
        """Add tokens; the text that is now certain, which may be empty."""
        visible = [token for token in tokens if self._decoder.is_visible(token)]
        if not visible:
            return ""
        self._window += visible
        if self._decoder.is_byte(visible[-1]):
            return ""  # the whole run of byte tokens turns to replacement characters if one is wrong
        text = self._decoder.decode(self._window)
        # Only the last replacement character is undecided: those before it were followed by other bytes.
        certain = len(text) - 1 if text.endswith(REPLACEMENT) else len(text)
        piece = text[self._given : certain]
        self._given = certain
        if certain == len(text) and piece:
            self._move_window(self._fresh, len(self._window))
        elif len(self._window) - self._fresh > _MAX_HELD_TOKENS:
            self._cut_garbage(text)
        return piece

    def flush(self) -> str:
        """The generation is over: what was held back, an unfinished character as U+FFFD."""
        text = self._decoder.decode(self._window)
        piece = text[self._given :]
        self._given = len(text)
        return piece

    def _move_window(self, start: int, fresh: int) -> None:
        """Forget the tokens before `start`; what they gave is given."""
        self._window = self._window[start:]
        self._fresh = fresh - start
        self._given = len(self._decoder.decode(self._window[: self._fresh]))

    def _cut_garbage(self, text: str) -> None:
        """Keep the window short while no boundary is clean, as when a model only writes broken bytes.

        The last tokens hold at least the 4 bytes that decide what comes before them, so a place where the
        halves decode to the whole stays right whatever follows.
        """
        cut = len(self._window) - 4
        head, tail = self._decoder.decode(self._window[:cut]), self._decoder.decode(self._window[cut:])
        if head + tail == text and len(head) <= self._given:
            self._window = self._window[cut:]
            self._fresh = 0
            self._given -= len(head)


class StopStrings:
    """Finds the first stop string that text completes, however the text is cut into pieces.

    Of two that are completed by the same character the longer one counts.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Add text; what is certain to come before any stop string. Sets `stopped` once one is complete."""
        if self.stopped or not text:
            return ""
        buffer = self._held + text
        found = [(at + len(stop), at) for stop in self._stop if (at := buffer.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return buffer[: min(found)[1]]
        certain = len(buffer) - self._possible_start(buffer)
        self._held = buffer[certain:]
        return buffer[:certain]

    def flush(self) -> str:
        """The generation is over: what was held back was no stop string."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, buffer: str) -> int:
        """Length of the longest end of `buffer` with which a stop string begins."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(buffer)), 0, -1):
            if buffer.endswith(tuple(stop[:length] for stop in self._stop if len(stop) > length)):
                return length
        return 0


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What a block of tokens gave."""

    text: str  # certain text, which may lag behind the tokens
    used: int  # tokens of the block that count: fewer than given when a stop string ended inside it
    stopped: bool  # a stop string is complete: the generation ends with the last used token


class TextStream:
    """One generation's tokens to its text, stop strings cut off."""

    def __init__(self, decoder: TokenDecoder, stop: Sequence[str] = (), *, min_tokens: int = 0) -> None:
        """The text of the first `min_tokens` tokens is not searched for stop strings, as in vLLM."""
        self._detokenizer = IncrementalDetokenizer(decoder)
        self._stop = StopStrings(stop) if stop else None
        self._exempt = min_tokens

    def feed(self, tokens: Sequence[int]) -> TextPiece:
        """Add a block of committed tokens. Nothing may be fed once a piece said `stopped`."""
        if self._stop is None:
            return TextPiece(self._detokenizer.feed(tokens), len(tokens), stopped=False)
        pieces = []
        for index, token in enumerate(tokens):
            text = self._detokenizer.feed((token,))
            if self._exempt:
                self._exempt -= 1
                pieces.append(text)
                continue
            pieces.append(self._stop.feed(text))
            if self._stop.stopped:
                return TextPiece("".join(pieces), index + 1, stopped=True)
        return TextPiece("".join(pieces), len(tokens), stopped=False)

    def finish(self) -> str:
        """The generation ended for another reason: what was held back, up to a stop string in it."""
        rest = self._detokenizer.flush()
        if self._stop is None:
            return rest
        text = self._stop.feed(rest)
        return text + self._stop.flush()
