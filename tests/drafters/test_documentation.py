from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.config import SpeculativeConfig
from outrider.contracts import Draft, DraftContext, TargetInfo
from outrider.errors import ConfigError
from outrider.messages import AcceptanceRule, SamplingParams
from outrider.registry import drafter_names
from outrider.sampling.draft import draw_drafts
from outrider.sampling.draft_probs import certain, check, pack
from outrider.sampling.processors import Lane

PAGE = (Path(__file__).parents[2] / "docs" / "drafters.md").read_text(encoding="utf-8")


def test_the_example_on_the_page_is_a_working_drafter() -> None:
    (code,) = re.findall(r"```python\n(from .*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, "drafters.md", "exec"), names)
    target = TargetInfo(model="", vocab_size=9, max_model_len=9, dtype="float32", device="cpu")
    drafter = names["RepeatDrafter"](SpeculativeConfig(), target)
    ratio = SamplingParams(rule=AcceptanceRule.REJECTION)
    contexts = [DraftContext("a", (1, 2), 4, SamplingParams()), DraftContext("b", (3,), 1, ratio)]
    assert drafter.propose(contexts) == [Draft((2, 2)), Draft((3,), certain((3,)))]
    drafter.forget("a")
    with pytest.raises(ConfigError, match="at_most 0"):
        names["RepeatDrafter"](SpeculativeConfig(extra={"at_most": 0}), target)


def test_the_draws_on_the_page_ship_what_they_were_drawn_from() -> None:
    draws, ships = re.findall(r"```python\n((?:drawn|probs) = .*?)```", PAGE, flags=re.DOTALL)
    sampling = SamplingParams(rule=AcceptanceRule.BLOCK, presence_penalty=0.5, top_k=3)
    context = DraftContext("a", (1, 2, 3), 1, sampling, prompt_len=2)
    names: dict[str, Any] = {
        "draw_drafts": draw_drafts,
        "Draft": Draft,
        "Lane": Lane,
        "config": SpeculativeConfig(rejection_sample_method=AcceptanceRule.BLOCK),
        "context": context,
        "contexts": [context],
        "logits": torch.arange(9.0).unsqueeze(0),
        "pack": pack,
        "target": TargetInfo(model="", vocab_size=9, max_model_len=9, dtype="float32", device="cpu"),
        "torch": torch,
    }
    exec(draws, names)
    names |= {"tokens": names["drawn"].tokens.tolist(), "ids": [names["drawn"].ids[0]]}
    names |= {"probs": [names["drawn"].probs[0]]}
    exec(ships.replace("Draft(tuple", "draft = Draft(tuple"), names)
    draft = names["draft"]
    assert check(draft.probs, draft.tokens, 9).rows == 1
    assert draft.tokens[0] in (8, 7, 6)


def test_every_key_that_all_drafters_share_is_on_the_page() -> None:
    own = {"method", "model", "max_model_len", "prompt_lookup_max", "prompt_lookup_min", "extra"}
    missing = [name for name in SpeculativeConfig.model_fields.keys() - own if f"| `{name}` |" not in PAGE]
    assert missing == []


def test_every_drafter_of_ours_is_on_the_page() -> None:
    missing = [name for name in drafter_names() if f"`{name}`" not in PAGE]
    assert missing == []
