"""The acceptance rule against its definition, one sequence at a time."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.sampling.acceptance import count_accepted

TOKENS = st.integers(0, 2)


@given(
    st.lists(st.tuples(st.lists(TOKENS, max_size=5), st.lists(TOKENS, min_size=6, max_size=6)), min_size=1)
)
def test_accepted_is_the_length_of_the_equal_prefix(rows: list[tuple[list[int], list[int]]]) -> None:
    width = max(len(drafts) for drafts, _ in rows)
    drafts = torch.tensor([drafts + [0] * (width - len(drafts)) for drafts, _ in rows], dtype=torch.int64)
    targets = torch.tensor([target[: width + 1] for _, target in rows])
    counts = torch.tensor([len(drafts) for drafts, _ in rows])
    expected = []
    for draft, target in rows:
        equal = 0
        while equal < len(draft) and draft[equal] == target[equal]:
            equal += 1
        expected.append(equal)
    assert count_accepted(targets, drafts.view(len(rows), width), counts).tolist() == expected
