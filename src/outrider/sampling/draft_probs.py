"""The distributions that drafts were drawn from, as bytes, and what is left of them once they are checked.

A bad row ends the draft where it stands: the position is then decoded plainly from a draw of its own. That
keeps both ratio rules lossless, because whether row i is bad follows from the drafts before it: the number of
drafts is a stopping time, and block's h_K = w_K is that of the last one that stays. Dropping the whole draft
for a bad row at its end would not: it would throw away the first drafts depending on what was drawn after
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from outrider.contracts import Draft
from outrider.messages import DraftProbs, SamplingParams

SUM_TOLERANCE = 1e-3


def pack(ids: Tensor, probs: Tensor) -> DraftProbs:
    """ids: (K, N) integers; probs: (K, N) float32, rows summing to 1."""
    return DraftProbs(
        width=ids.shape[1],
        token_ids=ids.cpu().numpy().astype("<i4").tobytes(),
        probs=probs.cpu().numpy().astype("<f4").tobytes(),
    )


def certain(tokens: Sequence[int]) -> DraftProbs:
    """For a guess that was no draw: all probability on the token itself."""
    return DraftProbs(
        width=1,
        token_ids=np.asarray(tokens, dtype="<i4").tobytes(),
        probs=np.ones(len(tokens), dtype="<f4").tobytes(),
    )


def guess(tokens: Sequence[int], sampling: SamplingParams) -> Draft:
    """The draft of a drafter that draws nothing: lookups, predictions, scripts."""
    return Draft(tuple(tokens), certain(tokens) if sampling.needs_draft_probs else None)


@dataclass(frozen=True, slots=True)
class CheckedProbs:
    """The good leading rows of a draft's distributions, as the rules read them."""

    ids: npt.NDArray[np.int64]  # (rows, N); 0 where the probability is 0
    probs: npt.NDArray[np.float32]  # (rows, N), renormalised: who draws from numbers draws from their shares

    @property
    def rows(self) -> int:
        return len(self.ids)


def check(given: DraftProbs | None, drafts: Sequence[int], vocab_size: int) -> CheckedProbs:
    """The rows up to the first bad one. `drafts` are token ids of the vocabulary.

    Bad is a row that is missing, has numbers that are not finite or below 0, does not sum to 1, lists a token
    twice or beyond the vocabulary with a probability, or gives its own draft none.
    """
    width = 0 if given is None else given.width
    if given is None or not 0 < width <= vocab_size:
        return CheckedProbs(np.zeros((0, 1), np.int64), np.zeros((0, 1), np.float32))
    row_bytes = 4 * width
    rows = min(len(drafts), len(given.token_ids) // row_bytes, len(given.probs) // row_bytes)
    ids = np.frombuffer(given.token_ids[: rows * row_bytes], "<i4").reshape(rows, width).astype(np.int64)
    probs = np.frombuffer(given.probs[: rows * row_bytes], "<f4").reshape(rows, width).astype(np.float32)
    listed = probs > 0
    with np.errstate(invalid="ignore", over="ignore"):
        total = probs.sum(axis=1, dtype=np.float64)
        whole = np.abs(total - 1) <= SUM_TOLERANCE
    good = np.isfinite(probs).all(axis=1) & (probs >= 0).all(axis=1) & whole
    good &= ((ids >= 0) & (ids < vocab_size) | ~listed).all(axis=1)
    # Tokens without a probability get ids of their own, so that only real ones can be twice in a row.
    distinct = np.sort(np.where(listed, ids, -1 - np.arange(width)), axis=1)
    good &= (np.diff(distinct, axis=1) != 0).all(axis=1)
    own = np.asarray(drafts[:rows], dtype=np.int64).reshape(rows, 1)
    good &= ((ids == own) & listed).any(axis=1)
    kept = rows if good.all() else int(good.argmin())
    shares = (probs[:kept] / total[:kept, np.newaxis]).astype(np.float32)
    return CheckedProbs(np.where(listed, ids, 0)[:kept], shares)
