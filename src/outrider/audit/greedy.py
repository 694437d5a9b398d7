"""Greedy texts against `transformers` itself, in the service's own precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider import models
from outrider.audit.divergence import Divergence, explain, finding, first_difference
from outrider.audit.report import Finding
from outrider.audit.seeds import run
from outrider.config import LocalConfig, SpeculativeConfig
from outrider.engine.engine import Engine


def check(
    engine: Engine,
    config: LocalConfig,
    prompts: Sequence[str],
    tokens: int,
    *,
    progress: Callable[[str], None] = lambda doing: None,
) -> list[Finding]:
    """With drafts by lookup, token by token what `generate` gives."""
    spec = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    progress("greedy, with drafts")
    ours = run(engine, config, prompts, tokens, spec=spec, greedy=True)
    reference = _load(models.resolve(config.model), engine.model.dtype, engine.model.device)
    found: list[Divergence] = []
    for number, (request, got) in enumerate(zip(ours.requests, ours.tokens, strict=True), start=1):
        progress(f"greedy, by transformers: {number} of {len(ours.requests)}")
        wanted = _generate(reference, request.prompt, tokens)[: len(got)]
        at = first_difference(wanted, got)
        if at is None:
            continue
        known = [*request.prompt, *wanted[:at]]
        theirs = _logits_after(reference, known)
        one = explain(engine, request.prompt, wanted, got, request.sampling, also=theirs)
        found += [one] if one is not None else []
    precision = str(engine.model.dtype).removeprefix("torch.")
    return [finding("greedy", f"ngram, K=4, against generate in {precision}", len(prompts), found)]


def _load(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.to(device).eval()


@torch.inference_mode()
def _generate(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    given = torch.tensor([list(prompt)], device=model.device)
    out = model.generate(
        given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=tokens, pad_token_id=0
    )
    generated: list[int] = out[0, len(prompt) :].tolist()
    return generated


@torch.inference_mode()
def _logits_after(model: Any, known: Sequence[int]) -> list[Tensor]:
    """transformers' own logits, computed in one piece and with a cache before the last token."""
    ids = torch.tensor([list(known)], device=model.device)
    whole = model(ids, use_cache=False).logits[0, -1].float()
    if len(known) < 2:
        return [whole]
    past = model(ids[:, :-1], use_cache=True).past_key_values
    last = model(ids[:, -1:], past_key_values=past, use_cache=True).logits[0, -1].float()
    return [whole, last]
