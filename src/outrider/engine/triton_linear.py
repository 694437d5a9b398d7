"""Linear layers for strict numerics on CUDA: one Triton kernel with fixed tiles.

cuBLAS picks a kernel, and perhaps a split of the inner dimension, by the number of rows. Here every program
computes a tile of 16 rows by 64 outputs and walks the inner dimension in steps of 64 from 0 to its end,
summing in float32: what a row gets depends on the row alone, as long as the device's matrix product treats
the rows of a tile alike.

What stays to be shown on a GPU: torch's own norms and reductions, which run row by row there too, but choose
their shape by the number of rows. Where this ran: in Triton's interpreter on a CPU (tests), for float32 and
float16; it compiles for compute capability 8.0 and 9.0 (tests), and has not run on a GPU.

Triton comes with CUDA builds of torch. This module can be imported without it, the layer cannot be called.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

try:
    import triton
    import triton.language as tl
except ImportError:  # torch builds without CUDA come without Triton
    triton = None

ROWS = 16
OUTPUTS = 64
INNER = 64


class FixedLinear(nn.Module):
    """`nn.Linear` on fixed tiles: (..., in) to (..., out), any number of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: (out, in), of any strides; bias: (out,)."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty(len(rows), self.weight.shape[0], dtype=x.dtype, device=x.device)
        if len(rows):
            grid = (triton.cdiv(len(rows), ROWS), triton.cdiv(self.weight.shape[0], OUTPUTS))
            _linear_tile[grid](
                rows,
                self.weight,
                self.weight if self.bias is None else self.bias,
                out,
                len(rows),
                self.weight.shape[0],
                rows.shape[1],
                rows.stride(0),
                self.weight.stride(0),
                self.weight.stride(1),
                has_bias=self.bias is not None,
                tile_rows=ROWS,
                tile_outputs=OUTPUTS,
                tile_inner=INNER,
                # TF32 would round float32 products to ten bits.
                precision="ieee" if x.dtype == torch.float32 else "tf32",
                num_warps=4,
            )
        return out.view(*x.shape[:-1], -1)


def replace_linears(model: nn.Module) -> int:
    """Put a `FixedLinear` in the place of every linear layer; how many there were."""
    from transformers.pytorch_utils import Conv1D

    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, FixedLinear(child.weight.detach(), child.bias))
            elif isinstance(child, Conv1D):
                weight: Tensor = child.weight
                setattr(parent, name, FixedLinear(weight.detach().t(), child.bias))
            else:
                continue
            count += 1
    return count


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _linear_tile(  # type: ignore[no-untyped-def]
        rows,  # (R, in), last dimension dense
        weight,  # (out, in)
        bias,  # (out,)
        output,  # (R, out), dense
        num_rows,
        num_outputs,
        num_inner,
        row_stride,
        weight_output_stride,
        weight_inner_stride,
        has_bias: tl.constexpr,
        tile_rows: tl.constexpr,
        tile_outputs: tl.constexpr,
        tile_inner: tl.constexpr,
        precision: tl.constexpr,
    ):
        row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
        out = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
        total = tl.zeros([tile_rows, tile_outputs], tl.float32)
        for begin in range(0, num_inner, tile_inner):
            inner = begin + tl.arange(0, tile_inner)
            x = tl.load(
                rows + row[:, None].to(tl.int64) * row_stride + inner[None, :],
                mask=(row < num_rows)[:, None] & (inner < num_inner)[None, :],
                other=0.0,
            )
            w = tl.load(
                weight
                + out[None, :].to(tl.int64) * weight_output_stride
                + inner[:, None] * weight_inner_stride,
                mask=(out < num_outputs)[None, :] & (inner < num_inner)[:, None],
                other=0.0,
            )
            total += tl.dot(x, w, input_precision=precision)
        if has_bias:
            total += tl.load(bias + out, mask=out < num_outputs, other=0.0).to(tl.float32)[None, :]
        tl.store(
            output + row[:, None].to(tl.int64) * num_outputs + out[None, :],
            total.to(output.dtype.element_ty),
            mask=(row < num_rows)[:, None] & (out < num_outputs)[None, :],
        )
