"""The rules against decisions and laws that were computed from the papers' formulas, and against brute
force."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.messages import AcceptanceRule
from outrider.sampling.acceptance import Drafts, Judgement, count_accepted, judge

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "lossless"
RATIO_RULES = [AcceptanceRule.REJECTION, AcceptanceRule.BLOCK]


def golden(name: str) -> Any:
    path = GOLDEN / name
    if not path.exists():
        pytest.skip(f"{path.name} of the golden vectors is not beside this checkout")
    return json.loads(path.read_text())


def dense(draft_probs: Tensor, tokens: Tensor, count: Tensor) -> Drafts:
    """Drafts whose distributions list the whole vocabulary; draft_probs: (S, K, V)."""
    ids = torch.arange(draft_probs.shape[2]).expand(draft_probs.shape)
    return Drafts(tokens, count, ids, draft_probs)


def judged(rule: AcceptanceRule, case: dict[str, Any], dtype: torch.dtype) -> Judgement:
    drafts = dense(
        torch.tensor([case["q"]], dtype=dtype), torch.tensor([case["draft_ids"]]), torch.tensor([case["K"]])
    )
    return judge(rule, torch.tensor([case["p"]], dtype=dtype), drafts, torch.tensor([case["u"]], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_golden_ratio_vectors_are_decided_the_same(rule: AcceptanceRule, dtype: torch.dtype) -> None:
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    for case in golden("vectors.json")["ratio_vectors"]:
        judgement = judged(rule, case, dtype)
        assert judgement.accepted.item() == case[rule]["accepted"], case["name"]
        wanted = torch.tensor(case[rule]["next_dist"], dtype=dtype)
        assert (judgement.extra_probs[0] - wanted).abs().max() < tolerance, case["name"]


def test_golden_vectors_in_one_padded_batch_are_decided_as_alone() -> None:
    cases = [case for case in golden("vectors.json")["ratio_vectors"] if case["V"] == 5]
    width = max(case["K"] for case in cases) + 2
    target = torch.zeros(len(cases), width + 1, 5)
    probs = torch.zeros(len(cases), width, 5)
    tokens = torch.zeros(len(cases), width, dtype=torch.int64)
    uniforms = torch.zeros(len(cases), width)  # padding would always be accepted, were it looked at
    for i, case in enumerate(cases):
        k = case["K"]
        target[i, : k + 1], probs[i, :k] = torch.tensor(case["p"]), torch.tensor(case["q"])
        tokens[i, :k], uniforms[i, :k] = torch.tensor(case["draft_ids"]), torch.tensor(case["u"])
    count = torch.tensor([case["K"] for case in cases])
    assert len(cases) > 3
    for rule in RATIO_RULES:
        together = judge(rule, target, dense(probs, tokens, count), uniforms)
        assert together.accepted.tolist() == [case[rule]["accepted"] for case in cases]
        for i, case in enumerate(cases):
            wanted = torch.tensor(case[rule]["next_dist"])
            assert (together.extra_probs[i] - wanted).abs().max() < 1e-6, case["name"]


def test_golden_gumbel_vectors_are_accepted_the_same() -> None:
    for case in golden("vectors.json")["gumbel_vectors"]:
        noise = torch.tensor(case["gumbel"], dtype=torch.float64)
        targets = (torch.tensor(case["p"], dtype=torch.float64).log() + noise).argmax(dim=1)
        kept = count_accepted(targets[None], torch.tensor([case["draft_ids"]]), torch.tensor([case["K"]]))
        assert kept.item() == case["accepted"], case["name"]
        assert targets[: case["accepted"] + 1].tolist() == case["emitted"], case["name"]


ROUNDS = 200_000


def simulated(case: dict[str, Any], rule: AcceptanceRule, seed: int) -> tuple[Tensor, Judgement, Tensor]:
    """Many rounds of a golden chain: the drafts, what was made of them, and the extra tokens."""
    generator = torch.Generator().manual_seed(seed)
    target, step = torch.tensor(case["p0"]), torch.tensor(case["P"])
    first, guess = torch.tensor(case["q0"]), torch.tensor(case["Q"])
    drafted, target_rows, draft_rows = [], [target.expand(ROUNDS, -1)], []
    row = first.expand(ROUNDS, -1)
    for _ in range(case["K"]):
        token = row.multinomial(1, generator=generator).squeeze(1)
        drafted.append(token)
        draft_rows.append(row)
        target_rows.append(step[token])
        row = guess[token]
    tokens = torch.stack(drafted, dim=1)
    uniforms = torch.rand(ROUNDS, case["K"], generator=generator, dtype=torch.float64)
    drafts = dense(torch.stack(draft_rows, dim=1), tokens, torch.full((ROUNDS,), case["K"]))
    judgement = judge(rule, torch.stack(target_rows, dim=1), drafts, uniforms)
    extra = judgement.extra_probs.multinomial(1, generator=generator).squeeze(1)
    return tokens, judgement, extra


def chi_square(seen: Tensor, wanted: Tensor) -> tuple[float, float]:
    """The statistic, and a bound that true laws exceed once in about 10,000 runs (Wilson-Hilferty)."""
    expected = wanted.flatten() * seen.sum()
    cells = expected > 5
    assert seen.flatten()[wanted.flatten() == 0].sum() == 0
    freedom = int(cells.sum()) - 1
    statistic = ((seen.flatten()[cells] - expected[cells]) ** 2 / expected[cells]).sum().item()
    if freedom == 0:
        return statistic, 1e-6
    return statistic, freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_golden_chains_have_the_exact_law_of_kept_length_and_extra_token(rule: AcceptanceRule) -> None:
    for number, case in enumerate(golden("chains.json")["cases"]):
        _, judgement, extra = simulated(case, rule, seed=number)
        law = torch.tensor(case["rules"][rule]["tau_next_joint"], dtype=torch.float64)
        flat = judgement.accepted * case["V"] + extra
        seen = torch.bincount(flat, minlength=law.numel()).double().view(law.shape)
        statistic, bound = chi_square(seen, law)
        assert statistic < bound, case["name"]


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_golden_chains_emit_the_target_s_own_first_token(rule: AcceptanceRule) -> None:
    for number, case in enumerate(golden("chains.json")["cases"]):
        tokens, judgement, extra = simulated(case, rule, seed=100 + number)
        first = torch.where(judgement.accepted > 0, tokens[:, 0], extra)
        seen = torch.bincount(first, minlength=case["V"]).double()
        statistic, bound = chi_square(seen, torch.tensor(case["target_marginals"][0], dtype=torch.float64))
        assert statistic < bound, case["name"]


def test_the_statistic_sees_the_known_biased_laws() -> None:
    """Negative controls: a residual that is drawn with the draft's own noise under the ratio test."""
    generator = torch.Generator().manual_seed(5)
    for control in golden("chains.json")["negative_controls"]:
        biased = torch.tensor(control["biased"], dtype=torch.float64)
        draws = int(40 / control["tv_to_target"] ** 2)
        seen = torch.zeros(len(biased), dtype=torch.float64)
        for begin in range(0, draws, 1_000_000):
            size = min(1_000_000, draws - begin)
            tokens = biased.multinomial(size, replacement=True, generator=generator)
            seen += torch.bincount(tokens, minlength=len(biased))
        statistic, bound = chi_square(seen, torch.tensor(control["p"], dtype=torch.float64))
        assert statistic > bound


def test_a_draft_without_target_probability_is_never_kept() -> None:
    target = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    drafts = dense(torch.tensor([[[0.9, 0.1]]]), torch.tensor([[0]]), torch.tensor([1]))
    for rule in RATIO_RULES:
        judgement = judge(rule, target, drafts, torch.zeros(1, 1))
        assert judgement.accepted.item() == 0
        assert judgement.extra_probs.tolist() == [[0.0, 1.0]]


def test_equal_distributions_accept_everything() -> None:
    probs = torch.rand(50, 5, 9).softmax(-1)
    tokens = probs[:, :4].argmax(-1)
    drafts = dense(probs[:, :4].contiguous(), tokens, torch.full((50,), 4))
    for rule in RATIO_RULES:
        judgement = judge(rule, probs, drafts, torch.full((50, 4), 1 - 1e-6))
        assert judgement.accepted.tolist() == [4] * 50
        assert torch.equal(judgement.extra_probs, probs[:, 4])


def test_without_drafts_the_target_s_own_distribution_is_left() -> None:
    target = torch.rand(3, 1, 6).softmax(-1)
    none = Drafts(
        torch.zeros(3, 0, dtype=torch.int64),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(3, 0, 1, dtype=torch.int64),
        torch.zeros(3, 0, 1),
    )
    for rule in RATIO_RULES:
        judgement = judge(rule, target, none, torch.zeros(3, 0))
        assert judgement.accepted.tolist() == [0, 0, 0]
        assert torch.equal(judgement.extra_probs, target[:, 0])


@pytest.mark.parametrize(
    ("targets", "drafts", "count", "accepted"),
    [
        ([1, 2, 3, 4], [1, 2, 3], 3, 3),
        ([1, 2, 3, 4], [1, 9, 3], 3, 1),
        ([1, 2, 3, 4], [9, 2, 3], 3, 0),
        ([1, 2, 3, 4], [1, 2, 3], 2, 2),
        ([1, 2, 3, 4], [1, 2, 3], 0, 0),
    ],
)
def test_equality_counts_the_leading_drafts_that_are_real(
    targets: list[int], drafts: list[int], count: int, accepted: int
) -> None:
    kept = count_accepted(torch.tensor([targets]), torch.tensor([drafts]), torch.tensor([count]))
    assert kept.tolist() == [accepted]
