"""Speculative texts beside plain ones: likelihood under the target, length, repetition, reasons to end.

The two samples have seeds of their own, so equal figures are no matter of course: they show that speculation
has not moved the distribution of whole texts in any of these directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from outrider.audit.report import Finding, Outcome
from outrider.audit.seeds import run
from outrider.audit.statistics import bootstrap_mean
from outrider.config import LocalConfig, SpeculativeConfig
from outrider.engine.engine import Engine
from outrider.inprocess import Completion
from outrider.messages import FinishReason

OTHER_SEEDS = 1_000_000


def check(
    engine: Engine,
    config: LocalConfig,
    prompts: Sequence[str],
    tokens: int,
    *,
    progress: Callable[[str], None] = lambda doing: None,
) -> list[Finding]:
    progress("quality: plain texts")
    plain = run(engine, config, prompts, tokens, spec=None, greedy=False)
    progress("quality: speculative texts")
    spec = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    drafted = run(engine, config, prompts, tokens, spec=spec, greedy=False, seed=OTHER_SEEDS)
    return compare(plain.completions, drafted.completions)


def compare(plain: Sequence[Completion], drafted: Sequence[Completion]) -> list[Finding]:
    """Each figure's mean difference, paired by prompt, with a 99.9 % bootstrap interval."""
    measures: dict[str, Callable[[Completion], float]] = {
        "log-likelihood a token": likelihood,
        "length": lambda one: float(len(one.tokens)),
        "repetition": repetition,
        "ended by itself": lambda one: float(one.finish is FinishReason.STOP),
    }
    findings = []
    for name, measure in measures.items():
        differences = [measure(b) - measure(a) for a, b in zip(plain, drafted, strict=True)]
        interval = bootstrap_mean(differences)
        own = math.fsum(measure(one) for one in plain) / len(plain)
        findings.append(
            Finding(
                "quality",
                name,
                Outcome.FINE if interval.covers_zero else Outcome.DEFECT,
                f"plain {own:.3f}, speculative {interval.mean:+.3f} "
                f"[{interval.low:+.3f}, {interval.high:+.3f}]",
                (
                    ("plain", own),
                    ("difference", interval.mean),
                    ("low", interval.low),
                    ("high", interval.high),
                ),
            )
        )
    return findings


def likelihood(completion: Completion) -> float:
    """Mean log-probability of the tokens under the target itself."""
    return math.fsum(one.logprob for one in completion.logprobs) / max(1, len(completion.logprobs))


def repetition(completion: Completion) -> float:
    """Share of runs of four tokens that were there before."""
    runs = [completion.tokens[i : i + 4] for i in range(len(completion.tokens) - 3)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
