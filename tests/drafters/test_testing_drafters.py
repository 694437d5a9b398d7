from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from outrider.config import SpeculativeConfig
from outrider.contracts import DraftContext, Drafter, TargetInfo
from outrider.errors import ConfigError
from outrider.messages import SamplingParams
from outrider.registry import drafter_factory, needs_device

TARGET = TargetInfo(model="", vocab_size=20, max_model_len=64, dtype="float32", device="cpu")
PROMPT = (1, 2, 3)
TRUTH = (10, 11, 12, 13, 14, 15)


def make(method: str, **extra: Any) -> Drafter:
    return drafter_factory(method)(SpeculativeConfig(method=method, extra=extra), TARGET)


def propose(plugin: Drafter, tokens: Sequence[int], count: int = 4, sequence: str = "a") -> list[int]:
    (draft,) = plugin.propose([DraftContext(sequence, tokens, count, SamplingParams())])
    return list(draft.tokens)


@pytest.mark.parametrize("method", ["oracle", "anti", "scripted"])
def test_fakes_run_in_the_router(method: str) -> None:
    assert not needs_device(method)


@pytest.mark.parametrize("continuations", [[[list(PROMPT), list(TRUTH)]], {PROMPT: TRUTH}])
@pytest.mark.parametrize("committed", range(len(TRUTH) + 1))
def test_oracle_goes_on_from_any_committed_prefix(continuations: Any, committed: int) -> None:
    oracle = make("oracle", continuations=continuations)
    tokens = [*PROMPT, *TRUTH[:committed]]
    assert propose(oracle, tokens) == list(TRUTH[committed : committed + 4])


@pytest.mark.parametrize("tokens", [[1, 2], [9, 9, 9], [*PROMPT, 11], [*PROMPT, *TRUTH, 3]])
def test_oracle_is_silent_off_the_known_text(tokens: list[int]) -> None:
    assert propose(make("oracle", continuations={PROMPT: TRUTH}), tokens) == []


def test_longest_known_prompt_that_fits_speaks() -> None:
    oracle = make("oracle", continuations={(1,): (2, 5), (1, 2): (6, 7)})
    assert propose(oracle, [1, 2]) == [6, 7]
    assert propose(oracle, [1]) == [2, 5]
    assert propose(oracle, [1, 2, 5]) == []


def test_anti_is_wrong_first_and_right_after() -> None:
    drafts = propose(make("anti", continuations={PROMPT: TRUTH}), PROMPT)
    assert drafts[0] != TRUTH[0]
    assert drafts[1:] == list(TRUTH[1:4])


def test_anti_without_truth_counts_on_inside_the_vocabulary() -> None:
    assert propose(make("anti"), [1, 18]) == [19, 0, 1, 2]


def test_anti_out_of_range_sends_no_valid_id() -> None:
    drafts = propose(make("anti", continuations={PROMPT: TRUTH}, out_of_range=True), PROMPT, count=6)
    assert len(drafts) == 6
    assert all(not 0 <= token < TARGET.vocab_size for token in drafts)
    assert min(drafts) < 0
    assert max(drafts) >= TARGET.vocab_size


def test_scripted_accepts_as_many_as_its_script_says_and_starts_over() -> None:
    scripted = make("scripted", continuations={PROMPT: tuple(range(4, 20))}, accept=[2, 0, 3])
    tokens = list(PROMPT)
    accepted = []
    for _ in range(4):
        truth = list(range(4, 20))[len(tokens) - len(PROMPT) :][:4]
        drafts = propose(scripted, tokens)
        right = [drafted == true for drafted, true in zip(drafts, truth, strict=True)]
        accepted.append(right.index(False))
        assert right.count(False) == 1, "the tokens after the wrong one are right"
        tokens += truth[: accepted[-1] + 1]
    assert accepted == [2, 0, 3, 2]


def test_scripted_repeats_its_answer_for_a_repeated_order() -> None:
    scripted = make("scripted", continuations={PROMPT: TRUTH}, accept=[0, 4])
    assert propose(scripted, PROMPT) == propose(scripted, PROMPT) != list(TRUTH[:4])
    assert propose(scripted, [*PROMPT, TRUTH[0]]) == list(TRUTH[1:5])


def test_scripts_are_kept_apart_and_forgotten() -> None:
    scripted = make("scripted", continuations={PROMPT: TRUTH}, accept=[0, 4])
    first = propose(scripted, PROMPT)
    propose(scripted, [*PROMPT, TRUTH[0]])
    assert propose(scripted, PROMPT, sequence="b") == first
    scripted.forget("a")
    assert propose(scripted, PROMPT) == first


@pytest.mark.parametrize(
    ("method", "extra", "named"),
    [
        ("oracle", {}, "continuations"),
        ("oracle", {"continuations": []}, "continuations"),
        ("oracle", {"continuations": 7}, "continuations"),
        ("oracle", {"continuations": [[[1], [2], [3]]]}, r"continuations\.0"),
        ("oracle", {"continuations": [[[1], "ab"]]}, r"continuations\.0"),
        ("oracle", {"continuations": [[[1], [2]], [[1], [20]]]}, r"continuations\.1.*0 to 19.*got 20"),
        ("oracle", {"continuations": [[[1], [-1]]]}, r"continuations\.0"),
        ("oracle", {"continuations": [[[1], [2]]], "acept": [1]}, "acept"),
        ("anti", {"out_of_range": "yes"}, "out_of_range"),
        ("scripted", {"continuations": [[[1], [2]]]}, "accept"),
        ("scripted", {"continuations": [[[1], [2]]], "accept": []}, "accept"),
        ("scripted", {"continuations": [[[1], [2]]], "accept": [1, -2]}, "accept"),
        ("scripted", {"accept": [1]}, "continuations"),
    ],
)
def test_bad_configuration_is_refused_by_key(method: str, extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"speculative_config\.extra.*{named}"):
        make(method, **extra)
