"""Check (a): greedy text against `transformers`, token by token, in the service's dtype.

Two implementations round differently, so in 16 bits texts may part at a tie; `divergence` tells which do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Reference:
    """The same checkpoint in transformers."""

    def __init__(self, folder: Path, *, dtype: str, device: str, eos: Sequence[int]) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model = self._model.to(device).eval()
        self.resolution = float(torch.finfo(getattr(torch, dtype)).eps)
        # Renamed between releases that we support.
        arguments = inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in arguments else "past_key_values"
        self._device = device
        self._eos = list(eos)

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, progress: Callable[[int], None] = lambda _: None
    ) -> list[tuple[int, ...]]:
        """What `generate` writes, one prompt at a time."""
        texts = []
        for prompt in prompts:
            ids = torch.tensor([list(prompt)], device=self._device)
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                # A checkpoint's own generation config may ask for more than greedy search.
                temperature=None,
                top_p=None,
                top_k=None,
                repetition_penalty=1.0,
                eos_token_id=self._eos or None,
                pad_token_id=self._eos[0] if self._eos else 0,
            )
            texts.append(tuple(output[0, len(prompt) :].tolist()))
            progress(1)
        return texts

    @torch.inference_mode()
    def ways(self, prefix: Sequence[int]) -> dict[str, Tensor]:
        """Logits after a prefix: computed whole, and its last token on top of a cache."""
        from transformers import DynamicCache

        ids = torch.tensor([list(prefix)], device=self._device)
        whole = self._model(ids).logits[0, -1]
        ways = {"transformers, whole": whole.float().cpu()}
        if len(prefix) > 1:
            cache = {self._cache_argument: DynamicCache(config=self._model.config)}
            self._model(ids[:, :-1], use_cache=True, **cache)
            step = self._model(ids[:, -1:], use_cache=True, **cache).logits[0, -1]
            ways["transformers, one token"] = step.float().cpu()
        return ways
