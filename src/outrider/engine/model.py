"""What the engine asks of a model: logits for a ragged batch over a paged KV cache.

Two implementations: `transformers_model.TransformersModel` (any supported family, any device) and
`native_model.NativeModel` (Llama-shaped families in bf16 or fp32 on a CPU, fused C kernels).

Shapes: R rows (tokens of this step, all sequences one after the other), L logit rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

Numerics: TypeAlias = Literal["strict", "fast"]
"""strict: a row's logits are bitwise the same in any company."""


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's rows in the batch."""

    start: int  # first row
    rows: int  # rows of this sequence in this step
    length: int  # tokens in its KV cache once this step has run (its rows included)
    blocks: tuple[int, ...]  # block ids covering `length` tokens, in order


@dataclass(frozen=True, slots=True)
class Batch:
    """One step as flat rows. Row i of a span is at position `length - rows + i` and sees up to itself."""

    tokens: Tensor  # (R,) int64, on the CPU
    positions: Tensor  # (R,) int64, on the CPU
    spans: tuple[Span, ...]
    logit_rows: Tensor  # (L,) int64, on the CPU: the rows whose next-token logits are wanted


class CausalModel(Protocol):
    """A causal language model with a paged KV cache of its own. Rolling back is writing over: no call."""

    numerics: Numerics
    vocab_size: int  # V, the width of the logits; ids >= the tokenizer's size are padding
    max_model_len: int  # positions the model can take
    block_size: int
    device: torch.device
    dtype: torch.dtype

    def bytes_per_block(self) -> int:
        """KV bytes of one block over all layers."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Make room for `num_blocks` blocks. Called once, before the first forward."""
        ...

    def forward(self, batch: Batch) -> Tensor:
        """Write the rows' keys and values into their blocks; return logits (L, V), float32, on `device`."""
        ...
