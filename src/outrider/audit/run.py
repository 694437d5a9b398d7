"""The audit in process: one engine, all checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.audit import fit, greedy, quality, seeds
from outrider.audit.report import Report
from outrider.config import LocalConfig
from outrider.engine.loading import load_engine, target_info
from outrider.text import Tokenizer

CHECKS = ("greedy", "seeds", "fit", "quality")


def audit(
    config: LocalConfig,
    prompts: Sequence[str],
    *,
    tokens: int,
    draws: int = 20_000,
    checks: Sequence[str] = CHECKS,
    drafter_model: str | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> Report:
    """Run the chosen checks on the model that `config` names. Raises `ConfigError` where it cannot start."""
    progress("loading the model")
    engine = load_engine(config)
    report = Report(f"{config.model} in {engine.model.dtype}, numerics: {engine.model.numerics}")
    if "seeds" in checks:
        report.add(
            seeds.check(engine, config, prompts, tokens, drafter_model=drafter_model, progress=progress)
        )
    if "fit" in checks:
        prompt = Tokenizer(target_info(config).model).encode(
            prompts[min(1, len(prompts) - 1)]
        )  # the first of ours leaves little open
        report.add(fit.check(engine, prompt, draws=draws, progress=progress))
    if "quality" in checks:
        report.add(quality.check(engine, config, prompts, tokens, progress=progress))
    if "greedy" in checks:
        report.add(greedy.check(engine, config, prompts, tokens, progress=progress))
    return report
