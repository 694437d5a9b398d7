"""What an audit found, as a table, as JSON and as an exit code."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.audit.results import Comparison, Result, Status
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

MOST_SHOWN = 5
"""Diverging texts listed below the table, a comparison; JSON has them all."""

STYLES = {Status.FINE: "green", Status.DEFECT: "bold red", Status.TIES: "yellow"}


@dataclass(frozen=True, slots=True)
class Report:
    """One audit. `about`: what was audited, in words."""

    about: str
    results: tuple[Result, ...]

    @property
    def defects(self) -> list[Result]:
        return [one for one in self.results if one.status is Status.DEFECT]

    @property
    def exit_code(self) -> int:
        """0: no defect. 1: defects, or an audit that saw nothing at all."""
        seen = any(one.status is not Status.NOTHING for one in self.results)
        return 1 if self.defects or not seen else 0

    @property
    def conclusion(self) -> str:
        if self.defects:
            return f"{len(self.defects)} of {len(self.results)} checks found defects"
        counts = {status: sum(one.status is status for one in self.results) for status in Status}
        said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        return f"no defect in {len(self.results)} checks: {said}"

    def document(self) -> dict[str, Any]:
        """JSON's content. Numbers that are not finite are null."""
        results = [
            {"check": one.check, "name": one.name, "status": one.status, "summary": one.summary}
            | {key: value for key, value in asdict(one).items() if key not in ("check", "name")}  # type: ignore[call-overload]
            for one in self.results
        ]
        clean: dict[str, Any] = _finite(
            {
                "about": self.about,
                "exit_code": self.exit_code,
                "conclusion": self.conclusion,
                "results": results,
            }
        )
        return clean

    def write(self, file: Path) -> None:
        try:
            file.write_text(json.dumps(self.document(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {file} cannot be written: {error}") from error

    def show(self, console: Console) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(self.about), title_justify="left")
        for column in ("check", "what", "result", "seen"):
            table.add_column(column, overflow="fold")
        for one in self.results:
            status = Text(one.status, style=STYLES.get(one.status, ""))
            table.add_row(Text(one.check), Text(one.name), status, Text(one.summary))
        console.print(table)
        for one in self.results:
            if isinstance(one, Comparison):
                for line in _divergences(one):
                    console.print(Text(line))
        console.print(Text(self.conclusion))


def _divergences(comparison: Comparison) -> Sequence[str]:
    # Defects first: they are what somebody must look at.
    listed = sorted(comparison.divergences, key=lambda one: one.verdict != "defect")
    lines = []
    for one in listed[:MOST_SHOWN]:
        lines.append(
            f"{comparison.name}, prompt {one.request}, generated token {one.position}: {one.reference} in "
            f"the reference, {one.found} here: {one.verdict}: {one.reason}"
        )
        lines += [
            f"    {way.way:32} {way.reference:12.5f} {way.found:12.5f}   best {way.best:.5f} "
            f"(token {way.best_token})"
            for way in one.scores
        ]
    if len(listed) > MOST_SHOWN:
        lines.append(f"{comparison.name}: {len(listed) - MOST_SHOWN} more, see --json")
    return lines


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
