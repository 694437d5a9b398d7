"""A worker's side of its leases: who holds one, with what token, and on which connection it speaks.

A sequence is in by `lease()` (a Serve call), opens with the lease's token on a link, and is out by the
first of: `Close`, the link's loss, the lease's cancellation. Messages about a sequence count only on the
connection that opened it, so a peer can neither hear nor disturb another's sequence.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import serve

from outrider.errors import ConfigError
from outrider.messages import WIRE_VERSION, Close, DraftOrder, Open, Resync, VerifyOrder
from outrider_serve.frames import Hello, Unsendable, WireMessage
from outrider_serve.lease import Admitted, Full
from outrider_serve.link import HEARTBEAT_S, Connection

logger = logging.getLogger(__name__)

LEASES_PER_PLACE = 2
"""With every place taken a worker must still answer `Full`: Serve's own limit stays above that."""

OPEN_WITHIN_S = 30.0
"""A lease whose sequence is not opened by then gives its place back."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a replica is: its name among its peers, and the address that they reach it by."""

    replica: str
    host: str


def this_place() -> Place:
    """The place of the Serve replica that runs this code."""
    return Place(serve.get_replica_context().replica_tag, ray.util.get_node_ip_address())


@dataclass(slots=True, eq=False)
class _Holding:
    """One lease. `connection` and `epoch` are set by the Open that redeems the token."""

    sequence: str
    token: str
    over: asyncio.Event = field(default_factory=asyncio.Event)
    connection: Connection | None = None
    epoch: int = 0


class LeaseDesk:
    """Admits sequences up to `capacity` and passes messages between their links and the worker's loop."""

    def __init__(
        self,
        place: Place,
        *,
        role: str,
        capacity: int,
        accepts: tuple[type[WireMessage], ...],
        submit: Callable[[Sequence[Any]], None],
        port: int,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """`submit` takes messages to the worker's loop and must not block.

        Made on the replica's event loop, which serves the links from its next turn on. Raises
        ConfigError where `port` is taken.
        """
        self._place = place
        self._capacity = capacity
        self._accepts = accepts
        self._submit = submit
        self._hello = Hello(WIRE_VERSION, role, place.replica)
        self._heartbeat_s = heartbeat_s
        self._by_token: dict[str, _Holding] = {}
        self._opened: dict[tuple[str, int], _Holding] = {}
        # Weak: a stranger who never greets is gone with its socket, and nobody is told.
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._loop = asyncio.get_running_loop()
        self._socket = _listen(place.host, port)
        self.port: int = self._socket.getsockname()[1]
        self._listening = self._loop.create_task(
            self._loop.create_server(self._connection, sock=self._socket)
        )

    @property
    def held(self) -> int:
        """Places that are taken."""
        return len(self._by_token)

    async def lease(self, sequence: str) -> AsyncGenerator[Admitted | Full, None]:
        """Say whether there is room; if so, hold the place until the sequence is over."""
        await asyncio.shield(self._listening)
        if len(self._by_token) >= self._capacity:
            yield Full(self._place.replica, self._capacity)
            return
        holding = _Holding(sequence, secrets.token_urlsafe(16))
        self._by_token[holding.token] = holding
        expiry = self._loop.call_later(OPEN_WITHIN_S, self._expire, holding)
        try:
            yield Admitted(self._place.replica, self._place.host, self.port, holding.token)
            await holding.over.wait()
        finally:
            expiry.cancel()
            self._free(holding)

    def deliver(self, messages: Sequence[Any]) -> None:
        """Pass what the worker says to the links; callable from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._hand_out, messages)
        except RuntimeError:
            logger.info("the replica is going: %d messages have nowhere to go", len(messages))

    async def stop(self) -> None:
        """Stop listening and close the links; returns when their sockets are closed."""
        server = await self._listening
        server.close()
        connections = list(self._connections)
        for connection in connections:
            connection.close("the worker stops")
        for connection in connections:
            await connection.gone.wait()

    def received(self, connection: Connection, messages: list[Any]) -> None:
        passed = [message for message in messages if self._passes(connection, message)]
        if passed:
            self._submit(passed)

    def unsendable(self, connection: Connection, left_out: Unsendable) -> None:
        """End the sequence of a message that its router will never get; the lease's end tells the router."""
        logger.error("%s", left_out.reason)
        holding = self._opened.get((left_out.message.sequence, left_out.message.epoch))
        if holding is not None and holding.connection is connection:
            self._free(holding)

    def lost(self, connection: Connection, reason: str) -> None:
        self._connections.discard(connection)
        holdings = [holding for holding in self._by_token.values() if holding.connection is connection]
        if holdings:
            peer = connection.peer.replica if connection.peer is not None else "a stranger"
            logger.warning("link to %.64r: %s; %d sequences end", peer, reason, len(holdings))
        for holding in holdings:
            self._free(holding)

    def _connection(self) -> Connection:
        connection = Connection(self, hello=self._hello, accepts=self._accepts, heartbeat_s=self._heartbeat_s)
        self._connections.add(connection)
        return connection

    def _passes(self, connection: Connection, message: Any) -> bool:
        """Whether the worker should hear a message; a refused one is answered where that helps the router."""
        if isinstance(message, Open):
            holding = self._by_token.get(message.token)
            if holding is not None and holding.connection is None and holding.sequence == message.sequence:
                holding.connection, holding.epoch = connection, message.epoch
                self._opened[message.sequence, message.epoch] = holding
                return True
            logger.warning("refused to open %.64r: its token is not that of a lease", message.sequence)
            connection.send(Resync(message.sequence, message.epoch, committed_len=0))
            return False
        holding = self._opened.get((message.sequence, message.epoch))
        if holding is None or holding.connection is not connection:
            if isinstance(message, VerifyOrder | DraftOrder):
                connection.send(Resync(message.sequence, message.epoch, committed_len=0))
            return False
        if isinstance(message, Close):
            self._forget(holding)
        return True

    def _hand_out(self, messages: Sequence[Any]) -> None:
        for message in messages:
            holding = self._opened.get((message.sequence, message.epoch))
            if holding is not None and holding.connection is not None:
                holding.connection.send(message)

    def _expire(self, holding: _Holding) -> None:
        if holding.connection is None:
            logger.warning("the lease of %s was not used within %g s", holding.sequence, OPEN_WITHIN_S)
            self._free(holding)

    def _free(self, holding: _Holding) -> None:
        """End a lease from this side; the worker is told if it still has the sequence."""
        if self._opened.get((holding.sequence, holding.epoch)) is holding:
            self._submit([Close(holding.sequence, holding.epoch, cancelled=True)])
        self._forget(holding)

    def _forget(self, holding: _Holding) -> None:
        self._by_token.pop(holding.token, None)
        if self._opened.get((holding.sequence, holding.epoch)) is holding:
            del self._opened[holding.sequence, holding.epoch]
        holding.over.set()


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=128)
    except OSError as error:
        raise ConfigError(
            f"the link cannot listen on {host}:{port} ({os.strerror(error.errno or 0)}): a fixed port allows "
            "one replica of a deployment a node; set port: 0 to let each pick a free one"
        ) from error
