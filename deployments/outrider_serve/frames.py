"""Bytes on a link: length-prefixed msgpack frames, each a list of messages.

    frame   = length (4 bytes, big endian) + msgpack [[kind, body], ...]
    body    = the message as a msgpack map, field names as in `outrider/messages.py`
    first frame of either side = [[0, Hello]];  an empty list is a sign of life

Decoding is typed and knows only the kinds that its end expects, so a hostile peer can make values of
our own message classes and nothing else. `LegLost` has no kind: it never crosses a wire.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from outrider.messages import (
    Close,
    DraftOrder,
    Open,
    Plan,
    Proposal,
    Resync,
    Verdict,
    VerifyOrder,
)

MAX_FRAME_BYTES = 8 << 20

_LENGTH = struct.Struct(">I")


class FrameError(Exception):
    """Bytes that are not a frame of this link, or a message that cannot become one."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of either side: which wire this peer speaks, and who it is."""

    version: int
    role: str  # "router", "verifier" or "drafter"
    replica: str


WireMessage: TypeAlias = Open | Plan | VerifyOrder | Close | DraftOrder | Proposal | Verdict | Resync

TO_VERIFIER: tuple[type[WireMessage], ...] = (Open, Plan, VerifyOrder, Close)
FROM_VERIFIER: tuple[type[WireMessage], ...] = (Verdict, Resync)
TO_DRAFTER: tuple[type[WireMessage], ...] = (Open, DraftOrder, Close)
FROM_DRAFTER: tuple[type[WireMessage], ...] = (Proposal, Resync)

_KINDS: dict[type[Any], int] = {
    Hello: 0,
    Open: 1,
    Plan: 2,
    VerifyOrder: 3,
    Close: 4,
    DraftOrder: 5,
    Proposal: 6,
    Verdict: 7,
    Resync: 8,
}

_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(list[tuple[int, msgspec.Raw]])
_bodies: dict[int, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(message_type) for message_type, kind in _KINDS.items()
}


@dataclass(frozen=True, slots=True)
class Unsendable:
    """A message that no frame can hold, and why."""

    message: Any  # a WireMessage; of a Hello only `encode` hears
    reason: str


def pack(messages: Sequence[WireMessage | Hello]) -> tuple[bytes, list[Unsendable]]:
    """Messages as one frame, in order, or as several when one would be too long; and those left out."""
    try:
        body = _encoder.encode([(_KINDS[type(message)], message) for message in messages])
        fault = None if len(body) <= MAX_FRAME_BYTES else f"{len(body)} bytes, the limit is {MAX_FRAME_BYTES}"
    except (OverflowError, TypeError, ValueError, msgspec.MsgspecError) as error:
        # An integer beyond 64 bits, a lone surrogate in a text: a value that msgpack has no form for.
        fault = f"{type(error).__name__}: {error}"
    if fault is None:
        return _LENGTH.pack(len(body)) + body, []
    if len(messages) == 1:
        return b"", [Unsendable(messages[0], f"a {type(messages[0]).__name__} cannot be sent: {fault}")]
    half = len(messages) // 2  # so that one message's fault is not its neighbours'
    (first, left_out), (second, also) = pack(messages[:half]), pack(messages[half:])
    return first + second, left_out + also


def encode(messages: Sequence[WireMessage | Hello]) -> bytes:
    """Messages as frames, all of them; FrameError where one cannot be sent."""
    data, left_out = pack(messages)
    if left_out:
        raise FrameError(left_out[0].reason)
    return data


class FrameReader:
    """Turns a byte stream into frames; `accepts` are the message types this end expects after the Hello."""

    def __init__(self, accepts: Collection[type[WireMessage]]) -> None:
        self._kinds = {_KINDS[message_type] for message_type in accepts}
        self._buffer = bytearray()
        self._greeted = False

    def feed(self, data: bytes) -> list[list[Any]]:
        """Take bytes as they come and return the frames they complete.

        The first frame is `[Hello]`, the others hold `accepts`. Raises FrameError.
        """
        self._buffer += data
        frames = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            frames.append(self._decode(bytes(self._buffer[start + _LENGTH.size : end])))
            start = end
        del self._buffer[:start]
        return frames

    def _decode(self, body: bytes) -> list[Any]:
        try:
            envelope = _envelope.decode(body)
            if not self._greeted:
                if [kind for kind, _ in envelope] != [_KINDS[Hello]]:
                    raise FrameError("the first frame is not a Hello")
                self._greeted = True
            elif not all(kind in self._kinds for kind, _ in envelope):
                raise FrameError("a frame holds a kind of message that this end does not take")
            return [_bodies[kind].decode(raw) for kind, raw in envelope]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError(f"malformed frame: {error}") from None
