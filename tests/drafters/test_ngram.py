from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import SpeculativeConfig
from outrider.contracts import DraftContext, TargetInfo
from outrider.errors import ConfigError
from outrider.messages import SamplingParams
from outrider.registry import drafter_factory, needs_device
from outrider_plugins import ngram
from outrider_plugins.ngram import NgramDrafter, SuffixIndex

TARGET = TargetInfo(model="", vocab_size=1000, max_model_len=4096, dtype="float32", device="cpu")


def drafter(*, longest: int = 4, shortest: int = 2) -> NgramDrafter:
    return NgramDrafter(
        SpeculativeConfig(prompt_lookup_max=longest, prompt_lookup_min=shortest), target=TARGET
    )


def propose(plugin: NgramDrafter, tokens: Sequence[int], count: int = 4, sequence: str = "a") -> list[int]:
    (draft,) = plugin.propose([DraftContext(sequence, tokens, count, SamplingParams())])
    return list(draft.tokens)


def by_brute_force(tokens: list[int], count: int, *, longest: int, shortest: int) -> list[int]:
    """The definition: longest suffix first, latest earlier place first, copied token by token."""
    for length in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                copied = list(tokens)
                for offset in range(count):
                    copied.append(copied[start + length + offset])
                return copied[len(tokens) :]
    return []


def test_entry_point_needs_no_device() -> None:
    assert drafter_factory("ngram") is NgramDrafter
    assert not needs_device("ngram")


def test_what_followed_the_suffix_is_proposed() -> None:
    assert propose(drafter(), [1, 2, 3, 4, 5, 6, 9, 1, 2, 3]) == [4, 5, 6, 9]


def test_longer_suffix_beats_more_recent_shorter_one() -> None:
    assert propose(drafter(), [7, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2], count=1) == [50]


def test_most_recent_of_equal_suffixes_wins() -> None:
    assert propose(drafter(), [1, 2, 50, 1, 2, 60, 1, 2], count=1) == [60]


def test_copy_beyond_the_end_goes_on_with_what_it_wrote() -> None:
    assert propose(drafter(), [5, 6, 7, 5, 6, 7, 5, 6], count=7) == [7, 5, 6, 7, 5, 6, 7]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4, 5]])
def test_nothing_seen_before_means_no_drafts(tokens: list[int]) -> None:
    assert propose(drafter(), tokens) == []


def test_none_wanted_means_none_given() -> None:
    assert propose(drafter(), [1, 1, 1, 1], count=0) == []


@given(
    tokens=st.lists(st.integers(0, 3), max_size=40),
    shortest=st.integers(1, 3),
    extra=st.integers(0, 3),
    count=st.integers(1, 9),
)
def test_one_lookup_equals_the_definition(tokens: list[int], shortest: int, extra: int, count: int) -> None:
    plugin = drafter(longest=shortest + extra, shortest=shortest)
    expected = by_brute_force(tokens, count, longest=shortest + extra, shortest=shortest)
    assert propose(plugin, tokens, count) == expected


@given(
    rounds=st.lists(
        st.tuples(st.integers(0, 12), st.lists(st.integers(0, 2), max_size=6)), min_size=1, max_size=8
    )
)
def test_grown_index_equals_the_definition_whatever_happens_to_the_tokens(
    rounds: list[tuple[int, list[int]]],
) -> None:
    """Each round cuts some tokens off, which no committed sequence does, and appends others."""
    plugin = drafter(longest=3, shortest=1)
    tokens: list[int] = []
    for cut, added in rounds:
        tokens = tokens[: max(0, len(tokens) - cut)] + added
        assert propose(plugin, tokens) == by_brute_force(tokens, 4, longest=3, shortest=1)


def test_caller_may_go_on_appending_to_the_list_it_passed() -> None:
    plugin, tokens = drafter(), [1, 2, 3, 9, 9, 1, 2]
    assert propose(plugin, tokens) == [3, 9, 9, 1]
    tokens += [7, 1, 2]
    assert propose(plugin, tokens, count=1) == [7]


def test_index_is_extended_by_new_tokens_only() -> None:
    index = SuffixIndex(1, 1)
    index.advance((1, 2, 3))
    indexed = index._last_end
    index.advance((1, 2, 3, 4))
    assert index._last_end is indexed
    assert indexed == {(1,): 1, (2,): 2, (3,): 3}


def test_forgotten_sequences_leave_nothing() -> None:
    plugin = drafter()
    for number in range(50):
        propose(plugin, list(range(100)), sequence=str(number))
    for number in range(50):
        plugin.forget(str(number))
    plugin.forget("never seen")
    assert not plugin._indexes
    assert plugin._entries == 0


def test_sequences_nobody_closes_are_bounded_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MAX_ENTRIES", 1000)
    plugin = drafter()
    tokens = [*range(100), 0, 1]
    for number in range(50):
        assert propose(plugin, tokens, sequence=str(number)) == [2, 3, 4, 5]
    assert plugin._entries <= 1000
    assert "0" not in plugin._indexes
    assert propose(plugin, tokens, sequence="0") == [2, 3, 4, 5]


def test_extra_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"speculative_config\.extra.*'?min_match"):
        NgramDrafter(SpeculativeConfig(extra={"min_match": 2}), TARGET)
