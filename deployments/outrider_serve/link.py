"""Rounds between replicas: one TCP connection a router and worker pair, shared by all their sequences.

`Connection` is either end. It greets, frames, coalesces what is sent within one tick of the event loop
into one write, shows a sign of life, and notices silence. What the messages mean is its owner's affair:
`lease.py` on the router's side, `desk.py` on the worker's. docs/link.md has the measurements behind it.

Not here: TLS. Frames cross a cluster network in the clear, as Ray's own traffic does by default.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, Protocol, cast

from outrider.messages import WIRE_VERSION
from outrider_serve.frames import FrameError, FrameReader, Hello, Unsendable, WireMessage, encode, pack

HEARTBEAT_S = 5.0
"""A peer shows a sign of life at least this often."""
MISSED_HEARTBEATS = 3
"""So many silent heartbeats in a row and the peer counts as gone."""
HANDSHAKE_S = 5.0
"""A peer that has not said Hello by then is cut off."""
MAX_UNSENT_BYTES = 32 << 20
"""A peer that lets this much pile up has stopped reading and is cut off."""


class LinkError(Exception):
    """The link could not be made, or is gone; the message says why."""


class LinkOwner(Protocol):
    """Who a connection tells, on its event loop."""

    def received(self, connection: Connection, messages: list[Any]) -> None:
        """A frame of messages, of the kinds that the connection accepts, in the order they were sent."""
        ...

    def unsendable(self, connection: Connection, left_out: Unsendable) -> None:
        """One message could not be sent and was dropped; those sent with it were not."""
        ...

    def lost(self, connection: Connection, reason: str) -> None:
        """The connection is over, for whatever reason; called once, and only after a handshake."""
        ...


class Connection(asyncio.Protocol):
    """One end of a link. asyncio and uvloop set TCP_NODELAY themselves, so small frames leave at once."""

    def __init__(
        self,
        owner: LinkOwner,
        *,
        hello: Hello,
        accepts: Collection[type[WireMessage]],
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._owner = owner
        self._hello = hello
        self._reader = FrameReader(accepts)
        self._heartbeat_s = heartbeat_s
        self._loop = asyncio.get_running_loop()
        self._outbox: list[WireMessage] = []
        self._flush_scheduled = False
        self._last_heard = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._close_reason: str | None = None
        self._transport: asyncio.Transport | None = None
        self.peer: Hello | None = None
        self.greeted: asyncio.Future[Hello] = self._loop.create_future()
        self.gone = asyncio.Event()  # nothing of it is left, down to the socket

    @property
    def open(self) -> bool:
        """Whether the peer has greeted and nothing has ended the connection since."""
        return self.peer is not None and self._close_reason is None

    def send(self, message: WireMessage) -> None:
        """Put a message into the next frame, which leaves at the end of this tick of the loop.

        On a connection that is over the message is dropped: its owner was told, or is about to be.
        """
        if self._close_reason is not None:
            return
        self._outbox.append(message)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def close(self, reason: str) -> None:
        """End the connection; what is still in the outbox goes out first."""
        self._flush()
        self._end(reason)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(encode([self._hello]))
        self._timer = self._loop.call_later(HANDSHAKE_S, self._end, "the peer did not greet")

    def data_received(self, data: bytes) -> None:
        self._last_heard = self._loop.time()
        try:
            frames = self._reader.feed(data)
        except FrameError as error:
            self._end(str(error))
            return
        for frame in frames:
            if self._close_reason is not None:
                return
            if self.peer is None:
                self._greet(frame[0])
            elif frame:
                self._owner.received(self, frame)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"connection lost: {error}" if error else "the peer closed the connection")
        self.gone.set()

    def _greet(self, hello: Hello) -> None:
        if hello.version != WIRE_VERSION:
            self._end(f"{hello.replica!r:.64} speaks wire version {hello.version}, this end {WIRE_VERSION}")
            return
        self.peer = hello
        if not self.greeted.done():
            self.greeted.set_result(hello)
        if self._timer is not None:
            self._timer.cancel()
        self._beat()

    def _beat(self) -> None:
        silence = self._loop.time() - self._last_heard
        if silence > MISSED_HEARTBEATS * self._heartbeat_s:
            self._end(f"silent for {silence:.1f} s", abort=True)
            return
        self._write(encode([]))
        self._timer = self._loop.call_later(self._heartbeat_s, self._beat)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._outbox and self._close_reason is None:
            messages, self._outbox = self._outbox, []
            data, left_out = pack(messages)
            if data:
                self._write(data)
            for one in left_out:
                self._owner.unsendable(self, one)

    def _write(self, data: bytes) -> None:
        if self._transport is None:
            return
        self._transport.write(data)
        unsent = self._transport.get_write_buffer_size()
        if unsent > MAX_UNSENT_BYTES:
            self._end(f"the peer does not read: {unsent} bytes unsent", abort=True)

    def _end(self, reason: str, *, abort: bool = False) -> None:
        if self._close_reason is not None:
            return
        self._close_reason = reason
        self._outbox = []
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            if abort:
                self._transport.abort()
            else:
                self._transport.close()
        if self.peer is None:
            if not self.greeted.done():
                self.greeted.set_exception(LinkError(reason))
                self.greeted.exception()  # a server has nobody who awaits it
        else:
            self._owner.lost(self, reason)


async def connect(
    host: str,
    port: int,
    owner: LinkOwner,
    *,
    hello: Hello,
    expect: Hello,
    accepts: Collection[type[WireMessage]],
    heartbeat_s: float = HEARTBEAT_S,
) -> Connection:
    """Open a link to the worker `expect`; LinkError if it is not there or is not who it should be."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            _, connection = await loop.create_connection(
                lambda: Connection(owner, hello=hello, accepts=accepts, heartbeat_s=heartbeat_s), host, port
            )
            try:
                peer = await asyncio.shield(connection.greeted)
                if peer != expect:
                    # A dead replica's port is soon taken again: a token must not go to a stranger.
                    raise LinkError(f"{peer.role} {peer.replica} answers, not {expect.role} {expect.replica}")
            except BaseException:
                connection.close("no link came of it")
                raise
    except (OSError, TimeoutError, LinkError) as error:
        raise LinkError(f"no link to {expect.replica} at {host}:{port}: {error or 'timed out'}") from error
    return connection
