"""Drafters that fail a request in some way, in the service in one process: its text is the plain one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider
from outrider.config import LocalConfig, SpeculativeConfig, parse
from outrider.contracts import Draft, DraftContext, TargetInfo
from outrider.inprocess import LocalService
from outrider.messages import DraftOrder, Limits, Open, Plan, Proposal, Resync, SamplingParams
from outrider.speculation.drafting import DrafterLoop
from outrider_plugins.draft_model import ModelDrafter

WAIT_S = 60.0


@pytest.fixture(scope="module")
def short_drafter(build_llama: Any) -> Path:
    """The target's own weights, good for 64 tokens: every draft is right as long as there are any."""
    folder: Path = build_llama("short_drafter", max_position_embeddings=64)
    return folder


def config(folder: Path, **speculative: Any) -> dict[str, Any]:
    return {
        "model": str(folder),
        "dtype": "float32",
        "num_kv_blocks": 128,
        "planner": {"gate_ms": 60_000},
        "speculative_config": {"num_speculative_tokens": 4} | speculative,
    }


def prompt_of(length: int) -> list[int]:
    return [30 + 7 * i % 200 for i in range(length)]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 4}])
def test_a_prompt_beyond_the_drafters_context_or_a_text_that_crosses_it_goes_on_without_drafts(
    tiny_llama: Path, short_drafter: Path, sampling: dict[str, Any]
) -> None:
    """Public report 31: crashes and illegal memory accesses. The request beside them still speculates."""
    speculative = {"method": "draft_model", "model": str(short_drafter), "extra": {"device": "cpu"}}
    with outrider.local(config(tiny_llama, **speculative)) as service:
        prompts = [prompt_of(100), prompt_of(50), prompt_of(10)]
        requests = [service.request(prompt, max_tokens=30, ignore_eos=True, **sampling) for prompt in prompts]
        beyond, crossing, short = service.generate_many(requests)
        plain = [
            service.generate(prompt, max_tokens=30, ignore_eos=True, speculative=False, **sampling).tokens
            for prompt in prompts
        ]
    assert [beyond.tokens, crossing.tokens, short.tokens] == plain
    assert beyond.stats.draft_tokens == 0
    assert 0 < crossing.stats.accepted_tokens == crossing.stats.draft_tokens <= 64 - 50
    assert short.stats.accepted_tokens == short.stats.draft_tokens > 16


def test_every_drafter_replica_answers_a_request_over_its_limit_at_once(
    tiny_llama: Path, short_drafter: Path
) -> None:
    """Public report 32: ranks that did not agree on skipping waited for each other. Here each one answers for
    itself, with no drafts, and in the same batch drafts for the others."""
    spec = SpeculativeConfig(method="draft_model", model=str(short_drafter), extra={"device": "cpu"})
    target = TargetInfo(str(tiny_llama), vocab_size=304, max_model_len=512, dtype="float32", device="cpu")
    for _ in range(2):
        answers: list[Proposal | Resync] = []
        answered = threading.Event()

        def deliver(
            new: Sequence[Proposal | Resync], *, answers: Any = answers, answered: threading.Event = answered
        ) -> None:
            answers += new
            answered.set()

        loop = DrafterLoop(ModelDrafter(spec, target), deliver)
        for name, length in (("over", 100), ("under", 10)):
            opening = Open(
                name, 0, tuple(prompt_of(length)), (), SamplingParams(), Limits(50), Plan(name, 0, 4, 1.0)
            )
            loop.submit([opening, DraftOrder(name, 0, length, (), 4)])
        loop.start()
        try:
            assert answered.wait(WAIT_S)
        finally:
            loop.stop(WAIT_S)
        drafted = {one.sequence: len(one.tokens) for one in answers if isinstance(one, Proposal)}
        assert drafted == {"over": 0, "under": 4}
        assert loop.stats.batches == 1


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_a_long_prompt_again_and_a_further_turn_are_served_from_the_cache_with_the_cold_text(
    tiny_llama: Path, short_drafter: Path, method: str
) -> None:
    """Public report 34: with speculation the hit rate fell, and texts after reuse were corrupt."""
    speculative: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": 1}
    if method == "draft_model":
        speculative = {"method": method, "model": str(tiny_llama), "extra": {"device": "cpu"}}
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 9, "ignore_eos": True}
    with outrider.local(config(tiny_llama, **speculative)) as service:
        block = service.config.block_size
        first = prompt_of(150)
        cold = service.generate(first, **options)
        warm = service.generate(first, **options)
        turn = [*first, *cold.tokens, 5, 6]
        warm_turn = service.generate(turn, **options)
    with outrider.local(config(tiny_llama, **speculative) | {"enable_prefix_caching": False}) as service:
        cold_turn = service.generate(turn, **options)
    assert cold.stats.draft_tokens > 0
    assert (cold.stats.cached_tokens, cold_turn.stats.cached_tokens) == (0, 0)
    assert warm.tokens == cold.tokens
    assert warm_turn.tokens == cold_turn.tokens
    assert warm.stats.cached_tokens >= len(first) - block
    assert warm_turn.stats.cached_tokens >= len(first) + len(cold.tokens) - 1 - block


class Spoiled:
    """The target's own weights, but of every draft the distributions are changed before they are shipped."""

    needs_device = False

    def __init__(self, inner: ModelDrafter, spoil: Callable[[Draft], Draft]) -> None:
        self._inner, self._spoil = inner, spoil

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [self._spoil(draft) for draft in self._inner.propose(contexts)]

    def forget(self, sequence: str) -> None:
        self._inner.forget(sequence)


def spoiled(tiny_llama: Path, rule: str, spoil: Callable[[Draft], Draft]) -> LocalService:
    made = parse(
        LocalConfig,
        config(
            tiny_llama,
            method="draft_model",
            model=str(tiny_llama),
            rejection_sample_method=rule,
            draft_probs_top_n=304,
            extra={"device": "cpu"},
        ),
        where="test",
    )
    assert made.speculative_config is not None
    target = TargetInfo(str(tiny_llama), vocab_size=304, max_model_len=512, dtype="float32", device="cpu")
    return LocalService(made, drafter=Spoiled(ModelDrafter(made.speculative_config, target), spoil))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_targets_own_weights_are_accepted_whole(tiny_llama: Path, rule: str) -> None:
    with spoiled(tiny_llama, rule, lambda draft: draft) as service:
        stats = service.generate(prompt_of(8), max_tokens=40, seed=2, ignore_eos=True).stats
    assert stats.accepted_tokens == stats.draft_tokens > 25
    assert stats.invalid_drafts == 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drafts_without_their_distributions_are_counted_and_never_accepted(
    tiny_llama: Path, rule: str
) -> None:
    """Public report 10: they were judged by another rule, in silence. Here the rounds are plain ones."""
    with spoiled(tiny_llama, rule, lambda draft: Draft(draft.tokens)) as service:
        done = service.generate(prompt_of(8), max_tokens=40, seed=2, ignore_eos=True)
    assert len(done.tokens) == 40
    assert not any(done.drafted)
    assert done.stats.draft_tokens == 0
    assert done.stats.invalid_drafts > 100


def test_a_drafter_that_meets_a_nan_drafts_less_and_the_text_is_the_plain_one(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Public report 8, the drafter's half: a NaN of the drafter costs drafts only."""
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    with spoiled(tiny_llama, "coupled", lambda draft: draft) as service:
        plain = service.generate(prompt_of(8), speculative=False, **options)
        drafter = service.coordinator.drafter
        assert isinstance(drafter, Spoiled)
        generator = drafter._inner.generator
        forward, calls = generator._model.forward, []

        def poisoned(batch: Any) -> torch.Tensor:
            calls.append(batch)
            logits = forward(batch)
            return logits * torch.nan if len(calls) % 5 == 0 else logits

        monkeypatch.setattr(generator._model, "forward", poisoned)
        done = service.generate(prompt_of(8), **options)
        assert generator.counts.limited["nan"] > 2
    assert done.tokens == plain.tokens
    assert done.stats.accepted_tokens == done.stats.draft_tokens > 10
