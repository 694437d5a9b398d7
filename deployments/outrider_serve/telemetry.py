"""What a router counts, under the names vLLM's users have on their dashboards.

A scrape of `/metrics` reaches one router of several. So a router's metrics are first a `Snapshot`, which
crosses processes; the router that was hit asks its peers for theirs and exposes them beside its own
(`exposition`). Nothing is summed here: the label `engine` is the id of the replica that counted, so a series
starts and ends with its replica and never falls, and `sum without (engine)` of rates is right.

Acceptance as vLLM defines it: rate = accepted / draft tokens; mean length = 1 + accepted / drafts; bonus and
recovered tokens are in neither. The counters of all requests add up to what their answers report. Each of the
n choices of a request is counted as a request of its own.

FLOPs are estimated by `generation.GenerationStats`: 2 x parameters x rows, with the parameters that a token
passes through (`loading.parameter_count`), or 0 where they are not known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from outrider.engine.engine import EngineStats
from outrider.generation import Chunk, GenerationStats
from outrider.messages import FinishReason

SECONDS_TO_FIRST_TOKEN = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
SECONDS_A_TOKEN = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
)
SECONDS_A_REQUEST = (
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
)

ABORTED = "abort"
FAILED = "error"


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


@dataclass(frozen=True, slots=True)
class Family:
    """One metric with all its series."""

    name: str
    kind: str  # counter, gauge, histogram
    help: str
    samples: tuple[Sample, ...]


Snapshot: TypeAlias = tuple[Family, ...]
"""Metrics at one moment, of one replica or of several: their labels `engine` keep them apart."""


class Telemetry:
    """The counters of one router process, in a registry of its own."""

    def __init__(self, model_name: str, *, engine: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`engine` is this router's replica id, the label that keeps its series apart."""
        self.clock = clock
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": engine}

        self.drafts = self._counter("vllm:spec_decode_num_drafts", "verify steps that carried a draft")
        self.draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "draft tokens verified")
        self.accepted_tokens = self._counter("vllm:spec_decode_num_accepted_tokens", "draft tokens accepted")
        self._accepted_per_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "drafts of which at least position + 1 tokens were accepted",
            ["model_name", "engine", "position"],
            registry=self._registry,
        )
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "prompt tokens of requests that began")
        self.generation_tokens = self._counter("vllm:generation_tokens", "tokens generated")
        self.prefix_cache_queries = self._counter("vllm:prefix_cache_queries", "prompt tokens looked up")
        self.prefix_cache_hits = self._counter("vllm:prefix_cache_hits", "prompt tokens found cached")
        self._finished = Counter(
            "vllm:request_success",
            "choices of requests that ended, by reason: stop, length, abort (the client left, or another "
            "choice failed) or error",
            ["model_name", "engine", "finished_reason"],
            registry=self._registry,
        )
        for reason in (FinishReason.STOP, FinishReason.LENGTH, ABORTED, FAILED):
            self._finished.labels(**self._labels, finished_reason=reason)
        self.waiting = self._gauge("vllm:num_requests_waiting", "requests without a first token yet")
        self.running = self._gauge("vllm:num_requests_running", "requests after their first token")
        self.time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds",
            "from the admitted request to its first tokens",
            SECONDS_TO_FIRST_TOKEN,
        )
        self.inter_token_latency = self._histogram(
            "vllm:inter_token_latency_seconds",
            "between two verdicts of a request, each with one token or several (as vLLM measures it)",
            SECONDS_A_TOKEN,
        )
        self.time_per_output_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "mean over a request: time after the first token, by the number of tokens after it",
            SECONDS_A_TOKEN,
        )
        self.e2e_latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "from the admitted request to its end", SECONDS_A_REQUEST
        )
        self.queue_time = self._histogram(
            "vllm:request_queue_time_seconds",
            "in the router's line, and at the verifier before the first prefill",
            SECONDS_A_REQUEST,
        )
        self.late_proposals = self._counter(
            "outrider_late_proposals", "drafts that came after the verifier had moved on"
        )
        self.wasted_draft_tokens = self._counter(
            "outrider_wasted_draft_tokens", "drafts that gave no token: rejected, or not fit to be verified"
        )
        self._flops = Counter(
            "outrider_estimated_flops",
            "estimated work, 2 x parameters x rows: target_committed (rows of prompts and answers), "
            "target_rejected (rows of rejected drafts), drafter (rows that drafted)",
            ["model_name", "engine", "kind"],
            registry=self._registry,
        )
        self._predicted_tokens = Counter(
            "outrider_prediction_tokens",
            "drafts out of clients' predictions, by outcome: accepted or rejected",
            ["model_name", "engine", "outcome"],
            registry=self._registry,
        )
        self.cancelled = self._counter(
            "outrider_requests_cancelled", "choices of requests whose client left, or whose sibling failed"
        )
        self._fallbacks = Counter(
            "outrider_speculation_fallbacks",
            "times a request went on without drafts, by reason",
            ["model_name", "engine", "reason"],
            registry=self._registry,
        )
        self._refused = Counter(
            "outrider_requests_refused",
            "requests answered with an error, by HTTP status",
            ["model_name", "engine", "status"],
            registry=self._registry,
        )
        self._gauge("outrider_routers", "1 for each router whose metrics are in this exposition").set(1)

    def expect_drafts(self, num_tokens: int) -> None:
        """Show a series for every draft position that may occur, before it does."""
        for position in range(num_tokens):
            self._position(position)

    def refused(self, status: int) -> None:
        """Enter a request that was answered with an HTTP error."""
        self._refused.labels(**self._labels, status=str(status)).inc()

    def request(self, stats: GenerationStats) -> RequestMeter:
        """A meter for one admitted request, or one of its choices, whose generation keeps `stats`.

        Use it as a context manager.
        """
        return RequestMeter(self, stats)

    def snapshot(self) -> Snapshot:
        """This router's metrics, to stand beside those of its peers."""
        return tuple(
            Family(
                metric.name,
                metric.type,
                metric.documentation,
                tuple(
                    Sample(sample.name, tuple(sample.labels.items()), sample.value)
                    for sample in metric.samples
                    if not sample.name.endswith("_created")  # a time, which nobody charts
                ),
            )
            for metric in self._registry.collect()
        )

    def finished(self, reason: str) -> None:
        self._finished.labels(**self._labels, finished_reason=reason).inc()

    def accepted_at(self, position: int, times: int) -> None:
        self._position(position).inc(times)

    def worked(self, kind: str, flops: float) -> None:
        self._flops.labels(**self._labels, kind=kind).inc(flops)

    def predicted(self, outcome: str, tokens: int) -> None:
        self._predicted_tokens.labels(**self._labels, outcome=outcome).inc(tokens)

    def fell_back(self, reason: str) -> None:
        # What follows the colon names replicas and errors: too many for a label.
        self._fallbacks.labels(**self._labels, reason=reason.partition(":")[0]).inc()

    def _position(self, position: int) -> Counter:
        return self._accepted_per_position.labels(**self._labels, position=str(position))

    def _counter(self, name: str, help: str) -> Counter:
        counter = Counter(name, help, ["model_name", "engine"], registry=self._registry)
        return counter.labels(**self._labels)

    def _gauge(self, name: str, help: str) -> Gauge:
        gauge = Gauge(name, help, ["model_name", "engine"], registry=self._registry)
        return gauge.labels(**self._labels)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, help, ["model_name", "engine"], registry=self._registry, buckets=buckets)
        return histogram.labels(**self._labels)


@dataclass(slots=True)
class RequestMeter:
    """Counts one choice of a request as it runs: after every chunk the counters hold all that is known of it.

    Leaving the `with` block ends the request: as its finish reason says, as `error` when an exception
    passes, as `abort` when it was left before its last chunk.
    """

    telemetry: Telemetry
    stats: GenerationStats
    _counted: GenerationStats = field(default_factory=GenerationStats)
    _finish: FinishReason | None = None
    _began: float = 0.0
    _first: float | None = None
    _last: float = 0.0

    def __enter__(self) -> Self:
        self._began = self.telemetry.clock()
        self.telemetry.waiting.inc()
        return self

    def chunk(self, chunk: Chunk) -> None:
        """Enter a chunk that the generation gave."""
        now = self.telemetry.clock()
        stats = self.stats
        if self._first is None:
            self._first = now
            self.telemetry.waiting.dec()
            self.telemetry.running.inc()
            self.telemetry.time_to_first_token.observe(now - self._began)
            self.telemetry.queue_time.observe(stats.queue_time)
            self.telemetry.prompt_tokens.inc(stats.prompt_tokens)
            self.telemetry.prefix_cache_queries.inc(stats.prompt_tokens)
            self.telemetry.prefix_cache_hits.inc(stats.cached_tokens)
        else:
            self.telemetry.inter_token_latency.observe(now - self._last)
        self._last = now
        self._finish = chunk.finish
        self._count_up()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        now = self.telemetry.clock()
        self._count_up()
        (self.telemetry.waiting if self._first is None else self.telemetry.running).dec()
        if self._finish is not None:
            self.telemetry.finished(self._finish)
            self.telemetry.e2e_latency.observe(now - self._began)
            after_first = self.stats.completion_tokens - 1
            if self._first is not None and after_first > 0:
                self.telemetry.time_per_output_token.observe((self._last - self._first) / after_first)
        elif isinstance(error, Exception):
            self.telemetry.finished(FAILED)
        else:  # cancelled, or closed from outside
            self.telemetry.finished(ABORTED)
            self.telemetry.cancelled.inc()

    def _count_up(self) -> None:
        """Move the counters by what the generation's record grew since the last time."""
        now, before = self.stats, self._counted
        self.telemetry.generation_tokens.inc(now.completion_tokens - before.completion_tokens)
        self.telemetry.drafts.inc(now.rounds - before.rounds)
        self.telemetry.draft_tokens.inc(now.draft_tokens - before.draft_tokens)
        self.telemetry.accepted_tokens.inc(now.accepted_tokens - before.accepted_tokens)
        self.telemetry.late_proposals.inc(now.late_proposals - before.late_proposals)
        self.telemetry.wasted_draft_tokens.inc(now.wasted_draft_tokens - before.wasted_draft_tokens)
        if self._first is not None:  # else nobody computed anything
            self.telemetry.worked("target_committed", now.committed_flops - before.committed_flops)
            self.telemetry.worked("target_rejected", now.rejected_flops - before.rejected_flops)
            self.telemetry.worked("drafter", now.drafter_flops - before.drafter_flops)
        accepted = now.accepted_prediction_tokens - before.accepted_prediction_tokens
        if accepted > 0:  # a stop string may take some back
            self.telemetry.predicted("accepted", accepted)
        rejected = now.rejected_prediction_tokens - before.rejected_prediction_tokens
        if rejected:
            self.telemetry.predicted("rejected", rejected)
        for position, times in enumerate(now.accepted_per_position):
            counted = before.accepted_per_position[position : position + 1]
            self.telemetry.accepted_at(position, times - sum(counted))
        if now.fallback is not None and now.fallback != before.fallback:
            self.telemetry.fell_back(now.fallback)
        self._counted = replace(now, accepted_per_position=list(now.accepted_per_position))


def verifier_snapshot(model_name: str, engines: Mapping[str, EngineStats]) -> Snapshot:
    """What the verifiers say of themselves, by replica id."""

    def family(name: str, kind: str, help: str, value: Callable[[EngineStats], float]) -> Family:
        sample = f"{name}_total" if kind == "counter" else name
        return Family(
            name,
            kind,
            help,
            tuple(
                Sample(sample, (("model_name", model_name), ("engine", replica)), float(value(stats)))
                for replica, stats in engines.items()
            ),
        )

    def invalid_drafts() -> Family:
        name = "outrider_verifier_invalid_drafts"
        return Family(
            name,
            "counter",
            "drafts that could not be verified, by reason: token, draft_probs or grammar",
            tuple(
                Sample(
                    f"{name}_total",
                    (("model_name", model_name), ("engine", replica), ("reason", reason)),
                    float(count),
                )
                for replica, stats in engines.items()
                for reason, count in (
                    ("token", stats.invalid_tokens),
                    ("draft_probs", stats.invalid_draft_probs),
                    ("grammar", stats.invalid_grammar),
                )
            ),
        )

    return (
        family(
            "vllm:kv_cache_usage_perc",
            "gauge",
            "part of a verifier's KV blocks that is used, 0 to 1",
            lambda stats: stats.kv_blocks_used / stats.kv_blocks,
        ),
        family(
            "vllm:num_preemptions",
            "counter",
            "times a verifier took a running sequence's blocks away",
            lambda stats: stats.preemptions,
        ),
        family(
            "outrider_verifier_sequences_cancelled",
            "counter",
            "sequences that a verifier freed before their end: client, link or lease gone",
            lambda stats: stats.cancelled,
        ),
        invalid_drafts(),
        family(
            "outrider_verifier_sequences_failed",
            "counter",
            "sequences that a verifier ended with an error of their own",
            lambda stats: stats.failed,
        ),
    )


def joined(snapshots: Iterable[Snapshot]) -> Snapshot:
    """One family a name, as the text format wants it, with the series of all snapshots."""
    families: dict[str, Family] = {}
    for snapshot in snapshots:
        for family in snapshot:
            known = families.get(family.name)
            families[family.name] = (
                family if known is None else replace(known, samples=known.samples + family.samples)
            )
    return tuple(families.values())


class _Collected(Collector):
    """Hands a snapshot to prometheus_client's own text writer."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        for family in self._snapshot:
            metric = Metric(family.name, family.help, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, dict(sample.labels), sample.value)
            yield metric


def exposition(snapshots: Iterable[Snapshot]) -> bytes:
    """Prometheus text of several replicas' metrics, side by side."""
    registry = CollectorRegistry()
    registry.register(_Collected(joined(snapshots)))
    return generate_latest(registry)
