"""Any supported causal language model of `transformers` as the engine's `CausalModel`.

A step is one forward of the whole model over one flat row of tokens, (1, R), with explicit positions. All
that transformers would keep or mask is ours: its cache is off, and its attention layers call
`PagedAttention`.

The KV cache keeps every position, also in layers with a sliding window: a window only limits what is read. A
cache that wraps around, as transformers' own does, could not be rolled back after a rejected draft.
"""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine import strict
from outrider.engine.model import Batch, Numerics
from outrider.engine.packed_linear import PackedLinear, pack_linears
from outrider.engine.paged_attention import (
    INTERFACE,
    Attend,
    Layer,
    PagedAttention,
    Pool,
    Step,
    attend_torch,
    attending,
    register,
)
from outrider.engine.probe import LayerProfile, check_config, probe
from outrider.errors import ConfigError

logger = logging.getLogger(__name__)


class TransformersModel:
    """A checkpoint folder, ready to run batches once `allocate` was called.

    Raises `ConfigError` where the folder is no loadable checkpoint, or the model is one that `probe` refuses.
    Not thread-safe: one engine, one thread. Several models may run side by side in threads of their own.
    """

    def __init__(
        self,
        path: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int,
        pack_linears: bool = True,
        numerics: Numerics = "fast",
    ) -> None:
        """numerics: "strict" keeps every row's bits apart from its company; raises `ConfigError` where that
        cannot be kept."""
        if numerics == "strict" and device.type == "cpu" and (threads := torch.get_num_threads()) > 1:
            raise ConfigError(
                f"numerics: strict takes one thread with torch's kernels, not {threads}: they cut a step "
                "among threads at places that depend on its rows; say cpu_threads: 1, or numerics: fast"
            )
        self.numerics = numerics
        self.block_size = block_size
        self.device = device
        self.dtype = dtype
        register()
        self._model = _load(path, dtype, device, numerics)
        self.max_model_len = _max_model_len(self._model.config.get_text_config())
        self._attend = _kernel(device, numerics)
        with torch.inference_mode():
            profile = probe(self._model, attend=self._attend, max_model_len=self.max_model_len)
        self.vocab_size = profile.vocab_size
        self._layers = profile.layers
        self._selects_rows = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        if pack_linears and dtype == torch.bfloat16 and device.type == "cpu":
            _pack(self._model, fuse=numerics == "fast")  # tiles of one input are not one tensor
        self._attention: PagedAttention | None = None
        if numerics == "strict":
            _tile(self._model, device)
            self._refuse_unless_strict(path)

    def _refuse_unless_strict(self, path: Path) -> None:
        """Strict numerics rest on what libraries do and do not promise, so here they show it."""
        self.allocate(strict.check_blocks(self))
        moved = strict.rows_that_change(self)
        self._attention = None
        if count := int((moved > 0).sum()):
            raise ConfigError(
                f"numerics: strict cannot be kept for {path} on this machine: {count} of {len(moved)} rows "
                f"change with their company, by up to {float(moved.max()):.3g}; say numerics: fast"
            )

    def bytes_per_block(self) -> int:
        """KV bytes of one block over all layers; layers that share keys and values count once."""
        token = sum(
            layer.kv_heads * (layer.key_size + layer.value_size)
            for layer in self._layers
            if layer.shared_with is None
        )
        return token * self.block_size * self.dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        """Make room for `num_blocks` blocks. Called once, before the first forward."""
        layers: list[Layer] = []
        for profile in self._layers:
            shared = None if profile.shared_with is None else layers[profile.shared_with]
            pool = self._pool(profile, num_blocks) if shared is None else shared.pool
            layers.append(Layer(pool, profile.scoring, writes=shared is None))
        modules = [profile.module for profile in self._layers]
        self._attention = PagedAttention(dict(zip(modules, layers, strict=True)), self._attend)

    def _pool(self, profile: LayerProfile, num_blocks: int) -> Pool:
        shape = (num_blocks, self.block_size, profile.kv_heads)
        return Pool(
            torch.zeros(*shape, profile.key_size, dtype=self.dtype, device=self.device),
            torch.zeros(*shape, profile.value_size, dtype=self.dtype, device=self.device),
        )

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Write the rows' keys and values into their blocks and return logits (L, V) in float32, on
        `device`."""
        attention = self._attention
        assert attention is not None, "allocate comes before the first forward"
        attention.begin(Step(batch, block_size=self.block_size, device=self.device))
        wanted = batch.logit_rows.to(self.device)
        selection = {"logits_to_keep": wanted} if self._selects_rows else {}
        with attending(attention):
            output = self._model(
                input_ids=batch.tokens.to(self.device)[None],
                position_ids=batch.positions.to(self.device)[None],
                use_cache=False,
                **selection,
            )
        logits: Tensor = output.logits[0]
        # The few families that cannot be told to select compute all rows; their head's scaling stays theirs.
        return (logits if self._selects_rows else logits[wanted]).float()


def _load(path: Path, dtype: torch.dtype, device: torch.device, numerics: Numerics) -> Any:
    """The transformers model in eval mode, after the checks that need no weights."""
    from safetensors import SafetensorError
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    if not path.is_dir():
        raise ConfigError(f"model: there is no folder {path}; name a folder with a checkpoint")
    if not (path / "config.json").is_file():
        raise ConfigError(f"model: {path} has no config.json, so it is no checkpoint of a transformers model")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model: {path / 'config.json'} cannot be read: {_first_line(error)}") from error
    check_config(config, MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None))
    if numerics == "strict" and (reason := strict.why_not(config.get_text_config())):
        raise ConfigError(f"numerics: strict cannot be kept for {path}: {reason}; say numerics: fast")
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=INTERFACE,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise ConfigError(f"model: {path} cannot be loaded: {_first_line(error)}") from error
    # transformers fills what a checkpoint lacks with random numbers and warns; a service must not.
    missing = sorted(loading["missing_keys"])
    if missing:
        raise ConfigError(f"model: {path} lacks {len(missing)} weights, the first is {missing[0]}")
    return model.to(device).eval()


def _max_model_len(text_config: Any) -> int:
    length = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise ConfigError(
            f"model: {text_config.model_type} names no max_position_embeddings in its config.json"
        )
    return length


def _kernel(device: torch.device, numerics: Numerics) -> Attend:
    if device.type != "cuda":
        return strict.attend_strict if numerics == "strict" else attend_torch
    from outrider.engine.triton_attention import attend_triton

    return attend_triton


def _pack(model: nn.Module, *, fuse: bool) -> None:
    count = pack_linears(model, fuse=fuse)
    logger.info("packed %d linear layers for oneDNN", count)


def _tile(model: nn.Module, device: torch.device) -> None:
    from transformers.pytorch_utils import Conv1D

    if device.type == "cuda":
        from outrider.engine.triton_linear import replace_linears

        count = replace_linears(model)
    else:
        strict.pad_activations(model)
        count = strict.tile_linears(model, (nn.Linear, Conv1D, PackedLinear))
    logger.info("strict numerics: %d linear layers work on fixed tiles", count)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
