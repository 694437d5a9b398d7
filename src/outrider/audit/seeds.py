"""Same seed, same tokens: with any drafter, any K, or none, and in any company."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.audit.divergence import explain, finding
from outrider.audit.report import Finding
from outrider.config import LocalConfig, PlannerOptions, SpeculativeConfig
from outrider.engine.engine import Engine
from outrider.generation import GenerationRequest
from outrider.inprocess import Completion, LocalService

TEMPERATURE, TOP_P = 0.9, 0.95
ALONE = 6
"""Prompts that are also answered one at a time."""

GATE_MS = 10_000.0
"""Drafters of any speed get their drafts verified: an audit is about tokens, not about time."""


@dataclass(frozen=True, slots=True)
class Texts:
    """What one way of running the service made of the prompts."""

    requests: tuple[GenerationRequest, ...]
    tokens: tuple[tuple[int, ...], ...]
    completions: tuple[Completion, ...]


def run(
    engine: Engine,
    config: LocalConfig,
    prompts: Sequence[str],
    tokens: int,
    *,
    spec: SpeculativeConfig | None,
    greedy: bool,
    together: bool = True,
    seed: int = 0,
) -> Texts:
    """All prompts on one service over the given engine, at once or one at a time."""
    changed = config.model_copy(
        update={"speculative_config": spec, "planner": PlannerOptions(gate_ms=GATE_MS)}
    )
    with LocalService(changed, engine=engine) as service:
        requests = [
            service.request(
                prompt,
                max_tokens=tokens,
                seed=seed + index,
                logprobs=0,
                temperature=0.0 if greedy else TEMPERATURE,
                top_p=1.0 if greedy else TOP_P,
            )
            for index, prompt in enumerate(prompts)
        ]
        if together:
            done = service.generate_many(requests)
        else:
            done = [service.generate_many([request])[0] for request in requests]
    return Texts(tuple(requests), tuple(one.tokens for one in done), tuple(done))


def drafters(config: LocalConfig, plain: Texts, *, model: str | None) -> list[SpeculativeConfig]:
    """Every kind of drafter: lookups, the target's own weights or another model's, always right, always
    wrong, and by a script. `plain` are the true continuations that the last three know."""
    known = [
        [list(request.prompt), list(tokens)]
        for request, tokens in zip(plain.requests, plain.tokens, strict=True)
        if tokens
    ]
    truth = {"continuations": known}
    return [
        SpeculativeConfig(method="ngram", num_speculative_tokens=4),
        SpeculativeConfig(method="ngram", num_speculative_tokens=1, prompt_lookup_min=1),
        SpeculativeConfig(method="draft_model", model=model or config.model, num_speculative_tokens=4),
        SpeculativeConfig(method="oracle", num_speculative_tokens=8, extra=truth),
        SpeculativeConfig(method="anti", num_speculative_tokens=4, extra=truth),
        SpeculativeConfig(
            method="scripted", num_speculative_tokens=4, extra=truth | {"accept": [4, 0, 2, 1, 3]}
        ),
    ]


def check(
    engine: Engine,
    config: LocalConfig,
    prompts: Sequence[str],
    tokens: int,
    *,
    drafter_model: str | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> list[Finding]:
    """Greedy and sampled texts with every drafter, against the plain ones."""
    findings = []
    for greedy in (True, False):
        kind = "greedy" if greedy else "sampled"
        progress(f"same seed, same tokens: {kind}, plain")
        plain = run(engine, config, prompts, tokens, spec=None, greedy=greedy)
        few = prompts[:ALONE]
        alone = run(engine, config, few, tokens, spec=None, greedy=greedy, together=False)
        findings.append(compare(engine, f"{kind}: plain, alone and together", plain, alone))
        for spec in drafters(config, plain, model=drafter_model):
            name = f"{kind}: {spec.method}, K={spec.num_speculative_tokens}"
            progress(f"same seed, same tokens: {name}")
            drafted = run(engine, config, prompts, tokens, spec=spec, greedy=greedy)
            findings.append(compare(engine, name, plain, drafted))
    return findings


def compare(engine: Engine, subject: str, reference: Texts, other: Texts) -> Finding:
    """One line for all texts: identical, or what the first divergences are."""
    pairs = zip(reference.requests, reference.tokens, other.tokens, strict=False)
    explained = [explain(engine, one.prompt, wanted, got, one.sampling) for one, wanted, got in pairs]
    drafted = sum(one.stats.draft_tokens for one in other.completions)
    accepted = sum(one.stats.accepted_tokens for one in other.completions)
    note = f"; {accepted} of {drafted} drafts accepted" if drafted else ""
    return finding("seeds", subject, len(explained), [one for one in explained if one is not None], note)
