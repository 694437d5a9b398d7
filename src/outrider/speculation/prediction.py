"""Drafts out of the client's own guess at the answer (OpenAI's Predicted Outputs).

Where the output follows the prediction, what stands there is drafted; where it leaves it, the place is looked
for anew by the newest tokens. Which drafts come depends on the committed tokens alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

LONGEST_MATCH = 8
"""Newest tokens that are compared to choose between several places."""

PLACES_COMPARED = 64
"""Of the places where the two newest tokens stand, so many around where the output stood last."""


class Prediction:
    """Follows one output through the predicted tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tuple(tokens)
        self._seen = 0  # output tokens looked at
        self._at: int | None = 0  # where the output stands in the prediction; None: not found
        self._nearest = 0  # where it stood last
        self._after: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for index in range(1, len(self._tokens)):
            self._after[self._tokens[index - 1], self._tokens[index]].append(index + 1)

    def continuation(self, output: Sequence[int], count: int) -> tuple[int, ...]:
        """At most `count` tokens that would follow `output`, which only grows from call to call."""
        new = tuple(output[self._seen :])
        self._seen = len(output)
        if self._at is not None and self._tokens[self._at : self._at + len(new)] == new:
            self._at += len(new)
        else:
            self._at = self._find(output)
        if self._at is None:
            return ()
        self._nearest = self._at
        return self._tokens[self._at : self._at + count]

    def _find(self, output: Sequence[int]) -> int | None:
        """The place with the longest match, of those the next one from where the output stood last."""
        if len(output) < 2:
            return None
        places = self._after.get((output[-2], output[-1]), [])
        nearest = bisect_left(places, self._nearest)
        begin = max(0, nearest - PLACES_COMPARED // 2)
        return max(
            places[begin : begin + PLACES_COMPARED],
            key=lambda at: (self._match(output, at), at >= self._nearest, -at),
            default=None,
        )

    def _match(self, output: Sequence[int], at: int) -> int:
        """How many of the newest tokens stand right before `at`."""
        longest = min(LONGEST_MATCH, len(output), at)
        return next((n for n in range(longest) if self._tokens[at - 1 - n] != output[-1 - n]), longest)
