"""What `outrider audit` was asked for, checked, and run in process or against a URL."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from outrider.audit.prompts import load
from outrider.audit.report import Report
from outrider.audit.results import Result
from outrider.errors import ConfigError
from outrider.messages import AcceptanceRule

LOCAL_CHECKS = ("greedy", "identity", "distribution", "quality")
SERVICE_CHECKS = ("identity", "distribution", "quality")
LOCAL_DRAWS, SERVICE_DRAWS = 20_000, 4_000


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """The command's options, as they were typed."""

    model: str | None
    url: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)  # "auto" where nothing was said
    overrides: tuple[str, ...] = ()  # KEY=VALUE of other engine keys
    draft_model: str | None = None
    prompts: int = 40
    prompt_file: Path | None = None
    tokens: int = 96
    draws: int | None = None
    rule: str | None = None  # rejection_sample_method of the service; None: coupled
    checks: tuple[str, ...] = ()  # none: all

    def chosen(self, known: tuple[str, ...]) -> frozenset[str]:
        """The checks to run. Raises `ConfigError` naming the one that there is not."""
        for name in self.checks:
            if name not in known:
                where = "with --url" if self.url is not None else "in process"
                raise ConfigError(f"--check {name!r}: {where} there are {', '.join(known)}")
        return frozenset(self.checks or known)


def run(asked: AuditOptions, progress: Callable[[str], None]) -> Report:
    """Raises `ConfigError` for what was typed wrong, other errors of ours for what failed."""
    prompts = load(asked.prompt_file, asked.prompts)
    return (
        _by_url(asked, prompts, progress) if asked.url is not None else _in_process(asked, prompts, progress)
    )


def _in_process(asked: AuditOptions, prompts: list[str], progress: Callable[[str], None]) -> Report:
    if asked.model is None:
        raise ConfigError("--model is missing: name a model to audit here, or a service with --url")
    if asked.rule is not None:
        raise ConfigError("--rule is for a running service: an audit in process tries all; leave it out")
    checks = asked.chosen(LOCAL_CHECKS)
    engine = {"model": asked.model, **asked.engine, **_overrides(asked.overrides)}
    from outrider.audit.local import LocalAudit

    audit = LocalAudit(
        engine,
        prompts,
        tokens=asked.tokens,
        draws=asked.draws or LOCAL_DRAWS,
        draft_model=asked.draft_model,
        checks=checks,
        progress=progress,
    )
    found = audit.run()
    told = ", ".join(f"{key} {value}" for key, value in engine.items() if value != "auto")
    return Report(f"in process: {told}; {len(prompts)} prompts x {asked.tokens} tokens", tuple(found))


def _by_url(asked: AuditOptions, prompts: list[str], progress: Callable[[str], None]) -> Report:
    for option, value in (("--draft-model", asked.draft_model), ("--set", asked.overrides)):
        if value:
            raise ConfigError(f"{option} is for an audit in process: a service has its own; leave it out")
    for key, value in asked.engine.items():
        if value != "auto":
            raise ConfigError(f"--{key} is for an audit in process: a service has its own; leave it out")
    checks = asked.chosen(SERVICE_CHECKS)
    from outrider.audit.service import Client, ServiceAudit

    assert asked.url is not None
    client = Client(asked.url, model=asked.model)
    try:
        audit = ServiceAudit(
            client,
            prompts,
            tokens=asked.tokens,
            draws=asked.draws or SERVICE_DRAWS,
            rule=_rule(asked.rule),
            checks=checks,
            progress=progress,
        )
        found: list[Result] = audit.run()
        numerics = client.numerics() or "not told"
    finally:
        client.close()
    about = f"{asked.url}, model {client.model}, numerics {numerics}"
    return Report(f"{about}; {len(prompts)} prompts x {asked.tokens} tokens", tuple(found))


def _rule(asked: str | None) -> AcceptanceRule:
    try:
        return AcceptanceRule(asked or AcceptanceRule.COUPLED)
    except ValueError:
        raise ConfigError(f"--rule {asked!r}: one of {', '.join(AcceptanceRule)}") from None


def _overrides(pairs: tuple[str, ...]) -> dict[str, Any]:
    """KEY=VALUE, the value read as YAML: numbers, true and false are what they look like."""
    read: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {pair!r}: KEY=VALUE, such as max_model_len=2048")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {pair!r}: the value is no YAML: {error}") from error
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"--set {pair!r}: a finite number")
        read[key] = value
    return read
