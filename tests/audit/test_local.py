"""The whole audit in process, on tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.audit import local
from outrider.audit.command import AuditOptions, run
from outrider.audit.law import next_token_probs, text_law
from outrider.audit.results import Comparison, Status
from outrider.errors import ConfigError
from outrider.messages import SamplingParams
from outrider.sampling.processors import Lane, process
from outrider.sampling.target import target_probs


def ask(folder: Path, **options: Any) -> AuditOptions:
    engine = {"dtype": "float32", "numerics": "strict"} | options.pop("engine", {})
    return AuditOptions(
        str(folder), engine=engine, overrides=("num_kv_blocks=128",), prompts=6, tokens=12, **options
    )


def test_a_sound_model_passes_every_check_of_texts(tiny_llama: Path) -> None:
    said: list[str] = []
    report = run(ask(tiny_llama, checks=("greedy", "identity", "quality")), said.append)
    assert report.exit_code == 0
    texts = {one.name: one for one in report.results if isinstance(one, Comparison)}
    assert len(texts) == 11
    assert all(one.identical == one.compared == 6 for one in texts.values()), report.document()
    assert texts["oracle, K = 8"].accepted == texts["oracle, K = 8"].drafted > 0
    assert texts["anti, K = 4"].accepted == 0 < texts["anti, K = 4"].drafted
    assert 0 < texts["scripted, K = 5"].accepted < texts["scripted, K = 5"].drafted
    assert any(line.startswith("draft_model, K = 8") for line in said)


def test_the_distributions_of_a_sound_model_pass(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "CONTEXTS", local.CONTEXTS[:1])
    report = run(ask(tiny_llama, checks=("distribution",), draws=200), lambda _: None)
    assert report.exit_code == 0, report.conclusion
    assert len(report.results) == 3 * (2 + 5)
    assert sum(one.status is Status.FINE for one in report.results) >= 18, report.document()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (AuditOptions(None), "--model is missing"),
        (AuditOptions("x", checks=("nonsense",)), "there are greedy, identity, distribution, quality"),
        (AuditOptions("x", rule="block"), "--rule is for a running service"),
        (AuditOptions("x", overrides=("max_model_len",)), "KEY=VALUE"),
        (AuditOptions("x", overrides=("max_model_lem=5",)), "did you mean 'max_model_len'"),
        (AuditOptions("x", prompts=41), "ask for fewer"),
        (
            AuditOptions(None, url="http://x", engine={"dtype": "float32"}),
            "--dtype is for an audit in process",
        ),
        (AuditOptions(None, url="http://x", draft_model="y"), "--draft-model is for an audit in process"),
        (AuditOptions(None, url="http://x", checks=("greedy",)), "with --url there are identity"),
    ],
)
def test_a_wrong_option_is_named_with_its_cure(options: AuditOptions, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(options, lambda _: None)


def test_texts_longer_than_the_context_are_refused(tiny_llama: Path) -> None:
    asked = AuditOptions(
        str(tiny_llama),
        overrides=("max_model_len=32", "num_kv_blocks=8"),
        prompts=1,
        tokens=40,
        checks=("identity",),
    )
    with pytest.raises(ConfigError, match="leaves no room for a prompt"):
        run(asked, lambda _: None)


# ---- the law


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([None, 1, 3, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.4]),
    min_p=st.sampled_from([0.0, 0.1]),
    penalty=st.sampled_from([0.0, 0.6, -0.5]),
    repetition=st.sampled_from([1.0, 1.4]),
    output=st.lists(st.integers(0, 9), max_size=6),
)
def test_the_law_written_from_the_documents_is_the_targets(
    seed: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    min_p: float,
    penalty: float,
    repetition: float,
    output: list[int],
) -> None:
    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        presence_penalty=penalty,
        frequency_penalty=penalty / 2,
        repetition_penalty=repetition,
        logit_bias=((3, 1.5),),
    )
    logits = torch.randn(1, 10, generator=torch.Generator().manual_seed(seed)) * 2
    lane = Lane(sampling, 20, prompt=(1, 2), output=output)
    wanted = target_probs(process(logits, [lane], 10), [lane])[0].numpy()
    found = next_token_probs(logits[0].numpy(), sampling, prompt=(1, 2), output=output)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_the_law_of_a_text_sums_to_one_and_multiplies_its_steps() -> None:
    def logits(prefixes: Any) -> Any:
        return np.array([[float(sum(prefix) % 3), 0.5, 0.0] for prefix in prefixes])

    law = text_law(logits, SamplingParams(temperature=1.0, top_k=1), prompt=(1,), length=3)
    assert sum(law.values()) == pytest.approx(1.0)
    assert len(law) == 1
    law = text_law(logits, SamplingParams(temperature=1.0), prompt=(1,), length=3)
    assert len(law) == 27
    assert sum(law.values()) == pytest.approx(1.0)
    first = next_token_probs(logits([(1,)])[0], SamplingParams(), prompt=(1,), output=())
    second = next_token_probs(logits([(1, 0)])[0], SamplingParams(), prompt=(1,), output=(0,))
    assert sum(p for text, p in law.items() if text[:2] == (0, 1)) == pytest.approx(first[0] * second[1])
