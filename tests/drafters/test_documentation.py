from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from outrider.config import SpeculativeConfig
from outrider.contracts import DraftContext, TargetInfo
from outrider.errors import ConfigError
from outrider.messages import SamplingParams
from outrider.registry import drafter_names

PAGE = (Path(__file__).parents[2] / "docs" / "drafters.md").read_text(encoding="utf-8")


def test_the_example_on_the_page_is_a_working_drafter() -> None:
    (code,) = re.findall(r"```python\n(from .*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, "drafters.md", "exec"), names)
    target = TargetInfo(model="", vocab_size=9, max_model_len=9, dtype="float32", device="cpu")
    drafter = names["RepeatDrafter"](SpeculativeConfig(), target)
    contexts = [DraftContext("a", (1, 2), 4, SamplingParams()), DraftContext("b", (3,), 1, SamplingParams())]
    assert drafter.propose(contexts) == [[2, 2], [3]]
    drafter.forget("a")
    with pytest.raises(ConfigError, match="at_most 0"):
        names["RepeatDrafter"](SpeculativeConfig(extra={"at_most": 0}), target)


def test_every_drafter_of_ours_is_on_the_page() -> None:
    missing = [name for name in drafter_names() if f"`{name}`" not in PAGE]
    assert missing == []
