"""What every request field does to the target's logits, row by row, before a token is drawn.

A verify block has a row for the newest token and one for each draft, and each row sees the tokens before it:
counts for penalties include the drafts that lead to the row, minimum lengths and grammar masks move along. So
a row gets exactly what plain decoding would have given it. A drafter runs its own logits through the same.

Shapes: L rows (all lanes, one after the other), V vocabulary (the tokenizer's; padding is cut off).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class Lane:
    """One sequence's rows in a batch: row i draws the token at `position + i`, after `drafts[:i]`."""

    sampling: SamplingParams
    position: int  # absolute index of the token that the first row draws
    drafts: tuple[int, ...] = ()  # so there are 1 + len(drafts) rows
    prompt: Sequence[int] = ()  # read only where sampling.penalised
    output: Sequence[int] = ()  # generated before the first row; read only where sampling.penalised
    banned: tuple[int, ...] = ()  # tokens that cannot be drawn by the first `banned_rows` rows (min_tokens)
    banned_rows: int = 0
    grammar: Tensor | None = None  # (rows, ceil(V / 32)) int32 bitmask, bit set: allowed

    @property
    def rows(self) -> int:
        return 1 + len(self.drafts)


def process(logits: Tensor, lanes: Sequence[Lane], vocab_size: int) -> Tensor:
    """What is left to draw from: (L, V) float32, -inf where a token cannot be drawn; not yet divided by the
    temperature.

    logits: (L, W) float32 with W >= vocab_size, left as they are. In vLLM's order: grammar, min_tokens,
    logit_bias, penalties, then by the probabilities at the row's temperature min_p, top_k, top_p. Equal
    logits share their fate at every cut, so that no sort order decides.
    """
    raise NotImplementedError
