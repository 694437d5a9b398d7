"""What drawing with noise costs beside a step: 64 rows over vocabularies of 49k and 152k.

    python benchmarks/sampling.py [--repeats 15] [--json FILE]

SmolLM2 (49,152 tokens), and a model of Qwen2.5-0.5B's shape with random weights (151,936 tokens), in bfloat16
on one thread: the step's forward, then `processors.process` and `target.choose_tokens` for its 64 rows of
logits, in turn. Shares are ratios of sampling time to step time, geometric means of pairs with their 95 %
interval.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from measure import Ratio, Report, machine
from outrider import models
from outrider.engine.loading import load_model
from outrider.engine.model import Batch, Span
from outrider.messages import SamplingParams
from outrider.sampling.processors import Lane, process
from outrider.sampling.target import choose_tokens

ROWS = 64
BLOCK = 32
CONTEXT = 64
REQUESTS = {
    "temperature 1": SamplingParams(seed=1),
    "top_k 50": SamplingParams(seed=1, top_k=50),
    "top_p 0.95": SamplingParams(seed=1, top_p=0.95),
    "greedy": SamplingParams(temperature=0.0),
}


def random_qwen(folder: Path) -> Path:
    """Qwen2.5-0.5B's sizes. No tokenizer: nothing is read in words."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = Report(machine())
    print(report.machine)
    with tempfile.TemporaryDirectory() as scratch:
        for name, folder in (
            ("SmolLM2, 49k", models.resolve("smollm2")),
            ("Qwen2.5-0.5B's shape, 152k", random_qwen(Path(scratch))),
        ):
            measure(report, name, folder, options.repeats)
    if options.json:
        report.write(options.json)


def measure(report: Report, name: str, folder: Path, repeats: int) -> None:
    model = load_model(folder, dtype="bfloat16", device="cpu", block_size=BLOCK, cpu_kernels="auto")
    each = CONTEXT // BLOCK
    model.allocate(ROWS * each)
    spans = tuple(Span(i, 1, CONTEXT, tuple(range(i * each, (i + 1) * each))) for i in range(ROWS))
    tokens = torch.randint(5, 40_000, (ROWS,), generator=torch.Generator().manual_seed(0))
    step = Batch(tokens, torch.full((ROWS,), CONTEXT - 1), spans, torch.arange(ROWS))
    logits = model.forward(step)
    for request, params in REQUESTS.items():
        lanes = [Lane(params, CONTEXT + i) for i in range(ROWS)]
        steps, draws = [], []
        for _ in range(repeats):
            began = time.perf_counter()
            logits = model.forward(step)
            middle = time.perf_counter()
            choose_tokens(process(logits, lanes, model.vocab_size), lanes)
            steps.append(middle - began)
            draws.append(time.perf_counter() - middle)
        report.ratio(f"{name}: {request}, share of a step", Ratio.of(draws, steps))
        report.figure(f"{name}: {request}", 1000 * sorted(draws)[len(draws) // 2], "ms")
    report.figure(f"{name}: step of {ROWS} rows", 1000 * sorted(steps)[len(steps) // 2], "ms")


if __name__ == "__main__":
    main()
