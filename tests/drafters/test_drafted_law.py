"""Two tiny random models, the real engine and drafter: texts of many seeds against the target's own law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from outrider.audit.draws import Drawn, Lockstep
from outrider.audit.law import Law, marginal, next_token_probs, text_law
from outrider.audit.statistics import Fit, goodness_of_fit, smallest_tv
from outrider.config import SpeculativeConfig
from outrider.contracts import Draft, DraftContext, Drafter, TargetInfo
from outrider.engine.engine import Engine
from outrider.engine.loading import load_model
from outrider.messages import AcceptanceRule, SamplingParams
from outrider.sampling import draft as draft_module
from outrider.sampling.draft import DraftDraws, draw_drafts
from outrider.sampling.draft_probs import check, guess, pack
from outrider.sampling.processors import Lane
from outrider_plugins import draft_model
from outrider_plugins.draft_model import ModelDrafter

VOCAB = 24
PROMPT = (3, 1, 4, 1, 5)
LENGTH = 4
LEVEL = 1e-3
COUPLED, REJECTION, BLOCK = AcceptanceRule.COUPLED, AcceptanceRule.REJECTION, AcceptanceRule.BLOCK


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and drafter: the drafter's weights are the target's with noise on them."""
    torch.manual_seed(5)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 32,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    model = LlamaForCausalLM(LlamaConfig(**shape))
    target, drafter = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    model.save_pretrained(target)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.08 * torch.randn_like(weight)
    model.save_pretrained(drafter)
    return target, drafter


@pytest.fixture(scope="module")
def engine(folders: tuple[Path, Path]) -> Engine:
    model = load_model(folders[0], dtype="float32", device="cpu", block_size=32, cpu_kernels="auto")
    return Engine(model, num_blocks=600, vocab_size=VOCAB, max_model_len=64, max_num_seqs=256)


@pytest.fixture(scope="module")
def reference(folders: tuple[Path, Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()


def load(folder: Path, target: Path, rule: AcceptanceRule, **options: Any) -> ModelDrafter:
    config = SpeculativeConfig(
        method="draft_model",
        model=str(folder),
        rejection_sample_method=rule,
        extra={"block_size": 32, "kv_cache_memory_bytes": 32 << 20},
        **options,
    )
    info = TargetInfo(str(target), vocab_size=VOCAB, max_model_len=64, dtype="float32", device="cpu")
    return ModelDrafter(config, info)


def draw(
    engine: Engine, drafter: Drafter | None, sampling: SamplingParams, draws: int, *, length: int = LENGTH
) -> Drawn:
    return Lockstep(engine, drafter, 3).draw(PROMPT, sampling, range(draws), length=length)


@torch.inference_mode()
def law_of(reference: Any, sampling: SamplingParams) -> Law:
    """By transformers and the documentation of the parameters: nothing of ours is in it."""

    def next_logits(texts: Sequence[tuple[int, ...]]) -> Any:
        return reference(torch.tensor(texts)).logits[:, -1].numpy()

    return text_law(next_logits, sampling, prompt=PROMPT, length=LENGTH)


def fit(drawn: Drawn, law: Law, position: int) -> Fit:
    """Of one token, over all that may come before it."""
    part = marginal(law, lambda text: text[position : position + 1])
    counts = Counter(text[position : position + 1] for text in drawn.texts)
    cells = sorted({*part, *counts})
    return goodness_of_fit([counts[cell] for cell in cells], [part.get(cell, 0.0) for cell in cells])


def fit_of_ranks(drawn: Drawn, law: Law) -> Fit:
    """How often the likeliest, second, ... token after its own text came, at every position of a block.

    Few cells and all positions together: what favours or neglects the likely tokens is seen soonest here.
    """
    shares: dict[tuple[int, ...], dict[int, float]] = {}
    for length in range(1, LENGTH):
        before = marginal(law, lambda text, n=length: text[:n])  # type: ignore[misc]
        for text, probability in marginal(law, lambda text, n=length: text[: n + 1]).items():  # type: ignore[misc]
            shares.setdefault(text[:-1], {})[text[-1]] = probability / before[text[:-1]]
    order = {text: sorted(row, key=lambda token: -row[token]) for text, row in shares.items()}
    counts, expected = np.zeros(TOP_K), np.zeros(TOP_K)
    for text in drawn.texts:
        for length in range(1, LENGTH):
            prefix = text[:length]
            counts[order[prefix].index(text[length])] += 1
            expected += [shares[prefix][token] for token in order[prefix]]
    return goodness_of_fit(counts, expected / expected.sum())


TOP_K = 4
WARM, COOL = SamplingParams(temperature=1.0, top_k=TOP_K), SamplingParams(temperature=0.7, top_k=TOP_K)
CASES: dict[str, tuple[AcceptanceRule, SamplingParams, dict[str, Any]]] = {
    "coupled": (COUPLED, WARM, {}),
    "block": (BLOCK, WARM, {}),
    "rejection_of_two_shipped": (REJECTION, COOL, {"draft_probs_top_n": 2}),
    "block_of_two_shipped": (BLOCK, COOL, {"draft_probs_top_n": 2}),
    "rejection_of_greedy_drafts": (REJECTION, WARM, {"draft_sample_method": "greedy"}),
}
DRAWS = 6000


@pytest.mark.parametrize("case", CASES)
def test_texts_have_the_targets_law_under_every_rule(
    folders: tuple[Path, Path], engine: Engine, reference: Any, case: str
) -> None:
    """Public reports 4 (top_k on the drafter), 6 (two of four tokens travel), 7 (a draft that was no draw is
    certain of itself) and 14 (a draft is kept while it is the target's own draw)."""
    rule, sampling, options = CASES[case]
    sampling = replace(sampling, rule=rule)
    target, drafter = folders
    drawn = draw(engine, load(drafter, target, rule, **options), sampling, DRAWS)
    assert 0.1 < drawn.accepted / drawn.drafted < 0.98
    law = law_of(reference, sampling)
    fits = [fit(drawn, law, position) for position in range(LENGTH)]
    assert [one.impossible for one in fits] == [0] * LENGTH
    ranks = fit_of_ranks(drawn, law)
    assert smallest_tv(ranks.draws, ranks.freedom, level=LEVEL, power=0.9) <= 0.02
    assert min(one.p_value for one in [*fits, ranks]) > LEVEL / (len(fits) + 1)


def test_under_coupled_every_seed_has_its_plain_text(folders: tuple[Path, Path], engine: Engine) -> None:
    """Public report 14: emitting the target's own draw is no bias, for there is no other text."""
    sampling = replace(WARM, temperature=0.9, presence_penalty=0.5, top_p=0.9)
    drawn = draw(engine, load(folders[1], folders[0], COUPLED), sampling, 250, length=12)
    assert drawn.texts == draw(engine, None, sampling, 250, length=12).texts
    assert 0 < drawn.accepted < drawn.drafted


def test_soft_draft_probs_on_a_greedy_draft_are_seen(
    folders: tuple[Path, Path], engine: Engine, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Public report 5: the drafter ignored the temperature, and the rule divided by it."""

    def greedy(logits: Tensor, temperatures: Sequence[float], keys: Sequence[int]) -> Tensor:
        return logits.argmax(dim=-1)

    monkeypatch.setattr(draft_module, "draw", greedy)
    sampling = replace(WARM, rule=REJECTION)
    drawn = draw(engine, load(folders[1], folders[0], REJECTION), sampling, 2000)
    law = law_of(reference, sampling)
    assert min(fit(drawn, law, position).p_value for position in range(1, LENGTH)) < 1e-6


def test_draft_probs_without_the_requests_top_k_are_seen(
    folders: tuple[Path, Path], engine: Engine, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Public report 4: top_k cut what was drawn from and not what was shipped."""

    def uncut(logits: Tensor, lanes: Sequence[Lane], **options: Any) -> DraftDraws:
        whole = [replace(lane, sampling=replace(lane.sampling, top_k=None)) for lane in lanes]
        shipped = draw_drafts(logits, whole, **options)
        return replace(shipped, tokens=draw_drafts(logits, lanes, **options).tokens)

    monkeypatch.setattr(draft_model, "draw_drafts", uncut)
    sampling = replace(WARM, temperature=1.5, rule=REJECTION)
    drawn = draw(engine, load(folders[1], folders[0], REJECTION), sampling, 2000)
    law = law_of(reference, sampling)
    assert min(fit(drawn, law, position).p_value for position in range(1, LENGTH)) < 1e-6


@pytest.mark.parametrize("rule", [COUPLED, REJECTION, BLOCK])
def test_the_targets_own_weights_are_accepted_whole_under_every_rule(
    folders: tuple[Path, Path], engine: Engine, rule: AcceptanceRule
) -> None:
    """Public report 2. The penalties would part the two, did the drafter count otherwise than the target."""
    sampling = SamplingParams(
        temperature=1.0, rule=rule, frequency_penalty=0.4, repetition_penalty=1.3, logit_bias=((7, 1.5),)
    )
    drafter = load(folders[0], folders[0], rule, draft_probs_top_n=VOCAB)
    drawn = draw(engine, drafter, sampling, 200, length=16)
    assert drawn.accepted == drawn.drafted > 200 * 5


@pytest.mark.parametrize("rule", [REJECTION, BLOCK])
def test_shipped_rows_are_the_drafters_distribution_after_every_processor(
    folders: tuple[Path, Path], rule: AcceptanceRule
) -> None:
    """Public report 4, row by row: the penalties of a row count the prompt and the drafts before it."""
    sampling = SamplingParams(
        temperature=0.8,
        top_p=0.9,
        top_k=9,
        min_p=0.02,
        presence_penalty=0.7,
        frequency_penalty=0.3,
        repetition_penalty=1.4,
        logit_bias=((2, 2.0), (11, -100.0)),
        rule=rule,
    )
    target, folder = folders
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    drafter = load(folder, target, rule)
    for seed in range(20):
        output = [seed % VOCAB, 9, 9]
        context = DraftContext(
            str(seed), (*PROMPT, *output), 5, replace(sampling, seed=seed), prompt_len=len(PROMPT)
        )
        (draft,) = drafter.propose([context])
        rows = check(draft.probs, draft.tokens, VOCAB)
        assert rows.rows == len(draft.tokens) == 5
        for row, token in enumerate(draft.tokens):
            with torch.inference_mode():
                logits = model(torch.tensor([[*PROMPT, *output]])).logits[0, -1].numpy()
            shipped = np.zeros(VOCAB)
            np.add.at(shipped, rows.ids[row], rows.probs[row])
            expected = next_token_probs(logits, sampling, prompt=PROMPT, output=output)
            np.testing.assert_allclose(shipped, expected, atol=2e-5)
            output.append(token)


def test_drafts_are_drawn_from_the_bytes_that_are_shipped() -> None:
    """Public report 6: the sample came from other numbers than those that travelled. Four of 24 travel."""
    draws = 20_000
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2)).expand(draws, -1)
    sampling = SamplingParams(temperature=1.3, seed=3, rule=REJECTION)
    drawn = draw_drafts(
        logits,
        [Lane(sampling, position) for position in range(draws)],
        vocab_size=VOCAB,
        rounds=[0] * draws,
        drafting="probabilistic",
        top_n=4,
    )
    assert drawn.ids is not None
    assert drawn.probs is not None
    shipped = check(pack(drawn.ids[:1], drawn.probs[:1]), drawn.tokens[:1].tolist(), VOCAB)
    law = np.zeros(VOCAB)
    law[shipped.ids[0]] = shipped.probs[0]
    assert (law > 0).sum() == 4
    found = goodness_of_fit(np.bincount(drawn.tokens.numpy(), minlength=VOCAB), law)
    assert smallest_tv(draws, found.freedom, level=LEVEL, power=0.9) <= 0.02
    assert found.p_value > LEVEL


def test_a_redrafted_position_is_drawn_anew_and_a_repeated_order_is_not(folders: tuple[Path, Path]) -> None:
    """The second position of a round and the first of the next: other noise, or the text would be biased."""
    drafter = load(folders[1], folders[0], REJECTION)
    same = 0
    for seed in range(200):
        sampling = SamplingParams(seed=seed, rule=REJECTION)
        (first,) = drafter.propose([DraftContext("a", PROMPT, 2, sampling, prompt_len=len(PROMPT))])
        assert drafter.propose([DraftContext("a", PROMPT, 2, sampling, prompt_len=len(PROMPT))]) == [first]
        longer = (*PROMPT, first.tokens[0])
        (again,) = drafter.propose([DraftContext("a", longer, 1, sampling, prompt_len=len(PROMPT))])
        same += first.tokens[1] == again.tokens[0]
    assert 0 < same < 150


class Constant:
    """Guesses one token, a lookup of the simplest kind."""

    needs_device = False

    def __init__(self, token: int) -> None:
        self._token = token

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [guess([self._token], context.sampling) for context in contexts]

    def forget(self, sequence: str) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize("rule", [REJECTION, BLOCK])
def test_a_guess_that_was_no_draw_is_accepted_as_often_as_the_target_would_draw_it(
    engine: Engine, reference: Any, rule: AcceptanceRule
) -> None:
    """Public report 7: deterministic drafts were scored with less than certainty."""
    sampling = replace(WARM, rule=rule)
    likely = max(marginal(law_of(reference, sampling), lambda text: text[1:2]).items(), key=lambda e: e[1])
    drawn = draw(engine, Constant(likely[0][0]), sampling, 3000, length=3)
    share = drawn.accepted / drawn.drafted
    assert abs(share - likely[1]) < 4 * (likely[1] * (1 - likely[1]) / drawn.drafted) ** 0.5
