"""Our decoding against transformers' `generate`, in interleaved pairs, in process and once over HTTP.

    python benchmarks/decode.py [--prompts 6] [--tokens 96] [--no-http] [--json FILE]

Every pair runs one after the other on the same prompt, and a ratio is a geometric mean of pairs with its 95 %
interval, so what the machine does in a minute hits both sides. `generate` is run with 1 and with 2 threads
and its faster time counts; we run on one. Greedy, bfloat16. Speeds count prefill in, on both sides.

"plain" decodes exactly --tokens tokens on both sides (no end of text), "ngram" ends where the text ends.
Above 1 is better for us in the ratios named `*_vs_generate*`, `*_vs_lookup*` and `ngram_vs_plain*`;
`step_vs_weight_read` and `verify_5_rows_vs_1_at_1500` are times over times: below is better.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import torch
import yaml
from transformers import AutoModelForCausalLM

import outrider
from measure import Ratio, Report, machine, percentile
from outrider import models
from outrider.engine.loading import load_model
from outrider.engine.model import Batch, CausalModel, Span
from outrider.generation import GenerationRequest
from outrider.inprocess import Completion, LocalService
from prompts import COPYING, by_category, mixed, source

T = TypeVar("T")
K = 4
CONFIG: dict[str, Any] = {
    "model": "smollm2",
    "dtype": "bfloat16",
    "device": "cpu",
    "max_model_len": 4096,
    "enable_prefix_caching": False,  # else the second of a pair would be spared its prefill
    "speculative_config": {"method": "ngram", "num_speculative_tokens": K},
}
MANIFEST = Path(__file__).resolve().parents[1] / "manifests" / "quickstart.yaml"


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


class Peer:
    """transformers' `generate` on the same checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def speed(
        self, prompts: Sequence[Sequence[int]], *, tokens: int, eos: Sequence[int], lookup: bool = False
    ) -> float:
        """Tokens a second for a left-padded batch, at the faster of 1 and 2 threads."""
        return max(self._speed(prompts, tokens, eos, lookup, threads) for threads in (1, 2))

    def _speed(
        self, prompts: Sequence[Sequence[int]], tokens: int, eos: Sequence[int], lookup: bool, threads: int
    ) -> float:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        options["eos_token_id"] = list(eos) or None
        if lookup:
            options |= {"prompt_lookup_num_tokens": K, "max_matching_ngram_size": 4}
        torch.set_num_threads(threads)
        try:
            with torch.inference_mode():
                seconds, output = timed(lambda: self._model.generate(ids, attention_mask=mask, **options))
        finally:
            torch.set_num_threads(1)
        return sum(_length(row, eos) for row in output[:, width:].tolist()) / seconds


def _length(row: list[int], eos: Sequence[int]) -> int:
    """Tokens of a row up to its end of text, which counts."""
    return next((i + 1 for i, token in enumerate(row) if token in eos), len(row))


def our_speed(service: LocalService, requests: Sequence[GenerationRequest]) -> tuple[float, list[Completion]]:
    seconds, done = timed(lambda: service.generate_many(requests))
    return sum(len(completion.tokens) for completion in done) / seconds, done


def plain_against_generate(
    report: Report, service: LocalService, peer: Peer, prompts: list[str], n: int
) -> None:
    """Concurrency 1 and 8, exactly n tokens a prompt."""
    eos, service.tokenizer.eos_token_ids = service.tokenizer.eos_token_ids, ()
    try:
        encoded = [encode(service, prompt) for prompt in prompts]
        for concurrency in (1, 8):
            ours, theirs = [], []
            for group in grouped(encoded, concurrency):
                requests = [request(service, ids, n, speculative=False) for ids in group]
                ours.append(our_speed(service, requests)[0])
                theirs.append(peer.speed(group, tokens=n, eos=()))
            report.ratio(f"plain_vs_generate_c{concurrency}", Ratio.of(ours, theirs))
            report.figure(f"plain_c{concurrency}", statistics.median(ours), "tok/s")
            report.figure(f"generate_c{concurrency}", statistics.median(theirs), "tok/s")
    finally:
        service.tokenizer.eos_token_ids = eos


def ngram_against_plain(report: Report, service: LocalService, peer: Peer, count: int, n: int) -> None:
    """The copying categories, then everything; both sides end where the text ends, with the same tokens."""
    every: dict[str, list[float]] = {"ngram": [], "plain": [], "lookup": [], "generate": []}
    eos = service.tokenizer.eos_token_ids
    for category in COPYING:
        speeds: dict[str, list[float]] = {name: [] for name in every}
        lengths = []
        for prompt in by_category()[category][:count]:
            ids = encode(service, prompt)
            plain, [plain_done] = our_speed(service, [request(service, ids, n, speculative=False)])
            ngram, [ngram_done] = our_speed(service, [request(service, ids, n)])
            if plain_done.tokens != ngram_done.tokens:
                raise SystemExit(f"speculation changed the text of {prompt[:60]!r}: that is a defect")
            speeds["plain"].append(plain)
            speeds["ngram"].append(ngram)
            speeds["lookup"].append(peer.speed([ids], tokens=n, eos=eos, lookup=True))
            speeds["generate"].append(peer.speed([ids], tokens=n, eos=eos))
            lengths.append(len(ngram_done.tokens) / ngram_done.stats.steps)
        report.ratio(f"ngram_vs_plain_{category}_c1", Ratio.of(speeds["ngram"], speeds["plain"]))
        report.figure(f"tokens_per_step_{category}", statistics.fmean(lengths), "tokens")
        for name, values in speeds.items():
            every[name] += values
    report.ratio("ngram_vs_plain_copying_c1", Ratio.of(every["ngram"], every["plain"]))
    report.ratio("ngram_vs_lookup_copying_c1", Ratio.of(every["ngram"], every["lookup"]))
    report.ratio("ngram_vs_generate_copying_c1", Ratio.of(every["ngram"], every["generate"]))
    speeds_c8: dict[bool, list[float]] = {True: [], False: []}
    copying = [prompt for category in COPYING for prompt in by_category()[category][:count]]
    encoded = [encode(service, prompt) for prompt in copying]
    for group in grouped(encoded, 8):
        for speculative in (False, True):
            requests = [request(service, ids, n, speculative=speculative) for ids in group]
            speeds_c8[speculative].append(our_speed(service, requests)[0])
    report.ratio("ngram_vs_plain_copying_c8", Ratio.of(speeds_c8[True], speeds_c8[False]))


def steps_against_memory(report: Report, folder: Path, repetitions: int) -> None:
    """A step's time beside the time to read the weights once, and a verify of 5 rows beside 1 row."""
    model = load_model(folder, dtype="bfloat16", device="cpu", block_size=32, cpu_kernels="auto")
    model.allocate(64)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    weights = torch.ones(size // 8, dtype=torch.int64)
    torch.set_num_threads(1)
    step, five, long_step, long_five = (
        forward(model, rows=rows, context=context) for context in (200, 1500) for rows in (1, 5)
    )
    times: dict[str, list[float]] = {name: [] for name in ("read", "step", "five", "long", "long_five")}
    for _ in range(repetitions):
        times["read"].append(timed(weights.sum)[0])
        times["step"].append(timed(step)[0])
        times["five"].append(timed(five)[0])
        times["long"].append(timed(long_step)[0])
        times["long_five"].append(timed(long_five)[0])
    report.figure("weights", size / 1e6, "MB")
    report.figure("weight_read", 1e3 * statistics.median(times["read"]), "ms (one thread, sum of int64)")
    report.figure("bandwidth", size / statistics.median(times["read"]) / 1e9, "GB/s")
    report.figure("step_1_row_at_200", 1e3 * statistics.median(times["step"]), "ms")
    report.ratio("step_vs_weight_read", Ratio.of(times["step"], times["read"]))
    report.ratio("verify_5_rows_vs_1_at_200", Ratio.of(times["five"], times["step"]))
    report.ratio("verify_5_rows_vs_1_at_1500", Ratio.of(times["long_five"], times["long"]))


def forward(model: CausalModel, *, rows: int, context: int) -> Callable[[], Any]:
    """A verify step of one sequence with `context` tokens before its rows."""
    blocks = tuple(range(-(-(context + rows) // model.block_size)))
    batch = Batch(
        torch.arange(100, 100 + rows),
        torch.arange(context, context + rows),
        (Span(0, rows, context + rows, blocks),),
        torch.arange(rows),
    )
    return lambda: model.forward(batch)


@dataclass(frozen=True, slots=True)
class Timing:
    """What a streaming caller saw, in seconds."""

    first: float
    gaps: tuple[float, ...]  # between tokens: a chunk's gap is shared by its tokens
    tokens: int


def latency(report: Report, name: str, timings: Sequence[Timing]) -> None:
    first = [timing.first for timing in timings]
    gaps = [gap for timing in timings for gap in timing.gaps]
    report.figure(f"ttft_p50_{name}", 1e3 * percentile(first, 50), "ms")
    report.figure(f"ttft_p99_{name}", 1e3 * percentile(first, 99), "ms")
    report.figure(f"itl_p99_{name}", 1e3 * percentile(gaps, 99), "ms a token")


def streamed(started: float, arrivals: Sequence[tuple[float, int]]) -> Timing:
    """From (time, tokens) of each chunk."""
    gaps: list[float] = []
    for (before, _), (at, count) in itertools.pairwise(arrivals):
        gaps += [(at - before) / count] * count
    return Timing(arrivals[0][0] - started, tuple(gaps), sum(count for _, count in arrivals))


def in_process_latency(report: Report, service: LocalService, prompts: list[str], n: int) -> None:
    async def one(ids: Sequence[int], speculative: bool) -> Timing:
        started, arrivals = time.perf_counter(), []
        generation = service.coordinator.start(request(service, ids, n, speculative=speculative))
        async for chunk in generation:
            arrivals.append((time.perf_counter(), len(chunk.tokens)))
        return streamed(started, arrivals)

    async def all_of(group: Sequence[Sequence[int]], speculative: bool) -> list[Timing]:
        return await asyncio.gather(*(one(ids, speculative) for ids in group))

    encoded = [encode(service, prompt) for prompt in prompts]
    for concurrency in (1, 8):
        for speculative in (False, True):
            timings: list[Timing] = []
            for group in grouped(encoded, concurrency):
                timings += asyncio.run(all_of(group, speculative))
            latency(report, f"{'ngram' if speculative else 'plain'}_c{concurrency}", timings)


def over_http(report: Report, service: LocalService, prompts: list[str], n: int) -> None:
    """The quickstart with the drafter in the router, on a local Ray: against ourselves in process."""
    from outrider_serve import launch

    config = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))
    application = config["applications"][0]
    application["args"] |= {"drafter": {"placement": "inprocess"}, "enable_prefix_caching": False}
    application["deployments"] = [d for d in application["deployments"] if d["name"] != "Drafter"]
    with launch.local_ray() as cluster:
        running = launch.deploy(
            launch.with_port(config, 0), cluster, timeout_s=300, report=lambda doing: None
        )
        asyncio.run(_http_pairs(report, service, running.url, prompts, n))


async def _http_pairs(report: Report, service: LocalService, url: str, prompts: list[str], n: int) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await _http_one(client, "Hello", 4, speculative=True)  # warms connections and kernels
        for concurrency in (1, 8):
            speeds: dict[str, list[float]] = {"http": [], "http_plain": [], "local": []}
            timings: list[Timing] = []
            for group in grouped(prompts, concurrency):
                requests = [request(service, encode(service, p), n, speculative=False) for p in group]
                speeds["local"].append((await asyncio.to_thread(our_speed, service, requests))[0])
                for speculative in (False, True):
                    started = time.perf_counter()
                    done = await asyncio.gather(
                        *(_http_one(client, p, n, speculative=speculative) for p in group)
                    )
                    speed = sum(t.tokens for t in done) / (time.perf_counter() - started)
                    speeds["http" if speculative else "http_plain"].append(speed)
                    timings += done if speculative else []
            report.ratio(
                f"http_plain_vs_in_process_c{concurrency}", Ratio.of(speeds["http_plain"], speeds["local"])
            )
            report.ratio(
                f"http_ngram_vs_http_plain_c{concurrency}", Ratio.of(speeds["http"], speeds["http_plain"])
            )
            latency(report, f"http_ngram_c{concurrency}", timings)


async def _http_one(client: httpx.AsyncClient, prompt: str, n: int, *, speculative: bool) -> Timing:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": n,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculative": speculative,
    }
    started, arrivals, tokens = time.perf_counter(), [], 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            elif event["choices"][0]["delta"].get("content"):
                arrivals.append(time.perf_counter())
    share = max(1, round(tokens / max(1, len(arrivals))))  # a chunk's tokens are not told over the plain API
    timing = streamed(started, [(at, share) for at in arrivals] or [(time.perf_counter(), 1)])
    return Timing(timing.first, timing.gaps, tokens)


def grouped(items: list[T], concurrency: int) -> list[list[T]]:
    """One by one, or groups of `concurrency` that each start two items later: every pair mixes them anew."""
    step = 1 if concurrency == 1 else 2
    return [(items[i:] + items[:i])[:concurrency] for i in range(0, len(items), step)]


def encode(service: LocalService, prompt: str) -> list[int]:
    """As a chat, cut to leave room in the context."""
    return service.tokenizer.encode_chat([{"role": "user", "content": prompt}])[:3000]


def request(
    service: LocalService, ids: Sequence[int], max_tokens: int, *, speculative: bool = True
) -> GenerationRequest:
    return service.request(ids, max_tokens=max_tokens, temperature=0, speculative=speculative)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=6, help="pairs at concurrency 1, and a category")
    parser.add_argument("--tokens", type=int, default=96, help="tokens a prompt")
    parser.add_argument("--no-http", action="store_true", help="skip the part that starts a local Ray")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    folder = models.resolve("smollm2")
    report = Report(machine())
    print(report.machine)
    print(f"{source()}, greedy, bfloat16, K={K}, {options.tokens} tokens; ours on 1 thread")
    steps_against_memory(report, folder, repetitions=25)
    prompts = mixed(max(options.prompts, 8))
    with outrider.local(CONFIG) as service:
        peer = Peer(folder)
        service.generate("warm up", max_tokens=8, temperature=0)
        peer.speed([[1, 2, 3]], tokens=4, eos=())
        plain_against_generate(report, service, peer, prompts, options.tokens)
        ngram_against_plain(report, service, peer, options.prompts, options.tokens)
        in_process_latency(report, service, prompts, options.tokens)
        del peer
        if not options.no_http:
            over_http(report, service, prompts, options.tokens)
    print(f"load at the end: {machine().split('load ')[1].split(';')[0]}")
    if options.json:
        report.write(options.json)


if __name__ == "__main__":
    main()
