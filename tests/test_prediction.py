"""Where an output stands in the client's prediction, and what that is worth in a real service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import outrider
import outrider.messages
from outrider.errors import RequestError
from outrider.speculation.prediction import LONGEST_MATCH, PLACES_COMPARED, Prediction

GUESS = (1, 2, 3, 4, 5, 6, 7, 8)


def test_the_head_is_drafted_first_and_what_follows_after_it() -> None:
    prediction = Prediction(GUESS)
    assert prediction.continuation([], 3) == (1, 2, 3)
    assert prediction.continuation([1, 2, 3, 4], 3) == (5, 6, 7)
    assert prediction.continuation([1, 2, 3, 4, 5, 6, 7], 3) == (8,)
    assert prediction.continuation([*GUESS], 3) == ()


def test_a_departure_is_silent_until_two_tokens_are_found_again() -> None:
    prediction = Prediction(GUESS)
    assert prediction.continuation([1, 2], 2) == (3, 4)
    assert prediction.continuation([1, 2, 90], 2) == ()
    assert prediction.continuation([1, 2, 90, 5], 2) == ()
    assert prediction.continuation([1, 2, 90, 5, 6], 2) == (7, 8)


def test_of_equal_places_the_next_one_from_here_is_taken() -> None:
    prediction = Prediction((5, 6, 1, 9, 9, 5, 6, 2, 9, 9, 5, 6, 3))
    assert prediction.continuation([5, 6, 1], 1) == (9,)
    assert prediction.continuation([5, 6, 1, 70, 5, 6], 1) == (2,)


def test_the_longest_match_beats_the_nearest_place() -> None:
    prediction = Prediction((1, 2, 3, 50, 0, 0, 8, 2, 3, 60))
    assert prediction.continuation([9, 8, 2, 3], 1) == (60,)


@given(st.lists(st.integers(0, 4), max_size=30), st.lists(st.integers(0, 4), max_size=30), st.integers(1, 5))
def test_drafts_are_always_a_piece_of_the_prediction(guess: list[int], output: list[int], count: int) -> None:
    prediction = Prediction(guess)
    for length in range(len(output) + 1):
        drafts = list(prediction.continuation(output[:length], count))
        assert len(drafts) <= count
        assert not drafts or any(
            guess[i : i + len(drafts)] == drafts for i in range(len(guess) - len(drafts) + 1)
        )


@pytest.fixture(scope="module")
def config(tiny_llama: Path) -> dict[str, Any]:
    strict = {"numerics": "strict", "planner": {"gate_ms": 10_000}}
    return {"model": str(tiny_llama), "dtype": "float32", "num_kv_blocks": 64} | strict


PROMPT = [7, 8, 9, 10, 11]


@pytest.mark.parametrize("method", [None, "anti", "ngram"])
@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_a_right_prediction_saves_steps_and_a_wrong_one_changes_no_token(
    config: dict[str, Any], method: str | None, rule: str
) -> None:
    """Greedy and coupled texts are the plain ones; only drafts out of the prediction are counted as such."""
    spec = {"method": method, "num_speculative_tokens": 4, "rejection_sample_method": rule}
    speculative = {"speculative_config": spec} if method else {}
    with outrider.local(config) as service:
        plain = service.generate(PROMPT, max_tokens=30, temperature=0)
    with outrider.local(config | speculative) as service:
        right = service.generate(PROMPT, max_tokens=30, temperature=0, prediction=plain.tokens)
        wrong = service.generate(PROMPT, max_tokens=30, temperature=0, prediction=[3] * 40)
        none = service.generate(PROMPT, max_tokens=30, temperature=0)
    assert right.tokens == wrong.tokens == none.tokens == plain.tokens
    assert right.stats.accepted_prediction_tokens > 20
    assert right.stats.rejected_prediction_tokens == 0
    assert right.stats.steps < 12
    assert wrong.stats.accepted_prediction_tokens == none.stats.accepted_prediction_tokens == 0
    assert none.stats.rejected_prediction_tokens == 0


def test_a_sampled_text_is_the_seed_s_own_with_any_prediction(config: dict[str, Any]) -> None:
    with outrider.local(config) as service:
        plain = service.generate(PROMPT, max_tokens=30, seed=5)
        half = [*plain.tokens[:10], 1, 1, 1, *plain.tokens[10:]]
        predicted = service.generate(PROMPT, max_tokens=30, seed=5, prediction=half)
    assert predicted.tokens == plain.tokens
    assert predicted.stats.accepted_prediction_tokens > 15


def test_a_stop_string_takes_back_what_was_accepted_behind_it(config: dict[str, Any]) -> None:
    """Public reports 16 and 18: text, ids, usage and the prediction's count end at the stop."""
    with outrider.local(config) as service:
        plain = service.generate(PROMPT, max_tokens=30, temperature=0)
        at = next(i for i in range(6, 30) if service.tokenizer.decode(plain.tokens[i : i + 1]).strip())
        stop = service.tokenizer.decode(plain.tokens[at : at + 1]).strip()
        unpredicted = service.generate(PROMPT, max_tokens=30, temperature=0, stop=stop, logprobs=0)
        predicted = service.generate(
            PROMPT, max_tokens=30, temperature=0, stop=stop, logprobs=0, prediction=plain.tokens
        )
    assert (predicted.text, predicted.tokens, predicted.finish) == (
        unpredicted.text,
        unpredicted.tokens,
        unpredicted.finish,
    )
    assert predicted.logprobs == unpredicted.logprobs
    assert len(predicted.logprobs) == len(predicted.tokens) == predicted.stats.completion_tokens
    assert predicted.stats.accepted_prediction_tokens <= sum(predicted.drafted)


def test_min_tokens_puts_stop_strings_and_ends_off(config: dict[str, Any]) -> None:
    with outrider.local(config) as service:
        plain = service.generate(PROMPT, max_tokens=20, temperature=0)
        first = service.tokenizer.decode(plain.tokens[:2]).strip()[:1]
        early = service.generate(PROMPT, max_tokens=20, temperature=0, stop=first)
        late = service.generate(PROMPT, max_tokens=20, temperature=0, stop=first, min_tokens=10)
    assert len(early.tokens) < 3
    assert len(late.tokens) >= 10


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prediction": "x", "speculative": False}, "prediction"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"grammar": outrider.messages.Grammar("regex", "a+"), "stop": "b"}, "stop"),
        ({"grammar": outrider.messages.Grammar("regex", "a+"), "ignore_eos": True}, "ignore_eos"),
        ({"grammar": outrider.messages.Grammar("regex", "a+"), "min_tokens": 2}, "min_tokens"),
        ({"grammar": outrider.messages.Grammar("regex", "a+"), "stop_token_ids": [3]}, "stop_token_ids"),
    ],
)
def test_contradictions_name_the_field(config: dict[str, Any], options: dict[str, Any], param: str) -> None:
    with outrider.local(config) as service, pytest.raises(RequestError) as refused:
        service.generate(PROMPT, **({"max_tokens": 20} | options))
    assert refused.value.param == param


def test_choices_of_one_seed_differ_and_greedy_ones_do_not_public_report_45(config: dict[str, Any]) -> None:
    with outrider.local(config) as service:
        sampled = [service.generate(PROMPT, max_tokens=12, seed=3, choice=i).tokens for i in range(3)]
        again = service.generate(PROMPT, max_tokens=12, seed=3, choice=1).tokens
        greedy = {service.generate(PROMPT, max_tokens=12, temperature=0, choice=i).tokens for i in range(3)}
    assert len(set(sampled)) == 3
    assert again == sampled[1]
    assert len(greedy) == 1


@pytest.mark.parametrize("wanted", [[7] * 5000, [7, 8] * 2500])
def test_a_prediction_of_one_phrase_costs_a_bounded_look_each_time(wanted: list[int]) -> None:
    """A million comparisons a token would hold up the router's other streams."""

    class Counting(list[int]):
        looks = 0

        def __getitem__(self, index: Any) -> Any:
            Counting.looks += 1
            return super().__getitem__(index)

    prediction = Prediction(wanted)
    output = Counting([9, *wanted[:12]])
    assert prediction.continuation(output, 4) == tuple(wanted[:4])
    assert Counting.looks < 2 * PLACES_COMPARED * LONGEST_MATCH
