"""Leases and links between a router's pool and a worker's desk, over real sockets, without a cluster."""

from __future__ import annotations

import asyncio
import gc
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from outrider.config import LimitOptions
from outrider.errors import ConfigError, OverloadedError, UnavailableError
from outrider.messages import (
    WIRE_VERSION,
    Close,
    FromVerifier,
    LegLost,
    Limits,
    Open,
    Plan,
    Resync,
    SamplingParams,
    Verdict,
    VerifyOrder,
)
from outrider_serve import desk as desk_module
from outrider_serve import frames, link
from outrider_serve.desk import LeaseDesk, Place
from outrider_serve.frames import (
    FROM_VERIFIER,
    TO_VERIFIER,
    FrameError,
    FrameReader,
    Hello,
    Unsendable,
    encode,
)
from outrider_serve.lease import Admitted, LeaseCaller, ServeVerifierPool
from outrider_serve.link import Connection, LinkError, connect

ROUTER = Hello(WIRE_VERSION, "router", "router-1")
HOST = "127.0.0.1"


class EchoWorker:
    """A verifier that answers every Open and VerifyOrder at once, and keeps what it was told."""

    def __init__(self, replica: str = "verifier-1", *, capacity: int = 4, heartbeat_s: float = 5.0) -> None:
        self.heard: list[Any] = []
        self.news = asyncio.Event()
        self.desk = LeaseDesk(
            Place(replica, HOST),
            role="verifier",
            capacity=capacity,
            accepts=TO_VERIFIER,
            submit=self.submit,
            port=0,
            heartbeat_s=heartbeat_s,
        )

    def submit(self, messages: Sequence[Any]) -> None:
        self.heard += messages
        self.news.set()
        answers = []
        for message in messages:
            match message:
                case Open():
                    answers.append(Verdict(message.sequence, message.epoch, len(message.prompt), (7,)))
                case VerifyOrder():
                    tokens = (*message.tokens, 8)
                    answers.append(Verdict(message.sequence, message.epoch, message.base_len, tokens))
        if answers:
            self.desk.deliver(answers)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.news.clear()
            await self.news.wait()


class Peer:
    """A bare connection that keeps what it receives; the hostile tests drive it."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def received(self, connection: Connection, messages: list[Any]) -> None:
        for message in messages:
            self.messages.put_nowait(message)

    def unsendable(self, connection: Connection, left_out: Unsendable) -> None:
        raise AssertionError(left_out)

    def lost(self, connection: Connection, reason: str) -> None:
        self.reason.set_result(reason)


class Network:
    """Workers, pools and peers of one test, and the end of all their sockets."""

    def __init__(self, local_call: type[Any]) -> None:
        self.local_call = local_call
        self._workers: list[EchoWorker] = []
        self._pools: list[ServeVerifierPool] = []
        self._peers: list[Connection] = []
        self._streams: list[asyncio.StreamWriter] = []

    def worker(self, replica: str = "verifier-1", **options: Any) -> EchoWorker:
        self._workers.append(EchoWorker(replica, **options))
        return self._workers[-1]

    def calls_to(self, *workers: EchoWorker) -> tuple[LeaseCaller, list[Any]]:
        """Leases on the workers in turn, and the calls that were made."""
        made: list[Any] = []

        def call(sequence: str) -> Any:
            worker = workers[len(made) % len(workers)]
            made.append(self.local_call(worker.desk.lease(sequence)))
            return made[-1]

        return call, made

    def pool(self, call: LeaseCaller, **limits: Any) -> ServeVerifierPool:
        self._pools.append(ServeVerifierPool(call, router="router-1", limits=LimitOptions(**limits)))
        return self._pools[-1]

    async def peer(self, worker: EchoWorker, owner: Peer, **options: Any) -> Connection:
        """A link whose messages no pool chooses."""
        expect = Hello(WIRE_VERSION, "verifier", "verifier-1")
        port = worker.desk.port
        self._peers.append(
            await connect(HOST, port, owner, hello=ROUTER, expect=expect, accepts=FROM_VERIFIER, **options)
        )
        return self._peers[-1]

    async def stream(self, worker: EchoWorker) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare socket, for what no Connection would send."""
        reader, writer = await asyncio.open_connection(HOST, worker.desk.port, limit=1024)
        self._streams.append(writer)
        return reader, writer

    async def close(self) -> None:
        for writer in self._streams:
            writer.transport.abort()
        for peer in self._peers:
            peer.close("the test is over")
            await peer.gone.wait()
        for pool in self._pools:
            await pool.close()
        for worker in self._workers:
            await worker.desk.stop()


@pytest.fixture
async def network(local_call: type[Any]) -> AsyncIterator[Network]:
    network = Network(local_call)
    yield network
    await network.close()


def opening(sequence: str, epoch: int = 0, token: str = "") -> Open:
    return Open(
        sequence,
        epoch,
        prompt=(1, 2, 3),
        committed=(),
        sampling=SamplingParams(seed=2**63),
        limits=Limits(max_tokens=5, stop_token_ids=(0,)),
        plan=Plan(sequence, epoch, num_tokens=4, gate_s=0.02),
        token=token,
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )


async def until_queued(pool: ServeVerifierPool, count: int) -> None:
    while pool.queued < count:  # noqa: ASYNC110 - the product needs no event for it
        await asyncio.sleep(0)


class Inbox:
    """What a leg delivered, to be awaited."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[FromVerifier] = asyncio.Queue()

    def __call__(self, message: FromVerifier) -> None:
        self._messages.put_nowait(message)

    async def next(self) -> FromVerifier:
        return await asyncio.wait_for(self._messages.get(), 10)

    @property
    def empty(self) -> bool:
        return self._messages.empty()


# ---- frames


def test_frames_are_found_in_any_split_of_the_bytes() -> None:
    reader = FrameReader(TO_VERIFIER)
    data = encode([ROUTER]) + encode([Close("a", 0)]) + encode([]) + encode([Close("b", 0)])

    found = [frame for index in range(len(data)) for frame in reader.feed(data[index : index + 1])]

    assert found == [[ROUTER], [Close("a", 0)], [], [Close("b", 0)]]


def test_a_batch_over_the_frame_limit_is_split_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 200)
    reader = FrameReader(TO_VERIFIER)
    reader.feed(encode([ROUTER]))
    orders = [VerifyOrder(f"s{i}", 0, i, (1, 2, 3)) for i in range(20)]

    found = reader.feed(encode(orders))

    assert len(found) > 1
    assert [message for frame in found for message in frame] == orders


@pytest.mark.parametrize("fault", ["an integer", "a surrogate", "the size"])
def test_a_message_that_cannot_be_packed_is_left_out_alone(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 200)
    bad = {
        "an integer": VerifyOrder("bad", 0, 2**64, ()),
        "a surrogate": VerifyOrder("bad", 0, 1, (), traceparent="\ud800"),
        "the size": VerifyOrder("bad", 0, 1, tuple(range(300))),
    }[fault]
    good = [VerifyOrder(f"s{i}", 0, i, (1, 2, 3)) for i in range(5)]
    reader = FrameReader(TO_VERIFIER)
    reader.feed(encode([ROUTER]))

    data, left_out = frames.pack([*good[:2], bad, *good[2:]])

    assert [message for frame in reader.feed(data) for message in frame] == good
    assert [one.message for one in left_out] == [bad]
    assert "a VerifyOrder cannot be sent" in left_out[0].reason


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (encode([Close("s", 0)]), "not a Hello"),
        (encode([]), "not a Hello"),
        (struct.pack(">I", 1 << 30), "over the limit"),
        (encode([ROUTER]) + struct.pack(">I", 3) + b"\xc1\xc1\xc1", "malformed"),
        (encode([ROUTER]) + encode([Verdict("s", 0, 1, (1,))]), "does not take"),
        (encode([ROUTER]) + encode([ROUTER]), "does not take"),
        (encode([ROUTER]) + encode([Close("s", "zero")]), "malformed"),  # type: ignore[arg-type]
        (encode([ROUTER]) + struct.pack(">I", 4) + b"\x91\x92\x63\xc0", "does not take"),
        (encode([ROUTER]) + struct.pack(">I", 100_003) + b"\x91\x92\x04" + b"\x91" * 100_000, "recursion"),
        (encode([ROUTER]) + struct.pack(">I", 8) + b"\x91\x92\x04\x81\xa1\xff\xa1\xff", "malformed"),
    ],
)
def test_what_is_no_frame_of_this_end_is_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(FrameError, match=complaint):
        FrameReader(TO_VERIFIER).feed(data)


# ---- connections


async def test_messages_of_one_tick_leave_as_one_frame(network: Network) -> None:
    worker, peer = network.worker(), Peer()
    connection = await network.peer(worker, peer)
    batches: list[int] = []
    received = worker.desk.received

    def count(connection: Connection, messages: list[Any]) -> None:
        batches.append(len(messages))
        received(connection, messages)

    worker.desk.received = count  # type: ignore[method-assign]

    for index in range(5):
        connection.send(VerifyOrder(f"s{index}", 0, 1, ()))
    for _ in range(5):
        await asyncio.wait_for(peer.messages.get(), 10)

    assert batches == [5]


async def test_another_wire_version_is_not_talked_to(network: Network) -> None:
    worker = network.worker()
    reader, writer = await network.stream(worker)
    writer.write(encode([Hello(WIRE_VERSION + 1, "router", "old")]) + encode([opening("s")]))

    greeting = FrameReader(FROM_VERIFIER).feed(await asyncio.wait_for(reader.read(), 10))

    assert greeting == [[Hello(WIRE_VERSION, "verifier", "verifier-1")]]  # and then the end of the stream
    assert worker.heard == []


async def test_a_peer_that_never_greets_is_cut_off_and_forgotten(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "HANDSHAKE_S", 0.02)
    worker = network.worker()
    reader, _ = await network.stream(worker)

    await asyncio.wait_for(reader.read(), 10)  # returns at the end of the stream
    gc.collect()

    assert len(worker.desk._connections) == 0


async def test_a_stranger_on_the_port_of_a_replica_gets_no_token(network: Network) -> None:
    worker = network.worker("verifier-2")

    with pytest.raises(LinkError, match="verifier-2 answers, not verifier verifier-1"):
        await network.peer(worker, Peer())


async def test_a_silent_peer_counts_as_gone(network: Network) -> None:
    worker = network.worker(heartbeat_s=0.02)
    reader, writer = await network.stream(worker)
    writer.write(encode([ROUTER]))  # and never a sign of life again

    await asyncio.wait_for(reader.read(), 10)  # returns at the end of the stream


async def test_heartbeats_keep_an_idle_link_open(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MISSED_HEARTBEATS", 20)
    worker, peer = network.worker(heartbeat_s=0.02), Peer()
    connection = await network.peer(worker, peer, heartbeat_s=0.02)

    await asyncio.sleep(1.0)  # more than twice the silence that ends a link

    assert connection.open


async def test_a_peer_that_does_not_read_is_cut_off(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "MAX_UNSENT_BYTES", 1 << 20)
    worker = network.worker()
    lease = network.local_call(worker.desk.lease("s"))
    grant = await anext(lease)
    assert isinstance(grant, Admitted)
    _, writer = await network.stream(worker)
    writer.write(encode([ROUTER]) + encode([opening("s", token=grant.token)]))
    await worker.until(lambda: any(isinstance(message, Open) for message in worker.heard))

    for _ in range(64):
        worker.desk.deliver([Verdict("s", 0, 3, tuple(range(30_000)))])
        await asyncio.sleep(0)
    await worker.until(lambda: Close("s", 0, cancelled=True) in worker.heard)

    assert worker.desk.held == 0


async def test_a_malformed_frame_ends_only_the_connection_it_came_on(network: Network) -> None:
    worker, peer = network.worker(), Peer()
    call, _ = network.calls_to(worker)
    inbox = Inbox()
    leg = await network.pool(call).lease(opening("good"), inbox)
    assert isinstance(await inbox.next(), Verdict)
    hostile = await network.peer(worker, peer)

    hostile._write(b"\x00\x00\x00\x02\xc1\xc1")
    await asyncio.wait_for(peer.reason, 10)

    leg.send(VerifyOrder("good", 0, 4, (5,)))
    assert await inbox.next() == Verdict("good", 0, 4, (5, 8))
    leg.send(Close("good", 0))


UNSENDABLE = VerifyOrder("bad", 0, 4, (2**64,))


async def test_an_order_that_cannot_be_sent_loses_its_own_leg_and_no_other_message(network: Network) -> None:
    worker = network.worker()
    call, calls = network.calls_to(worker)
    pool, good, bad = network.pool(call), Inbox(), Inbox()
    legs = [await pool.lease(opening("good"), good), await pool.lease(opening("bad"), bad)]
    await good.next()
    await bad.next()

    legs[0].send(VerifyOrder("good", 0, 4, (5,)))
    legs[1].send(UNSENDABLE)
    legs[0].send(VerifyOrder("good", 0, 6, (7,)))

    assert [await good.next(), await good.next()] == [
        Verdict("good", 0, 4, (5, 8)),
        Verdict("good", 0, 6, (7, 8)),
    ]
    lost = await bad.next()
    assert isinstance(lost, LegLost)
    assert "cannot be sent" in lost.reason
    await worker.until(lambda: Close("bad", 0, cancelled=True) in worker.heard)
    assert (pool.leased, worker.desk.held, len(worker.desk._connections)) == (1, 1, 1)
    assert calls[1].cancelled


async def test_a_verdict_that_cannot_be_sent_ends_its_own_sequence_and_no_other(network: Network) -> None:
    worker = network.worker()
    call, _ = network.calls_to(worker)
    pool, good, bad = network.pool(call), Inbox(), Inbox()
    for name, inbox in (("good", good), ("bad", bad)):
        await pool.lease(opening(name), inbox)
        await inbox.next()

    worker.desk.deliver(
        [Verdict("good", 0, 4, (1,)), Verdict("bad", 0, 4, (1,), error="\ud800"), Verdict("good", 0, 5, (2,))]
    )

    assert [await good.next(), await good.next()] == [
        Verdict("good", 0, 4, (1,)),
        Verdict("good", 0, 5, (2,)),
    ]
    assert isinstance(await bad.next(), LegLost)
    assert Close("bad", 0, cancelled=True) in worker.heard
    assert (pool.leased, worker.desk.held, len(worker.desk._connections)) == (1, 1, 1)


async def test_a_message_over_the_frame_limit_does_not_end_the_link(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = network.worker()
    call, _ = network.calls_to(worker)
    pool, good, bad = network.pool(call), Inbox(), Inbox()
    leg = await pool.lease(opening("good"), good)
    await good.next()
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 500)

    await pool.lease(replace(opening("bad"), prompt=tuple(range(1000))), bad)
    leg.send(VerifyOrder("good", 0, 4, (5,)))

    assert isinstance(await bad.next(), LegLost)
    assert await good.next() == Verdict("good", 0, 4, (5, 8))


# ---- leases


async def test_a_lease_opens_its_sequence_and_close_frees_the_place(network: Network) -> None:
    worker = network.worker()
    call, calls = network.calls_to(worker)
    pool, inbox = network.pool(call), Inbox()

    leg = await pool.lease(opening("s"), inbox)

    assert await inbox.next() == Verdict("s", 0, 3, (7,))
    assert (leg.replica, pool.leased, worker.desk.held) == ("verifier-1", 1, 1)
    leg.send(Close("s", 0))
    await worker.until(lambda: Close("s", 0) in worker.heard)
    assert (pool.leased, worker.desk.held) == (0, 0)
    with pytest.raises(StopAsyncIteration):
        await anext(calls[0])
    assert not calls[0].cancelled


async def test_one_link_carries_all_sequences_of_a_replica(network: Network) -> None:
    worker = network.worker(capacity=8)
    call, _ = network.calls_to(worker)
    pool = network.pool(call)
    inboxes = {f"s{i}": Inbox() for i in range(8)}

    await asyncio.gather(*(pool.lease(opening(name), inbox) for name, inbox in inboxes.items()))

    for name, inbox in inboxes.items():
        assert await inbox.next() == Verdict(name, 0, 3, (7,))
    assert len(worker.desk._connections) == 1


@pytest.mark.parametrize("token", ["", "guess"])
async def test_an_open_without_the_token_of_a_lease_is_refused(network: Network, token: str) -> None:
    worker, peer = network.worker(), Peer()
    lease = network.local_call(worker.desk.lease("s"))
    grant = await anext(lease)
    assert isinstance(grant, Admitted)
    connection = await network.peer(worker, peer)

    connection.send(opening("s", token=token))

    assert await asyncio.wait_for(peer.messages.get(), 10) == Resync("s", 0, committed_len=0)
    assert worker.heard == []


async def test_a_token_opens_one_sequence_once(network: Network) -> None:
    worker, peer = network.worker(), Peer()
    lease = network.local_call(worker.desk.lease("s"))
    grant = await anext(lease)
    assert isinstance(grant, Admitted)
    connection = await network.peer(worker, peer)

    for message in (opening("other", token=grant.token), opening("s", token=grant.token)):
        connection.send(message)
    connection.send(opening("s", epoch=1, token=grant.token))
    answers = [await asyncio.wait_for(peer.messages.get(), 10) for _ in range(3)]

    assert Resync("other", 0, 0) in answers
    assert Resync("s", 1, 0) in answers
    assert Verdict("s", 0, 3, (7,)) in answers


async def test_a_peer_cannot_close_or_steer_anothers_sequence(network: Network) -> None:
    worker, peer = network.worker(), Peer()
    call, _ = network.calls_to(worker)
    inbox = Inbox()
    leg = await network.pool(call).lease(opening("s"), inbox)
    await inbox.next()
    stranger = await network.peer(worker, peer)

    stranger.send(Close("s", 0))
    stranger.send(VerifyOrder("s", 0, 4, (666,)))

    assert await asyncio.wait_for(peer.messages.get(), 10) == Resync("s", 0, committed_len=0)
    leg.send(VerifyOrder("s", 0, 4, (5,)))
    assert await inbox.next() == Verdict("s", 0, 4, (5, 8))
    assert worker.desk.held == 1


async def test_a_lost_link_loses_the_legs_on_one_side_and_cancels_the_sequences_on_the_other(
    network: Network,
) -> None:
    worker = network.worker()
    call, _ = network.calls_to(worker)
    pool, inboxes = network.pool(call), [Inbox(), Inbox()]
    for index, inbox in enumerate(inboxes):
        await pool.lease(opening(f"s{index}"), inbox)
        await inbox.next()

    for connection in list(worker.desk._connections):
        connection.close("the cable is cut")
    lost = [await inbox.next() for inbox in inboxes]

    assert [type(message) for message in lost] == [LegLost, LegLost]
    await worker.until(lambda: Close("s1", 0, cancelled=True) in worker.heard)
    assert Close("s0", 0, cancelled=True) in worker.heard
    assert (pool.leased, worker.desk.held) == (0, 0)
    again = Inbox()
    await pool.lease(opening("s0", epoch=1), again)  # over a new link
    assert await again.next() == Verdict("s0", 1, 3, (7,))


async def test_cancelling_the_lease_frees_the_sequence_without_a_close(network: Network) -> None:
    worker = network.worker()
    call, calls = network.calls_to(worker)
    inbox = Inbox()
    await network.pool(call).lease(opening("s"), inbox)
    await inbox.next()

    calls[0].cancel()

    await worker.until(lambda: Close("s", 0, cancelled=True) in worker.heard)
    assert worker.desk.held == 0


async def test_a_lease_that_is_never_opened_gives_its_place_back(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk_module, "OPEN_WITHIN_S", 0.02)
    worker = network.worker(capacity=1)
    lease = worker.desk.lease("s")
    assert isinstance(await anext(lease), Admitted)

    with pytest.raises(StopAsyncIteration):
        await anext(lease)

    assert worker.desk.held == 0
    assert worker.heard == []


async def test_a_full_worker_says_so_and_the_router_finds_another(network: Network) -> None:
    full, free = network.worker("verifier-1", capacity=1), network.worker("verifier-2")
    taken = full.desk.lease("taken")
    await anext(taken)
    call, calls = network.calls_to(full, free)
    inbox = Inbox()

    leg = await network.pool(call).lease(opening("s"), inbox)

    assert leg.replica == "verifier-2"
    assert len(calls) == 2


async def test_sequences_queue_in_order_until_a_place_is_free(network: Network) -> None:
    worker = network.worker(capacity=1)
    call, _ = network.calls_to(worker)
    pool, inbox = network.pool(call), Inbox()
    leg = await pool.lease(opening("first"), inbox)
    order: list[str] = []

    async def queue(name: str) -> None:
        waiting = await pool.lease(opening(name), Inbox())
        order.append(name)
        waiting.send(Close(name, 0))

    waiting = [asyncio.create_task(queue(f"s{index}")) for index in range(4)]
    await until_queued(pool, 4)
    leg.send(Close("first", 0))
    await asyncio.wait_for(asyncio.gather(*waiting), 10)

    assert order == ["s0", "s1", "s2", "s3"]
    assert pool.queued == 0


async def test_a_queue_that_is_full_or_too_slow_is_an_overload(network: Network) -> None:
    worker = network.worker(capacity=1)
    call, _ = network.calls_to(worker)
    pool = network.pool(call, max_queued_requests=1, queue_timeout_s=0.3)
    await pool.lease(opening("holds"), Inbox())
    slow = asyncio.create_task(pool.lease(opening("slow"), Inbox()))
    await until_queued(pool, 1)

    with pytest.raises(OverloadedError, match="1 sequences already wait for a verifier"):
        await pool.lease(opening("late"), Inbox())
    with pytest.raises(OverloadedError, match=r"within 0\.3 s: all 1 places of verifier-1"):
        await slow

    assert (pool.queued, worker.desk.held) == (0, 1)


async def test_no_reachable_worker_is_unavailable_not_an_overload(network: Network) -> None:
    worker = network.worker()
    call, calls = network.calls_to(worker)
    (await worker.desk._listening).close()
    pool = network.pool(call, queue_timeout_s=0.2)

    with pytest.raises(UnavailableError, match="no link to verifier-1"):
        await pool.lease(opening("s"), Inbox())

    assert all(call.cancelled for call in calls)


async def test_a_caller_that_leaves_the_queue_holds_no_place(network: Network) -> None:
    worker = network.worker(capacity=1)
    call, _ = network.calls_to(worker)
    pool = network.pool(call)
    leg = await pool.lease(opening("holds"), Inbox())
    impatient = asyncio.create_task(pool.lease(opening("impatient"), Inbox()))
    await until_queued(pool, 1)

    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    leg.send(Close("holds", 0))
    await worker.until(lambda: Close("holds", 0) in worker.heard)

    assert (pool.queued, pool.leased, worker.desk.held) == (0, 0, 0)


async def test_a_new_epoch_closes_the_leg_that_it_replaces(network: Network) -> None:
    worker = network.worker()
    call, _ = network.calls_to(worker)
    pool = network.pool(call)
    old, new = Inbox(), Inbox()
    await pool.lease(opening("s", epoch=0), old)
    await old.next()

    await pool.lease(opening("s", epoch=1), new)

    assert await new.next() == Verdict("s", 1, 3, (7,))
    assert Close("s", 0) in worker.heard
    assert old.empty
    assert worker.desk.held == 1


async def test_a_taken_port_is_a_configuration_error_with_its_cure(network: Network) -> None:
    worker = network.worker()

    with pytest.raises(ConfigError, match="port: 0"):
        LeaseDesk(
            Place("verifier-2", HOST),
            role="verifier",
            capacity=1,
            accepts=TO_VERIFIER,
            submit=worker.submit,
            port=worker.desk.port,
        )
