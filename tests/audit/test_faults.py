"""Planted faults: each is put into the real engine or drafter, and the audit's own checks must find it.

The same checks pass without the fault, with the same seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.audit import distribution
from outrider.audit.distribution import HARD_CASES, Distribution, HardCase
from outrider.audit.local import LocalAudit
from outrider.audit.results import Comparison, Status, Verdict
from outrider.engine import engine as engine_module
from outrider.engine import verification
from outrider.engine.model import Span
from outrider.messages import AcceptanceRule
from outrider.sampling import acceptance
from outrider.sampling import draft as draft_module
from outrider.sampling.noise import Purpose, draw, row_key
from outrider.sampling.processors import Lane
from outrider_plugins import draft_model

SHARED, REUSED = HARD_CASES


def judged(
    rule: AcceptanceRule, case: HardCase = REUSED, *, draws: int = 2000, temperature: float = 1.0
) -> Distribution:
    """Draw under a rule and test, as the audit does."""
    setting = case.setting(rule)
    drawn = distribution.sample(
        case.target,
        vocab_size=case.words,
        prompt=case.prompt,
        setting=replace(setting, sampling=replace(setting.sampling, temperature=temperature)),
        draws=draws,
        draft_score=case.drafter,
    )
    return distribution.judge([drawn])[0]


RATIO = [AcceptanceRule.REJECTION, AcceptanceRule.BLOCK]


@pytest.mark.parametrize("rule", list(AcceptanceRule))
def test_without_a_fault_every_rule_draws_from_the_targets_law(rule: AcceptanceRule) -> None:
    found = judged(rule)
    assert found.status is Status.FINE, found.summary
    assert 0 < found.accepted < found.drafted


@pytest.mark.parametrize("rule", RATIO)
def test_a_biased_acceptance_rule_is_found(monkeypatch: pytest.MonkeyPatch, rule: AcceptanceRule) -> None:
    monkeypatch.setattr(
        verification, "judge", lambda rule, probs, drafts, u: acceptance.judge(rule, probs, drafts, u * 0.8)
    )
    assert judged(rule).status is Status.DEFECT


@pytest.mark.parametrize("rule", RATIO)
def test_noise_that_drafter_and_verifier_share_under_a_ratio_test_is_found(
    monkeypatch: pytest.MonkeyPatch, rule: AcceptanceRule
) -> None:
    """vllm#47386: the recovered token was drawn with the noise that had drawn the rejected draft."""

    real = draft_module.draw_drafts

    def shared(
        logits: Tensor, lanes: Sequence[Lane], *, rounds: Sequence[int], **options: Any
    ) -> draft_module.DraftDraws:
        drawn = real(logits, lanes, rounds=rounds, **options)
        assert drawn.ids is not None
        assert drawn.probs is not None
        probs = torch.zeros(len(lanes), options["vocab_size"]).scatter(1, drawn.ids, drawn.probs)
        keys = [
            row_key(lane.sampling.seed, lane.sampling.choice, lane.position, Purpose.RESIDUAL, base)
            for lane, base in zip(lanes, rounds, strict=True)
        ]
        return replace(drawn, tokens=draw(probs.log(), [1.0] * len(keys), keys))

    monkeypatch.setattr(draft_model, "draw_drafts", shared)
    found = judged(rule, SHARED, draws=5000)
    assert found.status is Status.DEFECT, found.summary


def test_a_redrafted_position_with_its_old_noise_is_found_under_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """How much of a block is kept depends on later drafts: noise that was looked at cannot draw again."""

    def reused(
        seed: int, choice: int, position: int, purpose: Purpose = Purpose.TARGET, round: int = 0
    ) -> int:
        return row_key(seed, choice, position, purpose)

    monkeypatch.setattr(draft_module, "row_key", reused)
    found = judged(AcceptanceRule.BLOCK)
    assert found.status is Status.DEFECT, found.summary


@pytest.mark.parametrize("rule", RATIO)
def test_draft_probs_from_before_the_processors_are_found(
    monkeypatch: pytest.MonkeyPatch, rule: AcceptanceRule
) -> None:
    real = draft_module.draw_drafts

    def before(logits: Tensor, lanes: Sequence[Lane], **options: Any) -> draft_module.DraftDraws:
        drawn = real(logits, lanes, **options)
        raw = [replace(lane, sampling=replace(lane.sampling, temperature=1.0)) for lane in lanes]
        shipped = real(logits, raw, **options)
        return draft_module.DraftDraws(drawn.tokens, shipped.ids, shipped.probs)

    monkeypatch.setattr(draft_model, "draw_drafts", before)
    found = judged(rule, temperature=2.5)
    assert found.status is Status.DEFECT, found.summary


# ---- texts


PROMPTS = [
    "the router drafts",
    "a guess that is checked",
    "the same text",
    "the answer is",
    "naive cafe",
    "wrong",
]


DRAFTING = [("draft_model", "draft_model", 4), ("oracle", "oracle", 8), ("anti", "anti", 4)]


def audited(folder: Path, *checks: str) -> list[Comparison]:
    audit = LocalAudit(
        {"model": str(folder), "dtype": "float32", "numerics": "strict", "num_kv_blocks": 256},
        PROMPTS,
        tokens=16,
        drafting=DRAFTING,
        rules=(),
        checks=frozenset(checks),
    )
    return [one for one in audit.run() if isinstance(one, Comparison)]


def test_an_off_by_one_kv_length_is_found_and_is_no_tie(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of drafts are told that the cache is one token shorter than it is: the newest key is not seen."""

    def short(start: int, rows: int, length: int, blocks: tuple[int, ...]) -> Span:
        return Span(start, rows, length - (1 < rows < length), blocks)  # prompts are prefilled whole

    fine = audited(tiny_llama, "identity")
    assert all(one.identical == one.compared == len(PROMPTS) for one in fine), [one.summary for one in fine]
    assert {one.status for one in fine} == {Status.FINE}
    monkeypatch.setattr(engine_module, "Span", short)
    found = {one.name: one for one in audited(tiny_llama, "identity")}
    assert found["plain, mixed concurrency"].status is Status.FINE
    for name, _, _ in DRAFTING:
        assert found[name].status is Status.DEFECT, found[name].summary
        assert {one.verdict for one in found[name].divergences} == {Verdict.DEFECT}
