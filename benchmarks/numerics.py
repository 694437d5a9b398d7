"""What strict numerics cost: a row's logits bitwise the same in any company, against whatever is fastest.

    python benchmarks/numerics.py [--repeats 7] [--quick] [--json FILE]

SmolLM2 on one thread, in bfloat16 and float32: a step at concurrency 1, 8 and 32 with K = 0 and K = 4 (rows:
a token and its drafts each, 200 tokens of context), and the prefill of 1,024 tokens. Strict and fast take
turns, ratios are geometric means of pairs with their 95 % interval; above 1 strict is slower. The C kernels
are strict as they are, strict and fast are one code there, so they stand against torch's fast kernels, the
alternative. `tiles` are the fixed tiles in torch, for families that the C kernels do not have. Strict is the
default where a step costs at most 10 % more and the prefill at most 25 %. Last: rows of a text whose logits
differ in any bit between the text computed whole, and cut into steps beside another text.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Literal

import torch

from measure import Ratio, Report, machine
from outrider import models
from outrider.engine.loading import load_model
from outrider.engine.model import Batch, CausalModel, Span
from outrider.engine.strict import rows_that_change
from outrider.errors import ConfigError

CONTEXT = 200
PROMPT = 1024
BLOCK = 32


def batch(sequences: int, rows: int, length: int, *, logits: bool = True) -> Batch:
    """A step: every sequence has `rows` new tokens that end at `length`."""
    generator = torch.Generator().manual_seed(sequences)
    each = -(-length // BLOCK)
    spans = tuple(
        Span(i * rows, rows, length, tuple(range(i * each, (i + 1) * each))) for i in range(sequences)
    )
    positions = torch.arange(length - rows, length).repeat(sequences)
    tokens = torch.randint(5, 40_000, (sequences * rows,), generator=generator)
    return Batch(
        tokens, positions, spans, torch.arange(len(tokens)) if logits else torch.tensor([len(tokens) - 1])
    )


def seconds(model: CausalModel, step: Batch) -> float:
    began = time.perf_counter()
    model.forward(step)
    return time.perf_counter() - began


def paired(strict: CausalModel, fast: CausalModel, step: Batch, repeats: int) -> Ratio:
    times: tuple[list[float], list[float]] = ([], [])
    for model in (strict, fast):
        seconds(model, step)
    for _ in range(repeats):
        for side, model in enumerate((strict, fast)):
            times[side].append(seconds(model, step))
    return Ratio.of(*times)


def load(dtype: str, kernels: Literal["native", "torch"], numerics: Literal["strict", "fast"]) -> CausalModel:
    model = load_model(
        models.resolve("smollm2"),
        dtype=dtype,
        device="cpu",
        block_size=BLOCK,
        cpu_kernels=kernels,
        numerics=numerics,
    )
    model.allocate(40 * -(-max(PROMPT, CONTEXT) // BLOCK))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="3 repeats, concurrency 1 and 8")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    repeats = 3 if options.quick else options.repeats
    report = Report(machine())
    print(report.machine)
    for dtype in ("bfloat16", "float32"):
        fast = load(dtype, "torch", "fast")
        ways: dict[str, CausalModel] = {"tiles": load(dtype, "torch", "strict")}
        try:
            ways = {"C kernels": load(dtype, "native", "strict")} | ways
        except ConfigError as error:  # the table says why a row is missing
            print(f"{dtype}: no C kernels: {error}")
        for name, strict in ways.items():
            print(f"{dtype}: {name}, strict, against torch, fast")
            for concurrency in (1, 8) if options.quick else (1, 8, 32):
                for drafts in (0, 4):
                    step = batch(concurrency, 1 + drafts, CONTEXT)
                    label = f"{dtype}, {name}: step, c={concurrency}, K={drafts}"
                    report.ratio(label, paired(strict, fast, step, repeats))
            prefill = batch(1, PROMPT, PROMPT, logits=False)
            report.ratio(f"{dtype}, {name}: prefill of {PROMPT}", paired(strict, fast, prefill, repeats))
        for name, model in {"torch, fast": fast, **ways}.items():
            moved = rows_that_change(model)
            changed, most = int((moved > 0).sum()), float(moved.max())
            print(f"  {dtype}, {name}: {changed} of {len(moved)} rows change, by up to {most:.3g}")
            report.figures[f"{dtype}, {name}: rows that change"] = changed
            report.figures[f"{dtype}, {name}: largest change"] = most
    if options.json:
        report.write(options.json)


if __name__ == "__main__":
    main()
