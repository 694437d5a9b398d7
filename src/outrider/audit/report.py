"""What an audit found, for people and for programs."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from rich.table import Table


class Outcome(enum.StrEnum):
    FINE = "fine"
    TIE = "numeric tie"  # texts differ where two tokens are equally good to the precision at hand
    DEFECT = "defect"
    SKIPPED = "skipped"  # could not be asked here; the detail says why


@dataclass(frozen=True, slots=True)
class Finding:
    """One question and its answer."""

    check: str  # greedy, seeds, fit, quality
    subject: str  # what was compared
    outcome: Outcome
    detail: str
    figures: tuple[tuple[str, float], ...] = ()


@dataclass(slots=True)
class Report:
    """All findings of one audit."""

    target: str
    findings: list[Finding] = field(default_factory=list)

    def add(self, findings: Iterable[Finding]) -> None:
        self.findings += findings

    @property
    def defects(self) -> int:
        return sum(finding.outcome is Outcome.DEFECT for finding in self.findings)

    @property
    def verdict(self) -> str:
        ties = sum(finding.outcome is Outcome.TIE for finding in self.findings)
        if self.defects:
            return f"{self.defects} defects"
        return f"lossless up to {ties} comparisons with numeric ties" if ties else "lossless"

    def as_json(self) -> str:
        findings = [asdict(finding) | {"figures": dict(finding.figures)} for finding in self.findings]
        document = {"target": self.target, "verdict": self.verdict, "findings": findings}
        return json.dumps(document, indent=2)

    def table(self) -> Table:
        colours = {
            Outcome.FINE: "green",
            Outcome.TIE: "yellow",
            Outcome.DEFECT: "red",
            Outcome.SKIPPED: "dim",
        }
        table = Table(title=f"{self.target}: {self.verdict}", title_justify="left")
        for column in ("check", "compared", "outcome", "detail"):
            table.add_column(column, overflow="fold")
        for finding in self.findings:
            colour = colours[finding.outcome]
            table.add_row(
                finding.check, finding.subject, f"[{colour}]{finding.outcome}[/{colour}]", finding.detail
            )
        return table
