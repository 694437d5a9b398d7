"""The whole service in one process against transformers' own `generate`: token for token in float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import outrider
from outrider.contracts import Draft, DraftContext
from outrider.errors import ConfigError, GenerationError, RequestError, UnavailableError
from outrider.inprocess import LocalService
from outrider.messages import FinishReason

# Long enough to need several blocks, with repetition for the prompt lookup to find.
PROMPTS = [
    "The router drafts, the verifier accepts. The router drafts, the verifier",
    "Ağaç, çiçek, şeker: Ağaç, çiçek,",
    "a",
    "Speculation is a guess that is checked: the checked guess is the answer, the wrong guess is nothing. "
    * 2,
]
MAX_TOKENS = 40


def start(folder: Path, *, engine: dict[str, Any] | None = None, **speculative: Any) -> LocalService:
    config: dict[str, Any] = {"model": str(folder), "dtype": "float32", "num_kv_blocks": 128}
    config["planner"] = {"gate_ms": 30_000}  # on a busy machine, too, every round has its drafts
    if speculative.get("method") == "ngram":
        speculative |= {"prompt_lookup_min": 1}  # a random model repeats single tokens at best
    if speculative:
        config["speculative_config"] = speculative
    return outrider.local(config | (engine or {}))


def reference(
    folder: Path, service: LocalService, prompts: Sequence[str], max_tokens: int
) -> list[list[int]]:
    """Greedy tokens of `generate`, one prompt at a time, without the prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt in prompts:
        ids = torch.tensor([service.tokenizer.encode(prompt)])
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
            )
        found.append(output[0, ids.shape[1] :].tolist())
    return found


@pytest.fixture(scope="module")
def truths(tiny_llama: Path) -> list[list[int]]:
    with start(tiny_llama) as service:
        return reference(tiny_llama, service, PROMPTS, MAX_TOKENS)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("k", range(1, 9))
def test_greedy_is_token_for_token_the_targets_own(
    tiny_llama: Path, build_llama: Any, truths: list[list[int]], method: str, k: int
) -> None:
    options: dict[str, Any] = {"method": method, "num_speculative_tokens": k}
    if method == "draft_model":
        options |= {"model": str(build_llama("drafter", num_hidden_layers=2)), "extra": {"device": "cpu"}}
    with start(tiny_llama, **options) as service:
        for concurrency in (1, 8):
            chosen = [i % len(PROMPTS) for i in range(concurrency)]
            requests = [service.request(PROMPTS[i], max_tokens=MAX_TOKENS, temperature=0) for i in chosen]
            done = service.generate_many(requests)
            assert [list(c.tokens) for c in done] == [truths[i] for i in chosen]
            assert sum(c.stats.draft_tokens for c in done) > 0
        assert service.verifier.stats.kv_blocks_used == 0


def test_the_verifiers_own_weights_as_drafter_are_accepted_whole(tiny_llama: Path) -> None:
    options: dict[str, Any] = {"method": "draft_model", "model": str(tiny_llama), "extra": {"device": "cpu"}}
    with start(tiny_llama, num_speculative_tokens=4, **options) as service:
        samplings: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 5, "top_p": 0.9}]
        for sampling in samplings:
            stats = service.generate(PROMPTS[0], max_tokens=MAX_TOKENS, **sampling).stats
            assert stats.acceptance_rate == 1.0
            assert stats.mean_acceptance_length == pytest.approx(5.0, abs=0.5)


def test_a_seed_gives_the_same_text_with_and_without_speculation(tiny_llama: Path) -> None:
    with start(tiny_llama, method="ngram", num_speculative_tokens=5) as service:
        options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0.8, "top_k": 40, "seed": 11}
        speculative = service.generate(PROMPTS[3], **options)
        plain = service.generate(PROMPTS[3], speculative=False, **options)
        other = service.generate(PROMPTS[3], **options | {"seed": 12})
    assert speculative.tokens == plain.tokens
    assert speculative.stats.draft_tokens > 0 == plain.stats.draft_tokens
    assert other.tokens != plain.tokens


class Anti:
    """Always wrong, and now and then hostile."""

    needs_device = False

    def __init__(self) -> None:
        self.calls = 0

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self.calls += 1
        wrong = [(context.tokens[-1] * 7 + 3) % 300 for context in contexts]
        if self.calls % 5 == 0:
            return [Draft((-4, 10**9, token)) for token in wrong]
        return [Draft((token,) * context.num_tokens) for token, context in zip(wrong, contexts, strict=True)]

    def forget(self, sequence: str) -> None: ...


def test_a_drafter_that_is_always_wrong_changes_nothing_but_speed(
    tiny_llama: Path, truths: list[list[int]]
) -> None:
    config = {"model": str(tiny_llama), "dtype": "float32", "num_kv_blocks": 64}
    spec = {"speculative_config": {"method": "anti", "num_speculative_tokens": 4}}
    drafter = Anti()
    with outrider.local(config | spec, drafter=drafter) as service:
        done = service.generate(PROMPTS[0], max_tokens=MAX_TOKENS, temperature=0)
    assert list(done.tokens) == truths[0]
    assert drafter.calls > 10
    assert done.stats.accepted_tokens < done.stats.draft_tokens / 4


class Broken:
    needs_device = False

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        raise RuntimeError("the drafter broke")

    def forget(self, sequence: str) -> None: ...


def test_a_drafter_that_raises_leaves_the_request_plain(tiny_llama: Path, truths: list[list[int]]) -> None:
    config = {"model": str(tiny_llama), "dtype": "float32", "speculative_config": {"method": "ngram"}}
    with outrider.local(config | {"num_kv_blocks": 64}, drafter=Broken()) as service:
        done = service.generate(PROMPTS[0], max_tokens=MAX_TOKENS, temperature=0)
    assert list(done.tokens) == truths[0]
    assert done.stats.fallback == "the drafter failed: RuntimeError"


def test_a_stop_string_inside_a_block_trims_text_tokens_and_usage(
    tiny_llama: Path, truths: list[list[int]]
) -> None:
    options: dict[str, Any] = {"method": "draft_model", "model": str(tiny_llama), "extra": {"device": "cpu"}}
    with start(tiny_llama, num_speculative_tokens=8, **options) as service:
        text = service.tokenizer.decode(truths[0])
        at, stop = next(
            (at, text[at : at + 2])
            for at in range(4, len(text))
            if text[at : at + 2].isascii() and text.index(text[at : at + 2]) == at
        )
        done = service.generate(PROMPTS[0], max_tokens=MAX_TOKENS, temperature=0, stop=stop)
        assert done.text == text[:at]
        assert done.finish is FinishReason.STOP
        assert done.stats.completion_tokens == len(done.tokens)
        assert stop in service.tokenizer.decode(done.tokens)
        assert stop not in service.tokenizer.decode(done.tokens[:-1])


def test_an_end_of_text_id_inside_a_block_ends_the_text(
    tiny_llama: Path, build_llama: Any, truths: list[list[int]]
) -> None:
    at = next(i for i in range(3, MAX_TOKENS) if truths[0][i] not in truths[0][:i])
    ending = build_llama("ending", eos_token_id=truths[0][at])
    options: dict[str, Any] = {"method": "draft_model", "model": str(ending), "extra": {"device": "cpu"}}
    with start(ending, num_speculative_tokens=8, **options) as service:
        done = service.generate(PROMPTS[0], max_tokens=MAX_TOKENS, temperature=0)
    assert list(done.tokens) == truths[0][: at + 1]
    assert done.finish is FinishReason.STOP


def test_streamed_chunks_are_the_generated_text(tiny_llama: Path, truths: list[list[int]]) -> None:
    with start(tiny_llama, method="ngram") as service:
        chunks = list(service.stream(PROMPTS[1], max_tokens=MAX_TOKENS, temperature=0))
        assert "".join(chunk.text for chunk in chunks) == service.tokenizer.decode(truths[1])
        assert [t for chunk in chunks for t in chunk.tokens] == truths[1]
        assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish is FinishReason.LENGTH


def test_closing_ends_what_runs_with_an_error(tiny_llama: Path) -> None:
    service = start(tiny_llama, method="ngram")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(service.generate, PROMPTS[0], max_tokens=400, temperature=0)
        stream = service.stream(PROMPTS[0], max_tokens=400, temperature=0)
        next(stream)
        service.close()
        with pytest.raises(UnavailableError, match="the service was closed"):
            running.result(timeout=30)
        with pytest.raises(UnavailableError, match="the service was closed"):
            list(stream)
    service.close()  # twice is fine


def test_the_first_error_ends_the_requests_beside_it(tiny_llama: Path) -> None:
    with start(tiny_llama) as service:
        fine = service.request(PROMPTS[0], max_tokens=400, temperature=0)
        with pytest.raises(GenerationError):
            service.generate_many([fine, service.request([10**6], max_tokens=400)])
        assert service.coordinator.active == 0


def test_a_stream_that_is_left_frees_its_sequence(tiny_llama: Path) -> None:
    with start(tiny_llama, method="ngram") as service:
        stream = service.stream(PROMPTS[0], max_tokens=400, temperature=0)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        service.generate(PROMPTS[2], max_tokens=20, temperature=0)  # the close is handled by then
        assert service.verifier.stats.cancelled == 1
        assert service.verifier.stats.kv_blocks_used == 0
        assert service.coordinator.active == 0


def test_memory_returns_to_its_baseline_after_many_requests(tiny_llama: Path) -> None:
    options: dict[str, Any] = {"method": "draft_model", "model": str(tiny_llama), "extra": {"device": "cpu"}}
    with start(tiny_llama, num_speculative_tokens=3, **options) as service:
        for _ in range(5):
            requests = [service.request(f"prompt {i}", max_tokens=4, temperature=0) for i in range(40)]
            done = service.generate_many(requests)
            assert all(c.stats.accepted_tokens for c in done)
        assert service.verifier.stats.kv_blocks_used == 0


def test_requests_that_wait_for_memory_are_not_taken_for_lost(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.engine.engine.SIGN_OF_LIFE_S", 0.05)
    pins = {"gate_ms": 30_000, "first_verdict_timeout_s": 0.5, "verdict_timeout_s": 0.5}
    with start(tiny_llama, engine={"num_kv_blocks": 16, "planner": pins}) as service:
        requests = [service.request([i + 5] * 220, max_tokens=200, temperature=0) for i in range(8)]
        done = service.generate_many(requests)
    assert [len(completion.tokens) for completion in done] == [200] * 8
    assert max(completion.stats.time_to_first_token for completion in done) > 0.5


def test_bad_requests_name_the_field(tiny_llama: Path) -> None:
    with start(tiny_llama, engine={"max_model_len": 64}) as service:
        with pytest.raises(RequestError, match="the prompt is empty"):
            service.generate([], max_tokens=4)
        with pytest.raises(RequestError, match="the prompt has 64 tokens and the context 64"):
            service.generate([5] * 64, max_tokens=4)
        with pytest.raises(GenerationError, match="a token id is outside"):
            service.generate([5, 100_000], max_tokens=4)
        assert service.generate("still serves", max_tokens=4, temperature=0).finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 2},
        {"top_k": -1},
        {"max_tokens": 0},
        {"seed": 1 << 63},
        {"stop": ["fine", ""]},
        {"speculative": -2},
    ],
)
def test_arguments_out_of_range_are_named(tiny_service: LocalService, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(RequestError, match=f"{name} is .*: allowed is") as raised:
        tiny_service.generate("text", **options)
    assert raised.value.param == name


@pytest.fixture(scope="module")
def tiny_service(tiny_llama: Path) -> Iterator[LocalService]:
    with start(tiny_llama) as service:
        yield service


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculative_config": {"method": "telepathy"}}, "'telepathy' is not installed; known: .*ngram"),
        (
            {"speculative_config": {"metod": "ngram"}},
            "unknown key 'speculative_config.metod'; did you mean 'method'",
        ),
        ({"speculative_config": {"tensor_parallel_size": 2}}, "draft_tensor_parallel_size"),
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"num_kv_blocks": 3}, "the KV cache holds 96 tokens and max_model_len is 512"),
        ({"max_model_len": 4096}, "max_model_len 4096 is above the model's own 512"),
        ({"device": "cuda"}, "torch sees no CUDA device"),
    ],
)
def test_a_service_that_cannot_work_does_not_start(
    tiny_llama: Path, change: dict[str, Any], message: str
) -> None:
    if change.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ConfigError, match=message):
        outrider.local({"model": str(tiny_llama), "num_kv_blocks": 64} | change)


@pytest.mark.smollm2
def test_smollm2_in_float32_equals_generate(smollm2: Path) -> None:
    prompts = SMOLLM2_PROMPTS
    base = {"model": str(smollm2), "dtype": "float32", "num_kv_blocks": 256}
    with outrider.local(base) as service:
        truths = reference(smollm2, service, prompts, 48)
    for k in (1, 4, 8):
        spec = {"speculative_config": {"method": "ngram", "num_speculative_tokens": k}}
        with outrider.local(base | spec) as service:
            requests = [service.request(p, max_tokens=48, temperature=0) for p in prompts]
            done = service.generate_many(requests)
        assert [list(c.tokens) for c in done] == truths
        assert sum(c.stats.accepted_tokens for c in done) > 0


SMOLLM2_PROMPTS = [
    "The capital of France is",
    "1, 2, 3, 4, 5, 6,",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):",
    "Roses are red, violets are blue, roses are red,",
    "Müller wohnt in Köln. Frau Müller wohnt in",
    "İstanbul'da hava çok güzel. İstanbul'da",
    "Q: What is 12 + 30?\nA:",
    "Once upon a time there was a small dog. The small dog",
    "The meeting is on Monday at ten. The meeting is on",
    "import numpy as np\nimport pandas as",
    "E-mail: anna@example.org\nE-mail: bob@example.org\nE-mail:",
    "Water boils at 100 degrees. Water freezes at",
]
