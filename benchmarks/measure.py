"""What every benchmark here needs: the machine in words, and ratios of paired times with their spread."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

# Two-sided 97.5 % quantiles of Student's t by degrees of freedom; 1.96 beyond.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12)


def half_interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of a mean; infinite for fewer than two values."""
    if len(values) < 2:
        return math.inf
    quantile = _T[len(values) - 2] if len(values) - 2 < len(_T) else 1.96
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True, slots=True)
class Ratio:
    """The geometric mean of paired ratios, with the 95 % interval of it and the number of pairs."""

    mean: float
    low: float
    high: float
    pairs: int

    @classmethod
    def of(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
        logs = [math.log(a / b) for a, b in zip(numerators, denominators, strict=True)]
        mean = statistics.fmean(logs)
        if len(logs) < 2:
            return cls(math.exp(mean), 0.0, math.inf, len(logs))
        spread = half_interval(logs)
        return cls(math.exp(mean), math.exp(mean - spread), math.exp(mean + spread), len(logs))

    def __str__(self) -> str:
        return f"{self.mean:5.2f}  [{self.low:.2f}, {self.high:.2f}]  n={self.pairs}"


@dataclass(slots=True)
class Report:
    """Collected figures: printed as they come, written as JSON at the end."""

    machine: str
    ratios: dict[str, Ratio] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)

    def ratio(self, name: str, value: Ratio) -> None:
        self.ratios[name] = value
        print(f"  {name:42} {value}", flush=True)

    def figure(self, name: str, value: float, unit: str) -> None:
        self.figures[name] = value
        print(f"  {name:42} {value:.1f} {unit}", flush=True)

    def write(self, path: Path) -> None:
        """`ratios` are plain numbers; their intervals stand under `intervals`."""
        document = {
            "machine": self.machine,
            "ratios": {name: ratio.mean for name, ratio in self.ratios.items()},
            "intervals": {name: asdict(ratio) for name, ratio in self.ratios.items()},
            "figures": self.figures,
        }
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def machine() -> str:
    """Processor, cores, load and the versions that decide speed."""
    import torch
    import transformers

    return (
        f"{_processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(len(ordered) * percent / 100) - 1)]
