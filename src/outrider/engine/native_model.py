"""Llama-shaped models in bfloat16 on a CPU: one C call a step, weights in one arena in reading order.

Covers Llama, Mistral (with its window), Qwen2 and Qwen3 as transformers defines them: RMSNorm, rotary
embedding by halves, grouped-query attention, SwiGLU. Everything else runs on `TransformersModel`.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.engine.loading import text_config
from outrider.engine.model import Batch
from outrider.engine.native import library
from outrider.errors import ConfigError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those that depend on the position alone
GROUP = 64  # outputs that lie together in a packed matrix
MAX_HEAD_DIM = 256


def unsupported(folder: Path, dtype: torch.dtype) -> str | None:
    """Why the C kernels cannot run this checkpoint here; None when they can."""
    config = text_config(folder)
    if dtype is not torch.bfloat16:
        return f"the C kernels compute in bfloat16, not {dtype}"
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        return f"{architecture} is none of {', '.join(ARCHITECTURES)}"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        return f"rope type {rope_type!r} is none of {', '.join(ROPE_TYPES)}"
    if config.get("quantization_config"):
        return "the checkpoint is quantised"
    if config.get("hidden_act", "silu") != "silu":
        return f"the activation is {config['hidden_act']}, not silu"
    if config.get("mlp_bias") or (config.get("attention_bias") and architecture != "Qwen2ForCausalLM"):
        return "its matrices have biases"
    if len(set(config.get("layer_types") or ["full_attention"])) > 1:
        return "its layers are of several kinds"
    sizes = {
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "head_dim": _head_dim(config),
    }
    for name, size in sizes.items():
        if size % 32:
            return f"{name} {size} is no multiple of 32"
    if sizes["head_dim"] > MAX_HEAD_DIM:
        return f"head_dim {sizes['head_dim']} is above {MAX_HEAD_DIM}"
    try:
        library.load()
    except library.BuildError as error:
        return str(error)
    return None


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


class NativeModel:
    """`CausalModel` over kernels.c. One thread; a call releases the interpreter."""

    def __init__(self, folder: Path, *, block_size: int) -> None:
        """Read and pack the weights. Raises `ConfigError`."""
        config = text_config(folder)
        if block_size % 32:
            raise ConfigError(f"block_size {block_size} is no multiple of 32, which the C kernels need")
        self.device = torch.device("cpu")
        self.dtype = torch.bfloat16
        self.block_size = block_size
        self.vocab_size = int(config["vocab_size"])
        self.max_model_len = int(config["max_position_embeddings"])
        self._library = library.load()
        self._padded_vocab = -(-self.vocab_size // GROUP) * GROUP
        self._kept: list[Any] = []  # what C points into
        self._pools: list[Tensor] = []
        self._scratch = torch.empty(0, dtype=torch.bfloat16)
        with ExitStack() as stack:
            self._load(config, _Checkpoint(folder, stack))

    # ---- the model contract

    def bytes_per_block(self) -> int:
        sizes = self._model
        return int(sizes.layers * 2 * sizes.kv_heads * sizes.head_dim * self.block_size * 2)

    def allocate(self, num_blocks: int) -> None:
        sizes = self._model
        shape = (num_blocks, sizes.kv_heads, self.block_size * sizes.head_dim)
        # Zeros: what was never written is multiplied by a weight of 0, and must not be a NaN.
        self._pools = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2 * sizes.layers)]
        for index in range(sizes.layers):
            self._layers[index].keys = self._pools[2 * index].data_ptr()
            self._layers[index].values = self._pools[2 * index + 1].data_ptr()

    def forward(self, batch: Batch) -> Tensor:
        rows, wanted = len(batch.tokens), len(batch.logit_rows)
        if rows * self._values_per_row > self._scratch.numel():
            self._scratch = torch.empty(rows * self._values_per_row, dtype=torch.bfloat16)
        spans = batch.spans
        blocks = [block for span in spans for block in span.blocks]
        tables = [0]
        for span in spans:
            tables.append(tables[-1] + len(span.blocks))
        starts, counts, lengths, table, block_ids = (
            torch.tensor(values, dtype=torch.int64)
            for values in (
                [span.start for span in spans],
                [span.rows for span in spans],
                [span.length for span in spans],
                tables,
                blocks,
            )
        )
        logits = torch.empty(wanted, self._padded_vocab)
        described = library.Batch(
            rows,
            len(spans),
            wanted,
            batch.tokens.data_ptr(),
            batch.positions.data_ptr(),
            batch.logit_rows.data_ptr(),
            starts.data_ptr(),
            counts.data_ptr(),
            lengths.data_ptr(),
            table.data_ptr(),
            block_ids.data_ptr(),
        )
        self._library.outrider_forward(
            ctypes.addressof(self._model),
            ctypes.addressof(self._layers),
            ctypes.addressof(described),
            self._scratch.data_ptr(),
            logits.data_ptr(),
        )
        return logits[:, : self.vocab_size]

    # ---- loading

    def _load(self, config: dict[str, Any], checkpoint: _Checkpoint) -> None:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim, intermediate = _head_dim(config), int(config["intermediate_size"])
        num_layers = int(config["num_hidden_layers"])
        tied = bool(config.get("tie_word_embeddings", False))
        wide = (heads + 2 * kv_heads) * head_dim
        self._values_per_row = 3 * hidden + wide + heads * head_dim + intermediate
        shapes = [
            (wide, hidden),
            (hidden, heads * head_dim),
            (2 * intermediate, hidden),
            (hidden, intermediate),
        ]
        self._arena = _Arena(
            2 * num_layers * sum(-(-n // GROUP) * GROUP * k for n, k in shapes)
            + 2 * self._padded_vocab * hidden
        )
        self._layers = (library.Layer * num_layers)()
        for index in range(num_layers):
            self._load_layer(self._layers[index], checkpoint, f"model.layers.{index}.", config)
        cosines, sines = _rotary_table(config, self.max_model_len)
        embedding = checkpoint.read("model.embed_tokens.weight")
        head = self._pack(embedding if tied else checkpoint.read("lm_head.weight"))
        self._model = library.Model(
            hidden,
            heads,
            kv_heads,
            head_dim,
            intermediate,
            self._padded_vocab,
            num_layers,
            self.block_size,
            float(config["rms_norm_eps"]),
            head_dim**-0.5,
            int(tied),
            head if tied else self._keep(embedding),
            self._keep(checkpoint.read("model.norm.weight")),
            head,
            self._keep(cosines),
            self._keep(sines),
        )

    def _load_layer(
        self, layer: library.Layer, checkpoint: _Checkpoint, prefix: str, config: dict[str, Any]
    ) -> None:
        def read(name: str) -> Tensor:
            return checkpoint.read(prefix + name)

        def read_if_there(name: str) -> Tensor | None:
            return read(name) if checkpoint.has(prefix + name) else None

        qkv = [f"self_attn.{name}_proj" for name in "qkv"]
        gate, up = read("mlp.gate_proj.weight"), read("mlp.up_proj.weight")
        # 32 gates, then their 32 ups: one group of the kernel holds what SwiGLU multiplies.
        halves = [gate.reshape(-1, 32, gate.shape[1]), up.reshape(-1, 32, up.shape[1])]
        gate_up = torch.stack(halves, dim=1).reshape(-1, gate.shape[1])
        layer.input_norm = self._keep(read("input_layernorm.weight"))
        layer.post_norm = self._keep(read("post_attention_layernorm.weight"))
        layer.q_norm = self._keep_if(read_if_there("self_attn.q_norm.weight"))
        layer.k_norm = self._keep_if(read_if_there("self_attn.k_norm.weight"))
        layer.qkv = self._pack(torch.cat([read(f"{name}.weight") for name in qkv]))
        biases = [bias for name in qkv if (bias := read_if_there(f"{name}.bias")) is not None]
        layer.qkv_bias = self._keep_if(torch.cat(biases) if biases else None)
        layer.o = self._pack(read("self_attn.o_proj.weight"))
        layer.gate_up = self._pack(gate_up)
        layer.down = self._pack(read("mlp.down_proj.weight"))
        # Qwen2 and Qwen3 name a window that use_sliding_window switches on; Mistral's is always on.
        windowed = config.get("use_sliding_window", True)
        layer.window = int(config.get("sliding_window") or 0) if windowed else 0

    def _pack(self, weight: Tensor) -> int:
        n, k = weight.shape
        address = self._arena.take(2 * -(-n // GROUP) * GROUP * k)
        self._library.outrider_pack(weight.contiguous().data_ptr(), address, n, k)
        return address

    def _keep(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _keep_if(self, tensor: Tensor | None) -> int | None:
        return None if tensor is None else self._keep(tensor)


class _Arena:
    """One run of memory on huge pages: the hardware prefetcher and the TLB see a single stream."""

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._left = size

    def take(self, size: int) -> int:
        """The address of the next `size` bytes."""
        address = self._address + len(self._memory) - self._left
        self._left -= size
        return address


class _Checkpoint:
    """The tensors of a folder by name, in bfloat16, whatever files they lie in."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        from safetensors import safe_open

        files = [
            stack.enter_context(safe_open(path, framework="pt"))
            for path in sorted(folder.glob("*.safetensors"))
        ]
        if not files:
            raise ConfigError(f"{folder} has no *.safetensors file: save the model as safetensors")
        self._files: dict[str, Any] = dict(_names(files))

    def has(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str) -> Tensor:
        if name not in self._files:
            raise ConfigError(f"the checkpoint has no tensor {name!r}: it is not the model its config names")
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor.to(torch.bfloat16)


def _names(files: list[Any]) -> Iterator[tuple[str, Any]]:
    for file in files:
        for name in file.keys():  # noqa: SIM118 - a file handle, not a dict
            yield name, file


def _rotary_table(config: dict[str, Any], positions: int) -> tuple[Tensor, Tensor]:
    """(positions, head_dim / 2) cosines and sines in float32, by transformers' own definitions."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    known = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    rotary = LlamaRotaryEmbedding(AutoConfig.for_model("llama", **known))
    angles = torch.arange(positions)[:, None].float() * rotary.inv_freq[None, :].float()
    scaling = float(rotary.attention_scaling)
    return angles.cos() * scaling, angles.sin() * scaling
