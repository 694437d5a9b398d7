"""Counters of one request, step by step, and several replicas in one exposition."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.engine.engine import EngineStats
from outrider.generation import Chunk, GenerationStats
from outrider.messages import FinishReason
from outrider_serve.telemetry import Snapshot, Telemetry, exposition, verifier_snapshot


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def chunk(*, finish: FinishReason | None = None) -> Chunk:
    return Chunk("x", (1,), (False,), finish)


def value(telemetry: Telemetry, name: str, **labels: str) -> float:
    """Sum of the series of that name that carry these labels."""
    return sum(
        sample.value
        for family in telemetry.snapshot()
        for sample in family.samples
        if sample.name == name and labels.items() <= dict(sample.labels).items()
    )


def test_counters_move_with_every_chunk_not_only_at_the_end() -> None:
    telemetry, stats = Telemetry("m", engine="r1"), GenerationStats(prompt_tokens=9, cached_tokens=4)
    with telemetry.request(stats) as meter:
        stats.count(drafted=4, accepted=2)
        stats.completion_tokens = 3
        meter.chunk(chunk())
        assert value(telemetry, "vllm:generation_tokens_total") == 3
        stats.count(drafted=4, accepted=0)
        stats.count(drafted=0, accepted=0)
        stats.count(drafted=2, accepted=1)
        stats.completion_tokens = 7
        meter.chunk(chunk(finish=FinishReason.STOP))
    assert value(telemetry, "vllm:spec_decode_num_drafts_total") == 3
    assert value(telemetry, "vllm:spec_decode_num_draft_tokens_total") == 10
    assert value(telemetry, "vllm:spec_decode_num_accepted_tokens_total") == 3
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(telemetry, per_position, position=str(place)) for place in range(3)] == [2, 1, 0]
    assert value(telemetry, "vllm:generation_tokens_total") == 7
    assert (
        value(telemetry, "vllm:prompt_tokens_total")
        == value(telemetry, "vllm:prefix_cache_queries_total")
        == 9
    )
    assert value(telemetry, "vllm:prefix_cache_hits_total") == 4


def test_latencies_are_a_verdict_a_request_and_a_token() -> None:
    clock = Clock()
    telemetry, stats = Telemetry("m", engine="r1", clock=clock), GenerationStats(queue_time=0.5)
    with telemetry.request(stats) as meter:
        clock.now, stats.completion_tokens = 2.0, 1
        meter.chunk(chunk())
        clock.now, stats.completion_tokens = 3.0, 6
        meter.chunk(chunk())
        clock.now, stats.completion_tokens = 6.0, 9
        meter.chunk(chunk(finish=FinishReason.LENGTH))
        clock.now = 7.0
    assert value(telemetry, "vllm:time_to_first_token_seconds_sum") == 2.0
    assert value(telemetry, "vllm:inter_token_latency_seconds_sum") == 4.0
    assert value(telemetry, "vllm:inter_token_latency_seconds_count") == 2
    assert value(telemetry, "vllm:request_time_per_output_token_seconds_sum") == 4.0 / 8
    assert value(telemetry, "vllm:e2e_request_latency_seconds_sum") == 7.0
    assert value(telemetry, "vllm:request_queue_time_seconds_sum") == 0.5


def test_a_request_waits_until_its_first_chunk_and_then_runs() -> None:
    telemetry = Telemetry("m", engine="r1")
    gauges = ("vllm:num_requests_waiting", "vllm:num_requests_running")

    def state() -> list[float]:
        return [value(telemetry, name) for name in gauges]

    with telemetry.request(GenerationStats()) as meter:
        assert state() == [1, 0]
        meter.chunk(chunk())
        assert state() == [0, 1]
        meter.chunk(chunk(finish=FinishReason.STOP))
    assert state() == [0, 0]


@pytest.mark.parametrize("chunks", [0, 1])
@pytest.mark.parametrize(("error", "reason"), [(RuntimeError(), "error"), (GeneratorExit(), "abort")])
def test_requests_that_fail_or_are_left_are_told_apart(
    chunks: int, error: BaseException, reason: str
) -> None:
    telemetry = Telemetry("m", engine="r1")

    def left_early() -> None:
        with telemetry.request(GenerationStats()) as meter:
            for _ in range(chunks):
                meter.chunk(chunk())
            raise error

    with pytest.raises(type(error)):
        left_early()
    assert value(telemetry, "vllm:request_success_total", finished_reason=reason) == 1
    assert value(telemetry, "vllm:request_success_total") == 1
    assert value(telemetry, "outrider_requests_cancelled_total") == (reason == "abort")
    assert value(telemetry, "vllm:num_requests_waiting") == value(telemetry, "vllm:num_requests_running") == 0
    assert value(telemetry, "vllm:e2e_request_latency_seconds_count") == 0


def test_a_fallback_is_counted_once_by_its_reason_without_the_particulars() -> None:
    telemetry, stats = Telemetry("m", engine="r1"), GenerationStats()
    with telemetry.request(stats) as meter:
        stats.fallback, stats.late_proposals = "drafter lost: replica 3a91 is gone", 2
        meter.chunk(chunk())
        meter.chunk(chunk(finish=FinishReason.STOP))
    assert value(telemetry, "outrider_speculation_fallbacks_total", reason="drafter lost") == 1
    assert value(telemetry, "outrider_speculation_fallbacks_total") == 1
    assert value(telemetry, "outrider_late_proposals_total") == 2


def test_drafts_that_gave_no_token_are_wasted_whether_rejected_or_invalid() -> None:
    telemetry, stats = Telemetry("m", engine="r1"), GenerationStats()
    with telemetry.request(stats) as meter:
        stats.count(drafted=4, accepted=1, invalid=2)
        stats.count(drafted=0, accepted=0, invalid=3)
        meter.chunk(chunk(finish=FinishReason.STOP))
    assert value(telemetry, "outrider_wasted_draft_tokens_total") == 3 + 2 + 3
    assert value(telemetry, "vllm:spec_decode_num_drafts_total") == 1
    assert value(telemetry, "vllm:spec_decode_num_draft_tokens_total") == 4


def test_work_is_counted_by_who_did_it_and_only_once_somebody_did() -> None:
    telemetry = Telemetry("m", engine="r1")

    def stats() -> GenerationStats:
        return GenerationStats(prompt_tokens=9, cached_tokens=4, target_parameters=100, drafter_parameters=10)

    def work(kind: str) -> float:
        return value(telemetry, "outrider_estimated_flops_total", kind=kind)

    def refused() -> None:
        with telemetry.request(stats()):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        refused()
    assert work("target_committed") == 0, "a refused request cost nothing"
    running = stats()
    with telemetry.request(running) as meter:
        running.completion_tokens = 1
        meter.chunk(chunk())
        assert work("target_committed") == 2 * 100 * (5 + 1)
        running.count(drafted=4, accepted=1, invalid=1)
        running.completion_tokens = 3
        meter.chunk(chunk(finish=FinishReason.STOP))
    assert work("target_committed") == 2 * 100 * (5 + 3)
    assert work("target_rejected") == 2 * 100 * 3
    assert work("drafter") == 2 * 10 * 5


def test_prediction_tokens_are_counted_by_outcome_also_where_a_stop_takes_some_back() -> None:
    telemetry, stats = Telemetry("m", engine="r1"), GenerationStats()
    with telemetry.request(stats) as meter:
        stats.accepted_prediction_tokens, stats.rejected_prediction_tokens = 5, 2
        meter.chunk(chunk())
        stats.accepted_prediction_tokens = 4
        meter.chunk(chunk(finish=FinishReason.STOP))
    assert value(telemetry, "outrider_prediction_tokens_total", outcome="accepted") == 5
    assert value(telemetry, "outrider_prediction_tokens_total", outcome="rejected") == 2


def test_each_router_has_series_of_its_own_whose_sum_is_that_of_both() -> None:
    one, other = Telemetry("m", engine="r1"), Telemetry("m", engine="r2")
    one.expect_drafts(1)
    other.expect_drafts(3)
    one.accepted_at(0, 5)
    other.accepted_at(0, 7)
    other.accepted_at(2, 1)
    one.time_to_first_token.observe(0.03)
    other.time_to_first_token.observe(3)
    text = exposition([one.snapshot(), other.snapshot()]).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert len(families) == text.count("# TYPE "), "each family stands there once"
    per_position = {
        (sample.labels["engine"], sample.labels["position"]): sample.value
        for sample in families["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
    }
    assert per_position == {("r1", "0"): 5, ("r2", "0"): 7, ("r2", "1"): 0, ("r2", "2"): 1}
    for engine in ("r1", "r2"):
        buckets = [
            sample.value
            for sample in families["vllm:time_to_first_token_seconds"].samples
            if sample.name.endswith("_bucket") and sample.labels["engine"] == engine
        ]
        assert buckets == sorted(buckets)
        assert (buckets[0], buckets[-1]) == (0, 1)
    assert [sample.value for sample in families["outrider_routers"].samples] == [1, 1]


def test_a_router_that_is_replaced_ends_its_series_and_no_series_falls() -> None:
    stays, goes, comes = (Telemetry("m", engine=name) for name in ("r1", "r2", "r3"))
    stays.generation_tokens.inc(5)
    goes.generation_tokens.inc(100)
    before = generated_tokens([stays.snapshot(), goes.snapshot()])
    stays.generation_tokens.inc(2)
    after = generated_tokens([stays.snapshot(), comes.snapshot()])
    assert before == {"r1": 5, "r2": 100}
    assert after == {"r1": 7, "r3": 0}
    assert all(after[engine] >= before[engine] for engine in before.keys() & after.keys())


def generated_tokens(snapshots: list[Snapshot]) -> dict[str, float]:
    return {
        sample.labels["engine"]: sample.value
        for family in text_string_to_metric_families(exposition(snapshots).decode())
        for sample in family.samples
        if sample.name == "vllm:generation_tokens_total"
    }


def test_what_verifiers_say_of_themselves_is_exposed_by_replica() -> None:
    def stats(*, used: int, preemptions: int, cancelled: int, failed: int) -> EngineStats:
        invalid = {"invalid_tokens": 4, "invalid_draft_probs": 5, "invalid_grammar": 6}
        return EngineStats(1, 0, 8, 200, used, preemptions, 10, 20, cancelled, failed, **invalid)

    engines = {
        "v1": stats(used=50, preemptions=3, cancelled=2, failed=1),
        "v2": stats(used=0, preemptions=0, cancelled=0, failed=0),
    }
    text = exposition([Telemetry("m", engine="r1").snapshot(), verifier_snapshot("m", engines)]).decode()
    assert 'vllm:kv_cache_usage_perc{engine="v1",model_name="m"} 0.25' in text
    assert 'vllm:kv_cache_usage_perc{engine="v2",model_name="m"} 0.0' in text
    assert "# TYPE vllm:num_preemptions_total counter" in text
    assert 'vllm:num_preemptions_total{engine="v1",model_name="m"} 3.0' in text
    assert 'outrider_verifier_sequences_cancelled_total{engine="v1",model_name="m"} 2.0' in text
    assert 'outrider_verifier_sequences_failed_total{engine="v1",model_name="m"} 1.0' in text
    for reason, count in (("token", 4), ("draft_probs", 5), ("grammar", 6)):
        labels = f'engine="v2",model_name="m",reason="{reason}"'
        assert f"outrider_verifier_invalid_drafts_total{{{labels}}} {count}.0" in text


def test_names_and_label_order_are_those_that_dashboards_and_scripts_expect() -> None:
    telemetry = Telemetry("m", engine="r1")
    telemetry.expect_drafts(2)
    lines = exposition([telemetry.snapshot()]).decode().splitlines()
    assert 'vllm:spec_decode_num_drafts_total{engine="r1",model_name="m"} 0.0' in lines
    assert (
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="r1",model_name="m",position="1"} 0.0'
        in lines
    )
    assert "# TYPE vllm:spec_decode_num_drafts_total counter" in lines
    assert "# TYPE vllm:e2e_request_latency_seconds histogram" in lines
    assert not any("_created" in line for line in lines)
