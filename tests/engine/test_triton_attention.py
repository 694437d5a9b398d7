"""The Triton kernel against dense attention: on a GPU where there is one, else in Triton's interpreter.

Triton decides when it is imported whether it interprets, and other tests may have imported it long ago. So
this file runs itself as a program of its own: it writes the kernel's outputs for all cases, the tests look at
them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.engine.model import Batch, Span
from outrider.engine.paged_attention import Attend, Pool, Scoring, Step, attend_torch
from outrider.engine.strict import attend_strict

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Case:
    """Spans as (length, rows), and the shape and options of the layer."""

    spans: tuple[tuple[int, int], ...] = ((37, 5), (70, 1), (5, 5))
    page: int = 16
    heads: int = 4
    kv_heads: int = 2
    key_size: int = 32
    value_size: int = 32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    tree: bool = False
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Made:
    query: Tensor
    pool: Pool
    step: Step
    scoring: Scoring


def make(case: Case, seed: int = 0) -> Made:
    """A pool full of random keys, spans over scattered blocks, and random queries."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(case.dtype).to(DEVICE)

    counts = [-(-length // case.page) for length, _ in case.spans]
    ids = torch.randperm(sum(counts) + 3, generator=random).tolist()
    spans: list[Span] = []
    positions: list[int] = []
    ancestors: dict[int, Tensor] = {}
    start = 0
    for (length, rows), count in zip(case.spans, counts, strict=True):
        blocks, ids = tuple(ids[:count]), ids[count:]
        depths = list(range(rows))
        if case.tree and rows > 2:
            # A root, and below it branches of two nodes each.
            depths = [0] + [1 + i % 2 for i in range(rows - 1)]
            seen = torch.eye(rows, dtype=torch.bool)
            seen[:, 0] = True
            for node in range(2, rows, 2):
                seen[node, node - 1] = True
            ancestors[len(spans)] = seen
        positions += [length - rows + depth for depth in depths]
        spans.append(Span(start, rows, length, blocks))
        start += rows
    batch = Batch(
        torch.zeros(start, dtype=torch.int64), torch.tensor(positions), tuple(spans), torch.arange(1)
    )
    blocks_in_pool = (sum(counts) + 3, case.page, case.kv_heads)
    return Made(
        query=normal(case.heads, start, case.key_size),
        pool=Pool(normal(*blocks_in_pool, case.key_size), normal(*blocks_in_pool, case.value_size)),
        step=Step(batch, block_size=case.page, device=DEVICE, ancestors=ancestors),
        scoring=Scoring(
            scale=case.key_size**-0.5,
            window=case.window,
            softcap=case.softcap,
            sinks=normal(case.heads) if case.sinks else None,
        ),
    )


def dense(made: Made) -> Tensor:
    """Attention as its definition says, one row and one head at a time, in float64: (R, Hq, Dv)."""
    pool, step, scoring = made.pool, made.step, made.scoring
    heads, kv_heads = made.query.shape[0], pool.keys.shape[2]
    out = torch.zeros(made.query.shape[1], heads, pool.values.shape[3], dtype=torch.float64)
    for index, span in enumerate(step.spans):
        old = span.length - span.rows
        keys = torch.cat([pool.keys[block] for block in span.blocks])[: span.length].double().cpu()
        values = torch.cat([pool.values[block] for block in span.blocks])[: span.length].double().cpu()
        place = [*range(old), *step.positions[span.start : span.start + span.rows].tolist()]
        for row in range(span.rows):
            tree = step.ancestors.get(index)
            seen = [
                at
                for at in range(span.length)
                if (at < old or (bool(tree[row, at - old]) if tree is not None else at - old <= row))
                and (scoring.window is None or place[old + row] - place[at] < scoring.window)
            ]
            for head in range(heads):
                kv = head // (heads // kv_heads)
                scores = keys[seen, kv] @ made.query[head, span.start + row].double().cpu() * scoring.scale
                if scoring.softcap is not None:
                    scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
                if scoring.sinks is not None:
                    scores = torch.cat([scores, scoring.sinks[head].double().cpu()[None]])
                weights = torch.softmax(scores, 0)[: len(seen)]
                out[span.start + row, head] = weights @ values[seen, kv]
    return out


CASES = {
    "plain": Case(),
    "page_32": Case(page=32),
    "page_64": Case(page=64),
    "one_head_a_group": Case(heads=2),
    "group_of_three": Case(heads=6),
    "head_of_64": Case(key_size=64, value_size=64),
    "head_of_80": Case(key_size=80, value_size=80),
    "head_of_256": Case(key_size=256, value_size=256, spans=((40, 3),)),
    "values_of_another_size": Case(key_size=48, value_size=32),
    "prefill_of_several_tiles": Case(spans=((130, 90), (20, 20))),
    "window": Case(window=9),
    "window_longer_than_a_key_tile": Case(spans=((190, 40), (150, 2)), window=70),
    "window_of_one": Case(window=1),
    "softcap": Case(softcap=2.0),
    "sinks": Case(sinks=True),
    "tree": Case(tree=True, spans=((40, 7), (70, 1), (25, 4))),
    "tree_in_a_window": Case(tree=True, window=6, spans=((40, 7), (70, 1))),
    "everything": Case(tree=True, window=11, softcap=3.0, sinks=True, heads=6, page=32),
    "bfloat16": Case(dtype=torch.bfloat16, softcap=5.0),
    "float16": Case(dtype=torch.float16, sinks=True),
}


def tolerance(case: Case) -> float:
    return {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[case.dtype]


KERNEL_CASES = [name for name, case in CASES.items() if case.dtype != torch.bfloat16 or DEVICE.type == "cuda"]
"""Triton's interpreter multiplies bfloat16 matrices by their bit patterns (3.9), so that needs a GPU."""


def run_kernel(made: Made) -> Tensor:
    from outrider.engine.triton_attention import attend_triton

    return attend_triton(made.query, made.pool, made.step, made.scoring).cpu()


LONG = Case(spans=((150, 5), (37, 20)), window=70)
"""Five rows to verify beside a prompt."""


def rows_alone(made: Made) -> list[Made]:
    """The rows of the first span, each as a step of its own, as plain decoding would have it."""
    span = made.step.spans[0]
    alone = []
    for row in range(span.rows):
        length = span.length - span.rows + row + 1
        blocks = span.blocks[: -(-length // made.step.block_size)]
        batch = Batch(
            torch.zeros(1, dtype=torch.int64),
            torch.tensor([length - 1]),
            (Span(0, 1, length, blocks),),
            torch.arange(1),
        )
        step = Step(batch, block_size=made.step.block_size, device=DEVICE)
        alone.append(replace(made, query=made.query[:, row : row + 1], step=step))
    return alone


def kernel_outputs() -> dict[str, Tensor]:
    """Everything that the tests look at: each case, and `LONG` together and row by row."""
    long = make(LONG)
    return {
        **{name: run_kernel(make(CASES[name])) for name in KERNEL_CASES},
        "long together": run_kernel(long)[:5],
        "long alone": torch.cat([run_kernel(alone) for alone in rows_alone(long)]),
    }


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    pytest.importorskip("triton")
    path = tmp_path_factory.mktemp("kernel") / "outputs.pt"
    environment = {**os.environ, "TRITON_INTERPRET": "0" if DEVICE.type == "cuda" else "1"}
    subprocess.run([sys.executable, __file__, str(path)], env=environment, check=True, timeout=240)
    loaded: dict[str, Tensor] = torch.load(path)
    return loaded


@pytest.mark.parametrize("name", KERNEL_CASES)
def test_the_kernel_gives_dense_attention(name: str, outputs: dict[str, Tensor]) -> None:
    expected = dense(make(CASES[name]))
    torch.testing.assert_close(outputs[name].double(), expected, atol=tolerance(CASES[name]), rtol=0)


@pytest.mark.parametrize("attend", [attend_torch, attend_strict])
@pytest.mark.parametrize("name", CASES)
def test_the_torch_functions_give_dense_attention(name: str, attend: Attend) -> None:
    made = make(CASES[name])
    out = attend(made.query, made.pool, made.step, made.scoring)
    torch.testing.assert_close(out.double().cpu(), dense(made), atol=tolerance(CASES[name]), rtol=0)


def test_the_kernel_gives_a_row_bitwise_the_same_alone_and_in_a_batch(outputs: dict[str, Tensor]) -> None:
    assert torch.equal(outputs["long together"], outputs["long alone"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [2, 6])
def test_strict_attention_gives_a_row_bitwise_the_same_alone_and_in_a_batch(
    heads: int, dtype: torch.dtype
) -> None:
    long = make(replace(LONG, heads=heads, softcap=3.0, sinks=True, dtype=dtype))
    together = attend_strict(long.query, long.pool, long.step, long.scoring)[:5]
    alone = [attend_strict(one.query, one.pool, one.step, one.scoring) for one in rows_alone(long)]
    assert torch.equal(together, torch.cat(alone))


def test_the_module_needs_triton_only_to_run() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import outrider.engine.triton_attention as module\n"
        "assert module.triton is None"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def compile_for_gpu(capability: int, dtype: str, head_size: int) -> int:
    """Compile the kernel with every option on down to a GPU's machine code; bytes of shared memory it takes.

    Needs no GPU: Triton brings its compiler and assembler along.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from outrider.engine.triton_attention import _attend_tile

    constants = {
        "page": 16,
        "group": 3,
        "group_lanes": 4,
        "tile_rows": 16,
        "tile_keys": 64,
        "key_size": head_size,
        "key_lanes": head_size,
        "value_size": head_size,
        "value_lanes": head_size,
        "has_softcap": True,
        "has_window": True,
        "has_sinks": True,
        "has_trees": True,
        "precision": "ieee" if dtype == "fp32" else "tf32",
    }
    types = dict.fromkeys(constants, "constexpr") | {"tree_seen": "*i8", "scale": "fp32", "softcap": "fp32"}
    types |= dict.fromkeys(("query", "keys", "values", "output", "sinks"), f"*{dtype}")
    for name in _attend_tile.arg_names:
        types.setdefault(name, "i32" if name.endswith("stride") or name == "window" else "*i32")
    compiled = triton.compile(
        ASTSource(fn=_attend_tile, signature=types, constexprs=constants),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 4, "num_stages": 2},
    )
    assert compiled.asm["cubin"]
    shared: int = compiled.metadata.shared
    return shared


@pytest.mark.parametrize(("capability", "dtype"), [(80, "bf16"), (90, "bf16")])
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
        print(compile_for_gpu(int(sys.argv[2]), sys.argv[3], head_size=64))
    else:
        torch.save(kernel_outputs(), sys.argv[1])
