"""A router's leases: for each sequence one streaming Serve call that stays open as long as the sequence.

    pool.lease(Open) ── handle.lease(sequence) ─► worker     Serve picks the replica
                     ◄─ Admitted(address, token) | Full ──   desk.py, the worker's side
                     ── Open(token) on the link ──────────►  one link a replica, made when first needed
    leg.send(Close)  ── Close on the link ─────────────────► the rule for freeing; the lease ends with it

Cancelling the lease is the backstop for freeing, the link's heartbeat the last resort. Sequences for
which every worker is full wait here, first come first served: the only queue of the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from outrider.config import LimitOptions
from outrider.errors import OverloadedError, UnavailableError
from outrider.messages import (
    WIRE_VERSION,
    Close,
    DraftOrder,
    FromDrafter,
    FromVerifier,
    LegLost,
    Open,
    Plan,
    VerifyOrder,
)
from outrider_serve.frames import FROM_DRAFTER, FROM_VERIFIER, Hello, Unsendable, WireMessage
from outrider_serve.link import HEARTBEAT_S, Connection, LinkError, connect

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.01
LONGEST_RETRY_S = 0.25
LEASE_LINGER_S = 5.0
"""A lease that has not ended by itself so long after its Close is cancelled."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """First item of a lease: there is room. `token` opens the sequence on the link, once."""

    replica: str
    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True)
class Full:
    """First and only item of a lease: every place of this replica is taken."""

    replica: str
    capacity: int


class LeaseCall(Protocol):
    """One streaming call, as Serve's handle returns it."""

    def __aiter__(self) -> AsyncIterator[Admitted | Full]: ...

    async def __anext__(self) -> Admitted | Full: ...

    def cancel(self) -> None: ...


LeaseCaller: TypeAlias = Callable[[str], LeaseCall]
"""Opens the lease of a sequence on whichever replica Serve picks."""


def lease_caller(handle: DeploymentHandle) -> LeaseCaller:
    """Leases on a deployment, by its handle."""
    return lambda sequence: handle.options(method_name="lease", stream=True).remote(sequence)


class Leg:
    """One sequence's way to the worker that holds it; satisfies `VerifierLeg` and `DrafterLeg`."""

    def __init__(
        self,
        link: RouterLink,
        call: LeaseCall,
        opening: Open,
        deliver: Callable[[Any], None],
        on_over: Callable[[Leg], None],
    ) -> None:
        self.replica = link.replica
        self.sequence = opening.sequence
        self.epoch = opening.epoch
        self.deliver = deliver
        self._link = link
        self._call = call
        self._on_over = on_over
        self._over = False
        self._watching = asyncio.create_task(self._watch())
        link.add(self, opening)

    def send(self, message: Plan | VerifyOrder | DraftOrder | Close) -> None:
        """Queue a message for the next frame; never blocks. After `Close` the leg is done."""
        if self._over:
            return
        self._link.send(message)
        if isinstance(message, Close):
            self._finish()
            asyncio.get_running_loop().call_later(LEASE_LINGER_S, self._call.cancel)

    def lose(self, reason: str) -> None:
        """The worker or the way to it is gone: free what may be left and tell the owner."""
        if self._over:
            return
        self._finish()
        self._call.cancel()
        self.deliver(LegLost(self.sequence, self.epoch, reason))

    def _finish(self) -> None:
        self._over = True
        self._link.remove(self)
        self._on_over(self)

    async def _watch(self) -> None:
        """Wait for the lease to end: Serve's word that the replica died, or the worker's that it is over."""
        reason = "the worker ended the lease"
        try:
            async for _ in self._call:
                pass
        except RayActorError:
            reason = "the replica died"
        except (RayError, RayServeException) as error:
            reason = f"the lease failed: {error}"
        self.lose(f"{self.replica}: {reason}")


class RouterLink:
    """A router's end of the link to one worker: hands each message to the leg it belongs to."""

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self._legs: dict[tuple[str, int], Leg] = {}
        self._connection: Connection | None = None

    async def connect(
        self, grant: Admitted, *, hello: Hello, role: str, accepts: Collection[type[WireMessage]]
    ) -> None:
        """Raises LinkError."""
        self._connection = await connect(
            grant.host,
            grant.port,
            self,
            hello=hello,
            expect=Hello(WIRE_VERSION, role, grant.replica),
            accepts=accepts,
            heartbeat_s=HEARTBEAT_S,
        )

    @property
    def open(self) -> bool:
        return self._connection is not None and self._connection.open

    async def close(self) -> None:
        """Returns when the socket is closed."""
        if self._connection is not None:
            self._connection.close("the router stops")
            await self._connection.gone.wait()

    def add(self, leg: Leg, opening: Open) -> None:
        """Route the leg's messages to it, and open its sequence."""
        self._legs[leg.sequence, leg.epoch] = leg
        self.send(opening)

    def remove(self, leg: Leg) -> None:
        self._legs.pop((leg.sequence, leg.epoch), None)

    def send(self, message: WireMessage) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def received(self, connection: Connection, messages: list[Any]) -> None:
        for message in messages:
            leg = self._legs.get((message.sequence, message.epoch))
            if leg is not None:  # else it was closed, or lost, in the meantime
                leg.deliver(message)

    def unsendable(self, connection: Connection, left_out: Unsendable) -> None:
        logger.error("to %s: %s", self.replica, left_out.reason)
        leg = self._legs.get((left_out.message.sequence, left_out.message.epoch))
        if leg is not None:  # after a Close it is gone, and the lease's cancellation frees the place
            leg.lose(f"{self.replica}: {left_out.reason}")

    def lost(self, connection: Connection, reason: str) -> None:
        if self._legs:
            logger.warning("link to %s: %s; %d sequences leave it", self.replica, reason, len(self._legs))
        for leg in list(self._legs.values()):
            leg.lose(f"{self.replica}: {reason}")


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why one try found no place."""

    full: bool
    reason: str


class _ServePool:
    """Leases on the replicas of one worker deployment."""

    role: str
    accepts: tuple[type[WireMessage], ...]

    def __init__(self, call: LeaseCaller, *, router: str, limits: LimitOptions) -> None:
        """`router` names this replica to its peers."""
        self.limits = limits  # may be replaced at any time
        self._call = call
        self._hello = Hello(WIRE_VERSION, "router", router)
        self._links: dict[str, asyncio.Task[RouterLink]] = {}
        self._legs: dict[str, Leg] = {}
        self._line = asyncio.Lock()  # its holder is the head of the queue
        self._freed = asyncio.Event()
        self.queued = 0

    @property
    def leased(self) -> int:
        """Sequences that hold a lease."""
        return len(self._legs)

    async def close(self) -> None:
        """Close the links, which loses the legs; returns when their sockets are closed."""
        for making in list(self._links.values()):
            with contextlib.suppress(LinkError):
                await (await making).close()

    async def _lease(self, opening: Open, deliver: Callable[[Any], None]) -> Leg:
        """A leg to a replica with room, found within `queue_timeout_s`."""
        abandoned = self._legs.get(opening.sequence)
        if abandoned is not None:  # re-homed without a word, for example for its silence
            abandoned.send(Close(abandoned.sequence, abandoned.epoch))
        limits = self.limits
        refusal = _Refusal(full=False, reason="no replica answered")
        try:
            async with asyncio.timeout(limits.queue_timeout_s):
                if not self._line.locked():
                    answer = await self._ask(opening, deliver)
                    if isinstance(answer, Leg):
                        return answer
                    refusal = answer
                if self.queued >= limits.max_queued_requests:
                    raise OverloadedError(f"{self.queued} sequences already wait for a {self.role}")
                self.queued += 1
                try:
                    async with self._line:
                        delay = FIRST_RETRY_S
                        while True:
                            answer = await self._ask(opening, deliver)
                            if isinstance(answer, Leg):
                                return answer
                            refusal = answer
                            await self._pause(delay)
                            delay = min(2 * delay, LONGEST_RETRY_S)
                finally:
                    self.queued -= 1
        except TimeoutError:
            pass
        waited = f"no {self.role} within {limits.queue_timeout_s:g} s: {refusal.reason}"
        raise OverloadedError(waited) if refusal.full else UnavailableError(waited)

    async def _ask(self, opening: Open, deliver: Callable[[Any], None]) -> Leg | _Refusal:
        """One lease call on the replica that Serve picks."""
        call = self._call(opening.sequence)
        keep = False
        try:
            grant = await anext(call)
            if isinstance(grant, Full):
                return _Refusal(full=True, reason=f"all {grant.capacity} places of {grant.replica} are taken")
            link = await self._link(grant)
            if not link.open:
                raise LinkError(f"the link to {grant.replica} was lost at once")
            keep = True
        except (RayError, RayServeException, LinkError, StopAsyncIteration) as error:
            logger.info("no lease on a %s: %s", self.role, error)
            return _Refusal(full=False, reason=str(error) or type(error).__name__)
        finally:
            if not keep:
                call.cancel()
        leg = Leg(link, call, replace(opening, token=grant.token), deliver, self._leg_over)
        self._legs[opening.sequence] = leg
        return leg

    async def _link(self, grant: Admitted) -> RouterLink:
        """The link to a replica; sequences that need it at the same moment share one attempt to make it."""
        making = self._links.get(grant.replica)
        if making is None or (making.done() and (making.exception() or not making.result().open)):
            making = asyncio.create_task(self._make_link(grant))
            self._links[grant.replica] = making
        return await asyncio.shield(making)

    async def _make_link(self, grant: Admitted) -> RouterLink:
        link = RouterLink(grant.replica)
        await link.connect(grant, hello=self._hello, role=self.role, accepts=self.accepts)
        for replica, other in list(self._links.items()):  # replicas come and go; so do their links
            if other.done() and (other.exception() or not other.result().open):
                del self._links[replica]
        return link

    async def _pause(self, delay: float) -> None:
        """Wait for `delay` seconds, or until a lease of this router ends."""
        self._freed.clear()
        try:
            async with asyncio.timeout(delay):
                await self._freed.wait()
        except TimeoutError:
            pass

    def _leg_over(self, leg: Leg) -> None:
        if self._legs.get(leg.sequence) is leg:
            del self._legs[leg.sequence]
        self._freed.set()


class ServeVerifierPool(_ServePool):
    """`outrider.contracts.VerifierPool` over the deployment Verifier."""

    role = "verifier"
    accepts = FROM_VERIFIER

    async def lease(self, opening: Open, deliver: Callable[[FromVerifier], None]) -> Leg:
        return await self._lease(opening, deliver)


class ServeDrafterPool(_ServePool):
    """`outrider.contracts.DrafterPool` over the deployment Drafter."""

    role = "drafter"
    accepts = FROM_DRAFTER

    async def lease(self, opening: Open, deliver: Callable[[FromDrafter], None]) -> Leg:
        return await self._lease(opening, deliver)
