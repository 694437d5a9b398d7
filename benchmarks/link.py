"""Round trip between two Serve replicas: a gRPC bidirectional stream against a TCP connection.

Both carry the same frames (`outrider_serve.frames`): a frame of VerifyOrders there, a frame of Verdicts
back, one round in flight, as a router and a verifier exchange them. Both ends run on the replicas' own
event loops, beside whatever Serve does there. The transports take turns, block by block, so that a slow
minute of the machine hits both. A plain DeploymentHandle call with the same bytes is timed beside them.

    python benchmarks/link.py [--rounds 2000] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import ray
from ray import serve

from outrider.messages import WIRE_VERSION, Verdict, VerifyOrder
from outrider_serve.frames import (
    FROM_VERIFIER,
    TO_VERIFIER,
    FrameReader,
    Hello,
    Unsendable,
    WireMessage,
    encode,
)
from outrider_serve.link import Connection, connect

ROUTER = Hello(version=WIRE_VERSION, role="router", replica="router")
WORKER = Hello(version=WIRE_VERSION, role="verifier", replica="worker")
SEQUENCES = (1, 8, 32)
BLOCK = 50  # rounds before the other transport takes its turn
HANDLE_SHARE = 10  # handle calls are slow: a tenth of the rounds


def orders(count: int) -> list[WireMessage]:
    return [VerifyOrder(f"sequence-{i:024}", 0, 1000 + i, (11, 222, 3333, 44444)) for i in range(count)]


def verdicts(asked: list[VerifyOrder]) -> list[WireMessage]:
    return [
        Verdict(
            order.sequence,
            order.epoch,
            order.base_len,
            (*order.tokens, 5),
            drafted=len(order.tokens),
            accepted=len(order.tokens),
            batch=len(asked),
            step_time=0.03,
        )
        for order in asked
    ]


def greeted(accepts: tuple[type[WireMessage], ...], peer: Hello) -> FrameReader:
    reader = FrameReader(accepts)
    reader.feed(encode([peer]))
    return reader


class Worker:
    """Answers every frame of orders with a frame of verdicts, over either transport."""

    async def start(self) -> tuple[int, int]:
        """Serve both transports on loopback and return their ports: gRPC, TCP."""
        self._grpc = grpc.aio.server()
        handlers = {
            "Rounds": grpc.stream_stream_rpc_method_handler(
                self._rounds, request_deserializer=None, response_serializer=None
            )
        }
        self._grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("link", handlers),))
        grpc_port = self._grpc.add_insecure_port("127.0.0.1:0")
        await self._grpc.start()
        self._tcp = await asyncio.get_running_loop().create_server(
            lambda: Connection(self, hello=WORKER, accepts=TO_VERIFIER), "127.0.0.1", 0
        )
        return grpc_port, self._tcp.sockets[0].getsockname()[1]

    def received(self, connection: Connection, messages: list[Any]) -> None:
        for verdict in verdicts(messages):
            connection.send(verdict)

    def unsendable(self, connection: Connection, left_out: Unsendable) -> None:
        raise AssertionError(left_out)

    def lost(self, connection: Connection, reason: str) -> None:
        """Nothing is kept for a connection."""

    async def _rounds(self, frames: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        reader = greeted(TO_VERIFIER, ROUTER)
        async for data in frames:
            for asked in reader.feed(data):
                yield encode(verdicts(asked))

    async def answer(self, data: bytes) -> bytes:
        [asked] = greeted(TO_VERIFIER, ROUTER).feed(data)
        return encode(verdicts(asked))


class Caller:
    """Times rounds to the worker from inside a replica."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._answers: asyncio.Queue[list[Verdict]] = asyncio.Queue()

    def received(self, connection: Connection, messages: list[Any]) -> None:
        self._answers.put_nowait(messages)

    def unsendable(self, connection: Connection, left_out: Unsendable) -> None:
        raise AssertionError(left_out)

    def lost(self, connection: Connection, reason: str) -> None:
        self._answers.put_nowait([])  # a round in flight ends as a wrong count

    async def measure(self, rounds: int) -> dict[str, dict[str, list[float]]]:
        """Seconds of every timed round, by transport and number of sequences."""
        grpc_port, tcp_port = await self._worker.start.remote()
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}")
        stream = channel.stream_stream("/link/Rounds")()
        reader = greeted(FROM_VERIFIER, WORKER)
        link = await connect("127.0.0.1", tcp_port, self, hello=ROUTER, expect=WORKER, accepts=FROM_VERIFIER)

        async def by_grpc(asked: list[WireMessage]) -> list[Any]:
            await stream.write(encode(asked))
            [answer] = reader.feed(await stream.read())
            return answer

        async def by_tcp(asked: list[WireMessage]) -> list[Any]:
            for order in asked:
                link.send(order)
            return await self._answers.get()

        async def by_handle(asked: list[WireMessage]) -> list[Any]:
            [answer] = greeted(FROM_VERIFIER, WORKER).feed(await self._worker.answer.remote(encode(asked)))
            return answer

        transports: dict[str, Callable[[list[WireMessage]], Awaitable[list[Any]]]] = {
            "grpc": by_grpc,
            "tcp": by_tcp,
            "handle": by_handle,
        }
        seconds: dict[str, dict[str, list[float]]] = {name: {} for name in transports}
        for count in SEQUENCES:
            asked = orders(count)
            for block in range(rounds // BLOCK + 1):
                for name, exchange in transports.items():
                    taken = []
                    for _ in range(BLOCK // HANDLE_SHARE if name == "handle" else BLOCK):
                        start = time.perf_counter()
                        answer = await exchange(asked)
                        taken.append(time.perf_counter() - start)
                        if len(answer) != count:
                            raise RuntimeError(f"{name} answered {len(answer)} of {count} orders")
                    if block:  # the first block of each warms up
                        seconds[name].setdefault(str(count), []).extend(taken)
        link.close("measured")
        stream.cancel()
        await channel.close()
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=2000, help="timed rounds a transport and size")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()

    machine = f"{os.cpu_count()} cores {platform.machine()}, Python {platform.python_version()}"
    machine += f", ray {ray.__version__}, grpcio {grpc.__version__}, load {os.getloadavg()[0]:.1f}"
    with tempfile.TemporaryDirectory(prefix="link", ignore_cleanup_errors=True) as folder:
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder, logging_level="WARNING")
        try:
            quiet = {"ray_actor_options": {"num_cpus": 0.5}, "logging_config": {"enable_access_log": False}}
            worker = serve.deployment(name="Worker", **quiet)(Worker).bind()
            handle = serve.run(
                serve.deployment(name="Caller", **quiet)(Caller).bind(worker), route_prefix=None
            )
            seconds = handle.measure.remote(options.rounds).result()
        finally:
            serve.shutdown()
            ray.shutdown()

    print(machine)
    print(f"{'transport':10} {'sequences':>9} {'p50 us':>8} {'p90 us':>8} {'rounds':>7}")
    figures: dict[str, dict[str, float]] = {}
    for name, by_count in seconds.items():
        for count, taken in by_count.items():
            deciles = statistics.quantiles(taken, n=10)
            p50, p90 = deciles[4] * 1e6, deciles[8] * 1e6
            figures[f"{name}_{count}"] = {"p50_us": round(p50, 1), "p90_us": round(p90, 1)}
            print(f"{name:10} {count:>9} {p50:>8.0f} {p90:>8.0f} {len(taken):>7}")
    if options.json:
        ratios = {
            f"grpc_vs_tcp_{count}": figures[f"grpc_{count}"]["p50_us"] / figures[f"tcp_{count}"]["p50_us"]
            for count in SEQUENCES
        }
        options.json.write_text(
            json.dumps({"machine": machine, "ratios": ratios, "p50_p90": figures}, indent=2)
        )


if __name__ == "__main__":
    main()
