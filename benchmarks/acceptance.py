"""Acceptance and speed of the three rules with the same drafter: coupled, rejection, block.

    python benchmarks/acceptance.py [--prompts 24] [--tokens 64] [--drop 2] [--quick] [--json FILE]

The target is SmolLM2 in bfloat16, the drafter the same checkpoint without some of its middle layers: a model
of the same vocabulary that is right about as often as a good small one. Temperatures 0.7 and 1.0, K = 4.
Every prompt is answered under each rule before the next prompt, in turn, and figures are paired by prompt:
acceptance in points with the 95 % interval of the mean difference, tokens a second as a ratio.

The texts of the rules differ, so what is measured is noisy. Exact, and on the same positions for all rules,
is what each rule accepts of a round's first draft, by its law: the optimum, 1 - TV, which no rule exceeds;
the optimum for the likeliest tokens that `draft_probs_top_n` ships, which rejection and block reach; and the
coupled rule's own (Daliri et al. 2024). They are averaged over the positions of the coupled texts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import outrider.config
import outrider.messages
from measure import Ratio, Report, half_interval, machine
from outrider import models
from outrider.config import LocalConfig
from outrider.engine.engine import Engine
from outrider.engine.loading import load_engine, load_model
from outrider.engine.model import Batch, CausalModel, Span
from outrider.inprocess import Completion, LocalService
from prompts import mixed, source

K = 4
RULES = ("coupled", "rejection", "block")
CUT = 400  # tokens of a prompt


def truncated(folder: Path, drop: int, into: Path) -> Path:
    """A checkpoint without `drop` layers around the middle."""
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    first = (layers - drop) // 2
    kept = [layer for layer in range(layers) if not first <= layer < first + drop]
    place = {old: new for new, old in enumerate(kept)}
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a file handle, not a dict
                head, _, rest = name.partition("model.layers.")
                if rest:
                    number, _, tail = rest.partition(".")
                    if int(number) not in place:
                        continue
                    tensors[f"{head}model.layers.{place[int(number)]}.{tail}"] = file.get_tensor(name)
                else:
                    tensors[name] = file.get_tensor(name)
    config["num_hidden_layers"] = len(kept)
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = [config["layer_types"][layer] for layer in kept]
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    (into / "config.json").write_text(json.dumps(config))
    for path in folder.iterdir():
        if path.suffix in (".json", ".jinja", ".txt") and path.name != "config.json":
            (into / path.name).write_bytes(path.read_bytes())
    return into


def row_logits(model: CausalModel, tokens: list[int], rows: int) -> torch.Tensor:
    """Logits of the last `rows` positions, (rows, V)."""
    count = len(tokens)
    blocks = tuple(range(-(-count // model.block_size)))
    batch = Batch(
        torch.tensor(tokens),
        torch.arange(count),
        (Span(0, count, count, blocks),),
        torch.arange(count - rows, count),
    )
    return model.forward(batch)


@dataclass(frozen=True, slots=True)
class Laws:
    """How often a round's first draft is accepted, in theory: means over the positions of one text."""

    optimum: float  # 1 - TV
    shipped: float  # 1 - TV of what is left of the drafter's distribution when it is shipped
    coupled: float  # sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)

    @classmethod
    def of(cls, target: torch.Tensor, draft: torch.Tensor, temperature: float, top_n: int) -> Laws:
        """target, draft: (n, V) logits of the same positions."""
        target_probs = (target / temperature).double().softmax(-1)
        draft_probs = (draft / temperature).double().softmax(-1)
        best, ids = draft_probs.topk(top_n, dim=-1)
        shipped = torch.zeros_like(draft_probs).scatter(1, ids, best / best.sum(dim=-1, keepdim=True))
        return cls(
            optimum=torch.minimum(target_probs, draft_probs).sum(-1).mean().item(),
            shipped=torch.minimum(target_probs, shipped).sum(-1).mean().item(),
            coupled=coupled_law(target_probs, draft_probs).mean().item(),
        )


def coupled_law(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """(n, V) and (n, V) to (n,): how often both draw the same token with the same Gumbel noise.

    p_j / p_i is the larger one where p_j / q_j >= p_i / q_i: sorted by p / q, the sum over j is one of the
    p before and of the q after.
    """
    order = (target_probs / draft_probs).argsort(dim=-1, descending=True)
    p, q = target_probs.gather(1, order), draft_probs.gather(1, order)
    after = q.sum(dim=-1, keepdim=True) - q.cumsum(dim=-1)
    return (1 / (p.cumsum(dim=-1) / p + after / q)).sum(dim=-1)


def answer(
    engine: Engine, config: LocalConfig, drafters: dict[str, Any], rule: str, prompt: list[int], **fields: Any
) -> tuple[float, Completion]:
    spec = config.speculative_config
    assert spec is not None
    changed = spec.model_copy(update={"rejection_sample_method": outrider.messages.AcceptanceRule(rule)})
    with LocalService(
        config.model_copy(update={"speculative_config": changed}), engine=engine, drafter=drafters[rule]
    ) as service:
        began = time.perf_counter()
        done = service.generate(prompt, **fields)
        return time.perf_counter() - began, done


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--drop", type=int, default=2, help="middle layers that the drafter lacks")
    parser.add_argument("--quick", action="store_true", help="5 prompts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    count = 5 if options.quick else options.prompts
    report = Report(machine())
    print(report.machine)
    print(
        f"{source()}, {count} prompts x {options.tokens} tokens, K={K}, drafter lacks {options.drop} layers"
    )
    with tempfile.TemporaryDirectory() as scratch:
        measure(report, Path(scratch), count, options.tokens, options.drop)
    if options.json:
        report.write(options.json)


def measure(report: Report, scratch: Path, count: int, tokens: int, drop: int) -> None:
    folder = models.resolve("smollm2")
    draft_folder = truncated(folder, drop, scratch)
    config = outrider.config.parse(
        LocalConfig,
        {
            "model": "smollm2",
            "dtype": "bfloat16",
            "max_model_len": 1024,
            "planner": {"gate_ms": 60_000},
            "speculative_config": {
                "method": "draft_model",
                "model": str(draft_folder),
                "num_speculative_tokens": K,
                "extra": {"dtype": "bfloat16"},
            },
        },
        where="benchmark",
    )
    spec = config.speculative_config
    assert spec is not None
    engine = load_engine(config)
    drafters = {rule: drafter(config, rule) for rule in RULES}
    draft_model = load_model(draft_folder, dtype="bfloat16", device="cpu", block_size=32, cpu_kernels="auto")
    target_model = load_model(folder, dtype="bfloat16", device="cpu", block_size=32, cpu_kernels="auto")
    for model in (draft_model, target_model):
        model.allocate(64)
    with LocalService(config, engine=engine, drafter=drafters["coupled"]) as service:
        prompts = [
            service.tokenizer.encode_chat([{"role": "user", "content": text}])[:CUT] for text in mixed(count)
        ]
    for temperature in (0.7, 1.0):
        print(f"temperature {temperature}")
        rates: dict[str, list[float]] = {rule: [] for rule in RULES}
        lengths: dict[str, list[float]] = {rule: [] for rule in RULES}
        firsts: dict[str, list[float]] = {rule: [] for rule in RULES}
        times: dict[str, list[float]] = {rule: [] for rule in RULES}
        laws: list[Laws] = []
        for number, prompt in enumerate(prompts):
            for rule in [*RULES[number % 3 :], *RULES[: number % 3]]:
                seconds, done = answer(
                    engine,
                    config,
                    drafters,
                    rule,
                    prompt,
                    max_tokens=tokens,
                    temperature=temperature,
                    seed=number,
                    ignore_eos=True,
                )
                rates[rule].append(done.stats.acceptance_rate or 0.0)
                firsts[rule].append(sum(done.stats.accepted_per_position[:1]) / max(1, done.stats.rounds))
                lengths[rule].append(done.stats.mean_acceptance_length or 1.0)
                times[rule].append(seconds / len(done.tokens))
                if rule == "coupled":
                    text = [*prompt, *done.tokens]
                    rows = [row_logits(one, text, len(done.tokens)) for one in (target_model, draft_model)]
                    laws.append(Laws.of(rows[0], rows[1], temperature, spec.draft_probs_top_n))
        for field in fields(Laws):
            mean = statistics.fmean(getattr(one, field.name) for one in laws)
            report.figure(f"first draft by law, {field.name}, T={temperature}", 100 * mean, "%")
        for what in ("optimum", "shipped"):
            points(
                report,
                f"coupled loses by law to {what}, points of the first draft, T={temperature}",
                [one.coupled for one in laws],
                [getattr(one, what) for one in laws],
            )
        for rule in RULES:
            report.figure(f"{rule}: acceptance, T={temperature}", 100 * statistics.fmean(rates[rule]), "%")
            report.figure(
                f"{rule}: first draft accepted, T={temperature}", 100 * statistics.fmean(firsts[rule]), "%"
            )
            report.figure(
                f"{rule}: mean acceptance length, T={temperature}", statistics.fmean(lengths[rule]), "tokens"
            )
            report.figure(f"{rule}: speed, T={temperature}", 1 / statistics.fmean(times[rule]), "tok/s")
        for rule in RULES[1:]:
            for what, shares in (("the first draft", firsts), ("all drafts", rates)):
                points(
                    report,
                    f"coupled loses to {rule}, points of {what}, T={temperature}",
                    shares["coupled"],
                    shares[rule],
                )
            report.ratio(
                f"tokens/s, coupled / {rule}, T={temperature}", Ratio.of(times[rule], times["coupled"])
            )


def points(report: Report, name: str, ours: list[float], theirs: list[float]) -> None:
    """What `ours` lack, paired by prompt: the mean in points and its 95 % interval."""
    lost = [100 * (b - a) for a, b in zip(ours, theirs, strict=True)]
    mean, spread = statistics.fmean(lost), half_interval(lost)
    print(f"  {name:68} {mean:5.1f}  [{mean - spread:.1f}, {mean + spread:.1f}]", flush=True)
    report.figures[name] = mean
    report.figures[f"{name}: half of the interval"] = spread


def drafter(config: LocalConfig, rule: str) -> Any:
    """The plugin as the service would make it under a rule."""
    from outrider.engine.loading import target_info
    from outrider.registry import drafter_factory

    spec = config.speculative_config
    assert spec is not None
    changed = spec.model_copy(update={"rejection_sample_method": outrider.messages.AcceptanceRule(rule)})
    return drafter_factory("draft_model")(changed, target_info(config))


if __name__ == "__main__":
    main()
