"""Linear layers with weights laid out for oneDNN, for bfloat16 on a CPU.

A decoding step reads every weight once and computes little, so its time is the time to read the weights.
oneDNN reads a plain weight in an order that suits neither the memory nor the matrix unit and reorders it in
every call; a weight packed once needs neither. Measured on one thread, SmolLM2-135M: all linears of a step
take 40 ms plain and 28 ms packed, against 27 ms to read the weights; results are bitwise equal.

float32 gains nothing and is left alone, so that it stays the reference.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

PACKED_ROWS = 8
"""The row count that weights are packed for. One packing serves all row counts that decoding and verifying
use: measured for 1 to 64 rows, 8 was never more than a few percent off the best, 16 was slow at 1 row."""

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one parent module that read the same input, by the names that most families use."""


class PackedLinear(nn.Module):
    """A linear layer whose packed weight is opaque to torch: (..., in) to (..., out), any number of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.in_features = weight.shape[1]
        self.out_features = weight.shape[0]
        # Plain attributes: a packed tensor can be neither moved nor saved, so it is no parameter.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), PACKED_ROWS)
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:  # a step whose rows all are prompt rows asks for the logits of no row
            return x.new_empty((*x.shape[:-1], self.out_features))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out


class FusedLinears:
    """Several linear layers over the same input as one product.

    Each layer becomes a `FusedPart`. The first that is called computes them all; the others recognise the
    input by identity and take their share. A part that is called with something else is computed anew, so a
    family that feeds its layers differently is slower, never wrong.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self._packed = PackedLinear(
            torch.cat([linear.weight.detach() for linear in linears]), torch.cat(biases) if biases else None
        )
        self._sizes = [linear.out_features for linear in linears]
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def part(self, x: Tensor, index: int) -> Tensor:
        if x is not self._input:
            self._input, self._outputs = x, self._packed(x).split(self._sizes, dim=-1)
        out = self._outputs[index]
        if index == len(self._sizes) - 1:
            self._input, self._outputs = None, ()
        return out


class FusedPart(nn.Module):
    """One layer of a `FusedLinears`."""

    def __init__(self, fused: FusedLinears, index: int) -> None:
        super().__init__()
        self._fused = fused
        self._index = index

    def forward(self, x: Tensor) -> Tensor:
        return self._fused.part(x, self._index)


def pack_linears(model: nn.Module, *, fuse: bool = True) -> int:
    """Replace the model's linear layers by packed ones and return how many; 0 where this CPU cannot.

    `fuse`: layers that read the same input become one product.

    A weight that is tied to the embedding is packed as a copy, the embedding stays. All other originals are
    freed one by one, so the peak is one layer above the model's size.
    """
    if not can_pack():
        return 0
    count = 0
    # Only parents: a list that held the layers themselves would keep all originals alive.
    for parent in [module for module in model.modules() if any(True for _ in module.children())]:
        for names in SIBLINGS if fuse else ():
            linears = [child for name in names if isinstance(child := getattr(parent, name, None), nn.Linear)]
            if len(linears) == len(names) and _fusible(linears):
                fused = FusedLinears(linears)
                for index, name in enumerate(names):
                    setattr(parent, name, FusedPart(fused, index))
                count += len(names)
        for name, weight, bias in _plain_linears(parent):
            setattr(parent, name, PackedLinear(weight, bias))
            count += 1
    return count


def _fusible(linears: Sequence[nn.Linear]) -> bool:
    first = linears[0]
    return all(
        type(linear) is nn.Linear
        and linear.weight.dtype == torch.bfloat16
        and linear.in_features == first.in_features
        and (linear.bias is None) == (first.bias is None)
        for linear in linears
    )


def _plain_linears(parent: nn.Module) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Name, weight (out, in) and bias of the children that are linear layers and nothing more."""
    from transformers.pytorch_utils import Conv1D

    children: list[tuple[str, Any]] = list(parent.named_children())
    for name, child in children:
        # Subclasses may do more than a product, so the exact type counts.
        if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16:
            yield name, child.weight, child.bias
        elif type(child) is Conv1D and child.weight.dtype == torch.bfloat16:
            yield name, child.weight.t(), child.bias  # stored as (in, out), as GPT-2 has it


@functools.cache
def can_pack() -> bool:
    """Whether this torch build and CPU have the packed bfloat16 product; says so once where they do not."""
    try:
        supported = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        if supported:
            with torch.inference_mode():
                PackedLinear(torch.zeros(16, 16, dtype=torch.bfloat16), None)(
                    torch.zeros(1, 16, dtype=torch.bfloat16)
                )
    except (AttributeError, RuntimeError) as error:  # the ops are private: absent or changed in other builds
        logger.info("packed linear layers are not available: %s", error)
        return False
    if not supported:
        logger.info(
            "packed linear layers are not available: this CPU has no bfloat16 instructions for oneDNN"
        )
    return supported
