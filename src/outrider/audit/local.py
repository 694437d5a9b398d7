"""The audit in process: the same engine, rounds and drafters as a service, on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from outrider.audit import distribution, quality
from outrider.audit.divergence import Explainer, Recomputed
from outrider.audit.greedy import Reference
from outrider.audit.results import Comparison, Divergence, Result, Verdict, first_difference
from outrider.audit.slice_model import RealScore, Remembered, likely_words
from outrider.audit.workload import in_groups, options
from outrider.config import LocalConfig, parse
from outrider.contracts import TargetInfo
from outrider.engine.engine import Engine
from outrider.engine.loading import load_engine, load_model, target_info
from outrider.errors import ConfigError
from outrider.generation import GenerationRequest
from outrider.inprocess import Completion, LocalService
from outrider.messages import AcceptanceRule

Progress: TypeAlias = Callable[[str], None]

SLICE_WORDS = 64
CONTEXTS = ("The capital of France is", "My favourite colour is")
"""Short prompts, of which each next token has a few likely choices."""

KEPT = 1024  # tokens of a prompt; a longer one proves nothing more

DRAFTING: tuple[tuple[str, str, int], ...] = (
    ("ngram, K = 4", "ngram", 4),
    ("draft_model, K = 1", "draft_model", 1),
    ("draft_model, K = 4", "draft_model", 4),
    ("draft_model, K = 8", "draft_model", 8),
    ("anti, K = 4", "anti", 4),
    ("oracle, K = 8", "oracle", 8),
    ("scripted, K = 5", "scripted", 5),
)
"""Name, method and K of each comparison with the plain text."""


@dataclass(frozen=True, slots=True)
class LocalAudit:
    """What to audit. `engine` are the keys of `outrider.local`, without drafts."""

    engine: Mapping[str, Any]
    prompts: Sequence[str]
    tokens: int = 96
    draws: int = 20_000
    draft_model: str | None = None  # default: the target drafts for itself
    draft_options: Mapping[str, Any] = field(default_factory=dict)  # speculative_config.extra
    drafting: Sequence[tuple[str, str, int]] = DRAFTING
    rules: Sequence[AcceptanceRule] = (AcceptanceRule.REJECTION, AcceptanceRule.BLOCK)
    checks: frozenset[str] = frozenset({"greedy", "identity", "distribution", "quality"})
    progress: Progress = lambda _: None

    def run(self) -> list[Result]:
        """Raises `ConfigError` where the model or a value is wrong."""
        config = parse(LocalConfig, dict(self.engine), where="engine")
        found: list[Result] = []
        if self.checks & {"greedy", "identity", "quality"}:
            self.progress(f"loading {config.model}")
            engine = load_engine(config)
            found += _Texts(self, config, engine).run()
        if "distribution" in self.checks:
            found += self.distributions(config)
        return found

    def distributions(self, config: LocalConfig) -> list[Result]:
        """Check (c), over slices of the target's vocabulary."""
        from outrider.text import Tokenizer

        info = target_info(config)
        tokenizer = Tokenizer(info.model)
        target = RealScore(_model(config, info, info.model))
        drafter = None
        if self.draft_model is not None:
            from outrider import models

            drafter = RealScore(_model(config, info, str(models.resolve(self.draft_model))))
        samples: list[distribution.Sampled] = []
        for case in distribution.HARD_CASES:
            for rule in AcceptanceRule:
                self.progress(f"distribution: {rule}, {case.name}")
                samples.append(
                    distribution.sample(
                        case.target,
                        vocab_size=case.words,
                        prompt=case.prompt,
                        setting=case.setting(rule),
                        draws=self.draws,
                        draft_score=case.drafter,
                        first_seed=self.draws * len(samples),
                    )
                )
        for context in CONTEXTS:
            prompt = tuple(tokenizer.encode(context))
            words = likely_words(target, prompt, size=SLICE_WORDS)
            score = Remembered(target.on(words))
            draft_score = None if drafter is None else Remembered(drafter.on(words))
            place = {word: index for index, word in enumerate(words)}
            for rule in AcceptanceRule:
                for setting in distribution.settings_of(rule):
                    self.progress(f"distribution: {rule}, {setting.name}, after {context!r}")
                    samples.append(
                        distribution.sample(
                            score,
                            vocab_size=len(words),
                            prompt=tuple(place[token] for token in prompt),
                            setting=setting,
                            draws=self.draws,
                            draft_score=draft_score,
                            first_seed=self.draws * len(samples),
                            after=context,
                        )
                    )
        return list(distribution.judge(samples))


def _model(config: LocalConfig, info: TargetInfo, folder: str) -> Any:
    """A model of its own: its cache is not the engine's."""
    return load_model(
        Path(folder),
        dtype=info.dtype,
        device=info.device,
        block_size=config.block_size,
        cpu_kernels=config.cpu_kernels,
        numerics="fast" if config.numerics == "fast" else "auto",
    )


class _Texts:
    """The comparisons of texts, over one engine: its prefix cache goes from run to run, as in a service."""

    def __init__(self, audit: LocalAudit, config: LocalConfig, engine: Engine) -> None:
        self._audit = audit
        self._config = config
        self._engine = engine
        self._info = target_info(config)
        self._strict = engine.model.numerics == "strict"
        self._plain = Service(config, engine)
        with self._plain.open(None) as service:
            tokenizer = service.tokenizer
            room = min(KEPT, self._info.max_model_len - audit.tokens)
            if room < 1:
                raise ConfigError(
                    f"--tokens {audit.tokens} leaves no room for a prompt in max_model_len "
                    f"{self._info.max_model_len}: lower the first"
                )
            encoded = [
                tokenizer.encode_chat([{"role": "user", "content": prompt}])
                if tokenizer.has_chat_template
                else tokenizer.encode(prompt)
                for prompt in audit.prompts
            ]
            self._prompts = [tuple(ids[:room]) for ids in encoded]
            self._eos = tokenizer.eos_token_ids
            self._spell = tokenizer.token_text
            self._requests = [
                service.request(ids, max_tokens=audit.tokens, logprobs=0, **options(index))
                for index, ids in enumerate(self._prompts)
            ]
            self._greedy = [
                service.request(ids, max_tokens=audit.tokens, temperature=0.0) for ids in self._prompts
            ]
        self._explainer = Explainer(Recomputed(engine), self._spell)

    def run(self) -> list[Result]:
        checks = self._audit.checks
        found: list[Result] = []
        if "greedy" in checks:
            found.append(self._against_transformers())
        if not checks & {"identity", "quality"}:
            return found
        self._audit.progress("identity: the reference, plain and one at a time")
        with self._plain.open(None) as service:
            reference = [service.generate_many([request])[0] for request in self._requests]
        pairs: dict[str, list[Completion]] = {}
        if "identity" in checks:
            plain = self._generate("plain, mixed concurrency", None, self._requests)
            found.append(self._compare("plain, mixed concurrency", reference, plain, drafting=False))
            for name, method, k in self._audit.drafting:
                texts = self._generate(name, self._speculative(method, k, reference), self._requests)
                found.append(self._compare(name, reference, texts, drafting=True))
                if method == "draft_model" and k == 4:
                    pairs["coupled"] = texts
        for rule in self._audit.rules:
            spec = self._speculative("draft_model", 4, reference, rule)
            once = self._generate(f"{rule}, draft_model, K = 4", spec, self._requests)
            pairs[str(rule)] = once
            if "identity" in checks:
                found.append(self._again(rule, once, spec))
        if "quality" in checks:
            sampled = [i for i, one in enumerate(self._requests) if not one.sampling.greedy]
            found += quality.compare(
                {
                    name: ([_text(reference[i]) for i in sampled], [_text(texts[i]) for i in sampled])
                    for name, texts in pairs.items()
                }
            )
        return found

    def _generate(
        self, name: str, speculative: dict[str, Any] | None, requests: Sequence[GenerationRequest]
    ) -> list[Completion]:
        texts: list[Completion] = []
        with self._plain.open(speculative) as service:
            for group in in_groups(requests):
                texts += service.generate_many(group)
                self._audit.progress(f"{name}: {len(texts)} of {len(requests)}")
        return texts

    def _speculative(
        self,
        method: str,
        k: int,
        reference: Sequence[Completion],
        rule: AcceptanceRule = AcceptanceRule.COUPLED,
    ) -> dict[str, Any]:
        spec: dict[str, Any] = {
            "method": method,
            "num_speculative_tokens": k,
            "rejection_sample_method": rule,
        }
        if method == "draft_model":
            spec["model"] = self._audit.draft_model or self._config.model
            spec["extra"] = dict(self._audit.draft_options)
        elif method in ("anti", "oracle", "scripted"):
            truth = [[one, text.tokens] for one, text in zip(self._prompts, reference, strict=True)]
            spec["extra"] = {"continuations": truth}
            if method == "scripted":
                spec["extra"]["accept"] = [k, 0, 2, 1, k - 1]
        return spec

    def _compare(
        self,
        name: str,
        reference: Sequence[Completion],
        found: Sequence[Completion],
        *,
        drafting: bool,
        explain: Callable[[int, Completion, Completion], Divergence | None] | None = None,
    ) -> Comparison:
        explain = explain or self._explain
        answers = [
            explain(i, one, other) for i, (one, other) in enumerate(zip(reference, found, strict=True))
        ]
        return Comparison(
            "identity",
            name,
            compared=len(reference),
            tokens=sum(len(one.tokens) for one in reference),
            divergences=tuple(one for one in answers if one is not None),
            drafted=sum(one.stats.draft_tokens for one in found),
            accepted=sum(one.stats.accepted_tokens for one in found),
            drafts_expected=drafting,
        )

    def _explain(self, index: int, reference: Completion, found: Completion) -> Divergence | None:
        request = self._requests[index]
        return self._explainer.explain(
            index, request.sampling, request.prompt, reference.tokens, found.tokens
        )

    def _again(self, rule: AcceptanceRule, once: Sequence[Completion], spec: dict[str, Any]) -> Comparison:
        """Under a ratio rule a seed's text hangs on drafter and K, and on nothing else: not on company."""
        name = f"{rule}, draft_model, K = 4: the same again, in reverse order"
        again = self._generate(name, spec, self._requests[::-1])[::-1]
        return self._compare(name, once, again, drafting=True, explain=self._explain_again)

    def _explain_again(self, index: int, once: Completion, again: Completion) -> Divergence | None:
        at = first_difference(once.tokens, again.tokens)
        if at is None:
            return None
        spelt = [
            f"{one.tokens[at]} {self._spell(one.tokens[at])!r}" if at < len(one.tokens) else "the end"
            for one in (once, again)
        ]
        verdict = Verdict.DEFECT if self._strict else Verdict.UNDECIDED
        reason = (
            "numerics are strict, so nothing may depend on other sequences"
            if self._strict
            else "numerics are fast: both models' rounding and the uniforms of the test decide together"
        )
        return Divergence(index, at, spelt[0], spelt[1], verdict, reason)

    def _against_transformers(self) -> Comparison:
        audit = self._audit
        done = 0

        def count(_: int) -> None:
            nonlocal done
            done += 1
            audit.progress(f"greedy: transformers, {done} of {len(self._prompts)}")

        audit.progress("greedy: loading transformers' model")
        other = Reference(
            Path(self._info.model), dtype=self._info.dtype, device=self._info.device, eos=self._eos
        )
        truth = other.generate(self._prompts, audit.tokens, count)
        found = self._generate("greedy", None, self._greedy)
        explainer = Explainer(self._explainer.recomputed, self._spell, other.ways, other.resolution)
        divergences = [
            explainer.explain(i, self._greedy[i].sampling, self._prompts[i], truth[i], found[i].tokens)
            for i in range(len(truth))
        ]
        return Comparison(
            "greedy",
            f"transformers' generate in {self._info.dtype}",
            compared=len(truth),
            tokens=sum(len(one) for one in truth),
            divergences=tuple(one for one in divergences if one is not None),
        )


@dataclass(frozen=True, slots=True)
class Service:
    """Makes local services over one engine, one after the other."""

    config: LocalConfig
    engine: Engine

    def open(self, speculative: dict[str, Any] | None) -> LocalService:
        """Every round waits for its drafts, so that K drafts are judged wherever K are given."""
        settings = self.config.model_dump(exclude_unset=True) | {
            "planner": {"gate_ms": 60_000},
            "speculative_config": speculative,
        }
        return LocalService(parse(LocalConfig, settings, where="engine"), engine=self.engine)


def _text(completion: Completion) -> quality.Text:
    return quality.Text(
        completion.tokens, [one.logprob for one in completion.logprobs], str(completion.finish)
    )
