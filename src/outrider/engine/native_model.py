"""Llama-shaped models on a CPU, in bfloat16 or float32: one C call a step, weights in reading order.

Covers Llama, Mistral (with its window), Qwen2 and Qwen3 as transformers defines them: RMSNorm, rotary
embedding by halves, grouped-query attention, SwiGLU. Everything else runs on `TransformersModel`.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.engine.loading import text_config
from outrider.engine.model import Batch, Numerics
from outrider.engine.native import library
from outrider.errors import ConfigError

LLAMA, MISTRAL, QWEN2, QWEN3 = ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those that depend on the position alone
GROUP = 64  # outputs that lie together in a packed matrix
STEP = 32  # what every width is a multiple of: the depth of a tile
ELEMENTS: dict[torch.dtype, library.Element] = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Sizes:
    """What config.json says about the shapes of the tensors."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    layers: int
    positions: int

    @classmethod
    def read(cls, config: dict[str, Any]) -> Sizes:
        """Raises `ConfigError` for a size that is missing or no count; transformers may know a default."""

        def size(key: str) -> int:
            value = config.get(key)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"config.json says {key}: {value!r}, which is no count")
            return value

        architecture = _architecture(config)
        hidden, heads = size("hidden_size"), size("num_attention_heads")
        derived = config.get("head_dim") is None and architecture != QWEN3
        ungrouped = config.get("num_key_value_heads") is None and architecture == LLAMA
        return cls(
            hidden=hidden,
            heads=heads,
            kv_heads=heads if ungrouped else size("num_key_value_heads"),
            head_dim=hidden // heads if derived else size("head_dim"),
            intermediate=size("intermediate_size"),
            vocab=size("vocab_size"),
            layers=size("num_hidden_layers"),
            positions=size("max_position_embeddings"),
        )

    @property
    def attended(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def wide(self) -> int:
        """Width of queries, keys and values together."""
        return self.attended + 2 * self.keys


def unsupported(folder: Path, dtype: torch.dtype, block_size: int) -> str | None:
    """Why the C kernels cannot run this checkpoint here; None when they can."""
    config = text_config(folder)
    if dtype not in ELEMENTS:
        return f"the C kernels compute in {' or '.join(ELEMENTS.values())}, not {dtype}"
    architecture = _architecture(config)
    if architecture not in ARCHITECTURES:
        return f"{architecture} is none of {', '.join(ARCHITECTURES)}"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        return f"rope type {rope_type!r} is none of {', '.join(ROPE_TYPES)}"
    if (rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1) != 1:
        return "it rotates a part of each head only"
    if config.get("quantization_config"):
        return "the checkpoint is quantised"
    if config.get("hidden_act", "silu") != "silu":
        return f"the activation is {config['hidden_act']}, not silu"
    if config.get("mlp_bias") or (config.get("attention_bias") and architecture != QWEN2):
        return "its matrices have biases"
    if len(set(config.get("layer_types") or ["full_attention"])) > 1:
        return "its layers are of several kinds"
    if config.get("use_sliding_window") and not config.get("layer_types"):
        return "it does not say which of its layers have the window"
    if not isinstance(config.get("rms_norm_eps"), float):
        return f"config.json says rms_norm_eps: {config.get('rms_norm_eps')!r}, which is no fraction"
    try:
        sizes = Sizes.read(config)
    except ConfigError as error:
        return str(error)
    if reason := _unsupported_size(sizes, block_size):
        return reason
    try:
        library.load(ELEMENTS[dtype])
    except library.BuildError as error:
        return str(error)
    return None


def _unsupported_size(sizes: Sizes, block_size: int) -> str | None:
    for name, size in {
        "block_size": block_size,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "head_dim": sizes.head_dim,
    }.items():
        if size % STEP or size == 0:
            return f"{name} {size} is no multiple of {STEP}"
    if sizes.head_dim > MAX_HEAD_DIM:
        return f"head_dim {sizes.head_dim} is above {MAX_HEAD_DIM}"
    if sizes.heads % sizes.kv_heads:
        return f"{sizes.heads} heads do not share {sizes.kv_heads} key-value heads evenly"
    return None


def _architecture(config: dict[str, Any]) -> str:
    return str((config.get("architectures") or ["none"])[0])


class NativeModel:
    """`CausalModel` over kernels.c. One thread; a call releases the interpreter."""

    numerics: Numerics = "strict"

    def __init__(self, folder: Path, *, dtype: torch.dtype, block_size: int) -> None:
        """Read and pack the weights. Raises `ConfigError`: unsupported, or not what config.json says."""
        if reason := unsupported(folder, dtype, block_size):
            raise ConfigError(f"the C kernels cannot run {folder}: {reason}")
        config = text_config(folder)
        self.device = torch.device("cpu")
        self.dtype = dtype
        self.block_size = block_size
        self._sizes = Sizes.read(config)
        self.vocab_size = self._sizes.vocab
        self.max_model_len = self._sizes.positions
        self._library = library.load(ELEMENTS[dtype])
        self._padded_vocab = _padded(self.vocab_size)
        self._kept: list[Any] = []  # what C points into
        self._pools: list[Tensor] = []
        self._scratch = torch.empty(0, dtype=dtype)
        with ExitStack() as stack:
            self._load(config, _Checkpoint(folder, dtype, stack))

    # ---- the model contract

    def bytes_per_block(self) -> int:
        return self._sizes.layers * 2 * self._sizes.keys * self.block_size * self.dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        sizes = self._sizes
        shape = (num_blocks, sizes.kv_heads, self.block_size * sizes.head_dim)
        # Zeros: what was never written is multiplied by a weight of 0, and must not be a NaN.
        self._pools = [torch.zeros(shape, dtype=self.dtype) for _ in range(2 * sizes.layers)]
        for index in range(sizes.layers):
            self._layers[index].keys = self._pools[2 * index].data_ptr()
            self._layers[index].values = self._pools[2 * index + 1].data_ptr()

    def forward(self, batch: Batch) -> Tensor:
        rows, wanted = len(batch.tokens), len(batch.logit_rows)
        if rows * self._values_per_row > self._scratch.numel():
            self._scratch = torch.empty(rows * self._values_per_row, dtype=self.dtype)
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
        sizes = self._sizes
        hidden, intermediate = sizes.hidden, sizes.intermediate
        tied = bool(config.get("tie_word_embeddings", False))
        self._values_per_row = 3 * hidden + sizes.wide + sizes.attended + intermediate
        a_layer = _packed(sizes.wide, hidden) + _packed(hidden, sizes.attended)
        a_layer += _packed(2 * intermediate, hidden) + _packed(hidden, intermediate)
        elements = sizes.layers * a_layer + _packed(sizes.vocab, hidden)
        self._arena = _Arena(elements * self.dtype.itemsize)
        self._layers = (library.Layer * sizes.layers)()
        for index in range(sizes.layers):
            self._load_layer(self._layers[index], checkpoint, f"model.layers.{index}.", config)
        cosines, sines = _rotary_table(config, sizes)
        embedding = checkpoint.read("model.embed_tokens.weight", sizes.vocab, hidden)
        head = self._pack(embedding if tied else checkpoint.read("lm_head.weight", sizes.vocab, hidden))
        self._model = library.Model(
            hidden,
            sizes.heads,
            sizes.kv_heads,
            sizes.head_dim,
            intermediate,
            self._padded_vocab,
            sizes.layers,
            self.block_size,
            float(config["rms_norm_eps"]),
            sizes.head_dim**-0.5,
            int(tied),
            head if tied else self._keep(embedding),
            self._keep(checkpoint.read("model.norm.weight", hidden)),
            head,
            self._keep(cosines),
            self._keep(sines),
        )

    def _load_layer(
        self, layer: library.Layer, checkpoint: _Checkpoint, prefix: str, config: dict[str, Any]
    ) -> None:
        def read(name: str, *shape: int) -> Tensor:
            return checkpoint.read(prefix + name, *shape)

        sizes, architecture = self._sizes, _architecture(config)
        hidden, intermediate = sizes.hidden, sizes.intermediate
        widths = {"q": sizes.attended, "k": sizes.keys, "v": sizes.keys}
        layer.input_norm = self._keep(read("input_layernorm.weight", hidden))
        layer.post_norm = self._keep(read("post_attention_layernorm.weight", hidden))
        if architecture == QWEN3:
            layer.q_norm = self._keep(read("self_attn.q_norm.weight", sizes.head_dim))
            layer.k_norm = self._keep(read("self_attn.k_norm.weight", sizes.head_dim))
        if architecture == QWEN2:
            biases = [read(f"self_attn.{name}_proj.bias", width) for name, width in widths.items()]
            layer.qkv_bias = self._keep(torch.cat(biases))
        layer.qkv = self._pack(
            torch.cat(
                [read(f"self_attn.{name}_proj.weight", width, hidden) for name, width in widths.items()]
            )
        )
        layer.o = self._pack(read("self_attn.o_proj.weight", hidden, sizes.attended))
        gate = read("mlp.gate_proj.weight", intermediate, hidden)
        up = read("mlp.up_proj.weight", intermediate, hidden)
        # 32 gates, then their 32 ups: one group of the kernel holds what SwiGLU multiplies.
        halves = [gate.reshape(-1, GROUP // 2, hidden), up.reshape(-1, GROUP // 2, hidden)]
        layer.gate_up = self._pack(torch.stack(halves, dim=1).reshape(-1, hidden))
        layer.down = self._pack(read("mlp.down_proj.weight", hidden, intermediate))
        # Mistral's window is always on, the Qwens name one that use_sliding_window switches on.
        windowed = architecture == MISTRAL or config.get("use_sliding_window", False)
        layer.window = int(config.get("sliding_window") or 0) if windowed else 0

    def _pack(self, weight: Tensor) -> int:
        n, k = weight.shape
        address = self._arena.take(_packed(n, k) * self.dtype.itemsize)
        self._library.outrider_pack(weight.contiguous().data_ptr(), address, n, k)
        return address

    def _keep(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


def _padded(outputs: int) -> int:
    return -(-outputs // GROUP) * GROUP


def _packed(n: int, k: int) -> int:
    """Elements in the arena of a matrix of n outputs and k inputs."""
    return _padded(n) * k


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
        assert 0 < size <= self._left, f"{size} bytes of the {self._left} that are left"
        address = self._address + len(self._memory) - self._left
        self._left -= size
        return address


class _Checkpoint:
    """The tensors of a folder by name, in one type, whatever files they lie in."""

    def __init__(self, folder: Path, dtype: torch.dtype, stack: ExitStack) -> None:
        from safetensors import safe_open

        files = [
            stack.enter_context(safe_open(path, framework="pt"))
            for path in sorted(folder.glob("*.safetensors"))
        ]
        if not files:
            raise ConfigError(f"{folder} has no *.safetensors file: save the model as safetensors")
        self._dtype = dtype
        self._files: dict[str, Any] = dict(_names(files))

    def read(self, name: str, *shape: int) -> Tensor:
        """A tensor that must have this shape: the kernels trust it. Raises `ConfigError`."""
        if name not in self._files:
            raise ConfigError(f"the checkpoint has no tensor {name!r}: it is not the model its config names")
        tensor: Tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"tensor {name!r} has shape {_spelled(tensor.shape)}, and by config.json it must be "
                f"{_spelled(shape)}: the two files are of different models"
            )
        return tensor.to(self._dtype)


def _spelled(shape: Iterable[int]) -> str:
    return " x ".join(str(size) for size in shape)


def _names(files: list[Any]) -> Iterator[tuple[str, Any]]:
    for file in files:
        for name in file.keys():  # noqa: SIM118 - a file handle, not a dict
            yield name, file


def _rotary_table(config: dict[str, Any], sizes: Sizes) -> tuple[Tensor, Tensor]:
    """(positions, head_dim / 2) cosines and sines in float32, by transformers' own definitions."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    known = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    rotary = LlamaRotaryEmbedding(AutoConfig.for_model("llama", **known))
    if rotary.inv_freq.shape != (sizes.head_dim // 2,):
        raise ConfigError(
            f"the rotary embedding has {len(rotary.inv_freq)} frequencies, and by config.json it must have "
            f"half of head_dim {sizes.head_dim}"
        )
    angles = torch.arange(sizes.positions)[:, None].float() * rotary.inv_freq[None, :].float()
    scaling = float(rotary.attention_scaling)
    return angles.cos() * scaling, angles.sin() * scaling
