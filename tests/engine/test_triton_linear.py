"""The fixed-tile linear layer against torch's: on a GPU where there is one, else in Triton's interpreter.

Triton decides when it is imported whether it interprets, and other tests may have imported it long ago. So
this file runs itself as a program of its own and looks at what that wrote.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from outrider.engine.triton_linear import FixedLinear, replace_linears

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(1, 64, 64), (5, 96, 130), (16, 200, 40), (37, 70, 100)]  # rows, in, out
DTYPES = [torch.float32, torch.float16]


def case(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, weight and bias."""
    rows, inner, outputs = shape
    random = torch.Generator().manual_seed(rows)
    made = [torch.randn(*size, generator=random) for size in ((rows, inner), (outputs, inner), (outputs,))]
    x, weight, bias = (one.to(dtype).to(DEVICE) for one in made)
    return x, weight, bias


def kernel_outputs() -> dict[str, list[Tensor]]:
    """Of every case: the whole batch, the batch without bias, and its rows one by one in odd company."""
    outputs = {}
    for dtype in DTYPES:
        for shape in SHAPES:
            x, weight, bias = case(shape, dtype)
            layer = FixedLinear(weight, bias)
            alone = [layer(x[row : row + 1]) for row in range(len(x))]
            turned = layer(torch.cat([x.flip(0), x]))[len(x) :]
            transposed = FixedLinear(weight.t().contiguous().t(), None)(x)
            found = [layer(x), transposed, torch.cat(alone), turned]
            outputs[f"{shape}{dtype}"] = [one.cpu() for one in found]
    return outputs


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Tensor]]:
    pytest.importorskip("triton")
    path = tmp_path_factory.mktemp("linear") / "outputs.pt"
    environment = {**os.environ, "TRITON_INTERPRET": "0" if DEVICE.type == "cuda" else "1"}
    subprocess.run([sys.executable, __file__, str(path)], env=environment, check=True, timeout=240)
    outputs: dict[str, list[Tensor]] = torch.load(path)
    return outputs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_are_those_of_the_layer(
    computed: dict[str, list[Tensor]], shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    x, weight, bias = (one.cpu().float() for one in case(shape, dtype))
    whole, without_bias, _, _ = computed[f"{shape}{dtype}"]
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    assert (whole.float() - (x @ weight.t() + bias)).abs().max() < tolerance
    assert (without_bias.float() - x @ weight.t()).abs().max() < tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_in_any_company(
    computed: dict[str, list[Tensor]], shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    whole, _, alone, turned = computed[f"{shape}{dtype}"]
    assert torch.equal(alone, whole)
    assert torch.equal(turned, whole)


def test_every_linear_layer_is_replaced_and_keeps_its_weights() -> None:
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(), nn.Sequential(Conv1D(3, 6), nn.Linear(3, 2, bias=False))
    )
    plain, conv = model[0].weight, model[2][0].weight  # type: ignore[index]
    assert replace_linears(model) == 3
    assert torch.equal(model[0].weight, plain)  # type: ignore[arg-type]
    assert torch.equal(model[2][0].weight, conv.t())  # type: ignore[index]
    assert model[2][1].bias is None  # type: ignore[index]


def compile_for_gpu(capability: int, dtype: str) -> int:
    """Compile down to a GPU's machine code; bytes of shared memory it takes. Needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from outrider.engine.triton_linear import INNER, OUTPUTS, ROWS, _linear_tile

    constants = {
        "has_bias": True,
        "tile_rows": ROWS,
        "tile_outputs": OUTPUTS,
        "tile_inner": INNER,
        "precision": "ieee" if dtype == "fp32" else "tf32",
    }
    types = dict.fromkeys(constants, "constexpr")
    types |= dict.fromkeys(("rows", "weight", "bias", "output"), f"*{dtype}")
    for name in _linear_tile.arg_names:
        types.setdefault(name, "i32")
    compiled = triton.compile(
        ASTSource(fn=_linear_tile, signature=types, constexprs=constants),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 4},
    )
    assert compiled.asm["cubin"]
    shared: int = compiled.metadata.shared
    return shared


@pytest.mark.parametrize(("capability", "dtype"), [(80, "bf16"), (90, "bf16"), (80, "fp32")])
def test_the_kernel_compiles_for_gpus_and_fits_their_shared_memory(
    capability: int, dtype: str, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, __file__, "compile", str(capability), dtype]
    done = subprocess.run(
        command, env=environment, check=True, timeout=240, stdout=subprocess.PIPE, encoding="utf-8"
    )
    assert int(done.stdout) <= 64 * 1024


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        print(compile_for_gpu(int(sys.argv[2]), sys.argv[3]))
    else:
        torch.save(kernel_outputs(), sys.argv[1])
