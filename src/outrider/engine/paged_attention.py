"""Attention over a paged KV cache: the one function that transformers models call, and its torch kernel.

A transformers model that follows the attention interface looks its attention function up by name and calls it
once a layer. `register()` puts `call_active` under the name `outrider`; it forwards to whatever `attending()`
made active: the probe's recorder at start, a model's own `PagedAttention` in a step. The active one is a
context variable, so a target and a draft model live side by side in one process, also in two threads.

    model.forward(row of tokens) ── each layer ──► PagedAttention: write K, V ──► attend: torch or Triton

Shapes: R rows of the step (all spans, one after the other), Hq query heads, Hkv KV heads, G = Hq / Hkv,
D head size of queries and keys, Dv of values, L keys that a span reads, n rows of a span.
A *slot* is one token's place in a pool: block id x block size + offset.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.engine.model import Batch, Span
from outrider.errors import ConfigError

INTERFACE = "outrider"
"""The name under which transformers knows our attention function."""

T = TypeVar("T")


class AttentionFunction(Protocol):
    """One layer's attention: query (1, Hq, R, D), key (1, Hkv, R, D), value (1, Hkv, R, Dv) to
    (1, R, Hq, Dv). `options` are the keyword arguments that the layer passes."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
    ) -> Tensor: ...


_active: ContextVar[AttentionFunction] = ContextVar("active attention")


@contextmanager
def attending(function: AttentionFunction) -> Iterator[None]:
    """Within this block, every layer of a model loaded with the `outrider` attention calls `function`."""
    token = _active.set(function)
    try:
        yield
    finally:
        _active.reset(token)


def call_active(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The registered attention function; a mask can only be one that the model made over the flat row."""
    if attention_mask is not None:
        raise ConfigError(
            f"model: {type(module).__name__} builds a mask of its own, which is not implemented"
        )
    return _active.get()(module, query, key, value, options), None


def register() -> None:
    """Make `attn_implementation="outrider"` known to transformers.

    Only the attention function is registered and no mask function: transformers then builds no mask, which
    would be one over the whole flat row, and leaves visibility to us.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(INTERFACE, call_active)


@dataclass(frozen=True, slots=True)
class Scoring:
    """How one layer turns queries and keys into weights; fixed when the model is loaded."""

    scale: float
    window: int | None = None  # a row sees itself and the `window - 1` positions before it
    softcap: float | None = None  # scores become softcap x tanh(scores / softcap)
    sinks: Tensor | None = None  # (Hq,): a score for attending to nothing, one a head


@dataclass(frozen=True, slots=True)
class Pool:
    """One layer's keys and values of all sequences."""

    keys: Tensor  # (num_blocks, block_size, Hkv, D)
    values: Tensor  # (num_blocks, block_size, Hkv, Dv)

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Put the rows' key and value (1, Hkv, R, D) into `slots` (R,)."""
        self.keys.flatten(0, 1).index_copy_(0, slots, key[0].transpose(0, 1))
        self.values.flatten(0, 1).index_copy_(0, slots, value[0].transpose(0, 1))


class Step:
    """One batch as attention sees it: what all layers share is computed once.

    `ancestors` maps a span's index to a boolean (n, n) matrix, lower triangular, that says which of the new
    rows a new row sees (a tree of drafts); spans without one are a chain. Windows are measured in positions.
    """

    def __init__(
        self,
        batch: Batch,
        *,
        block_size: int,
        device: torch.device,
        ancestors: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.spans: Sequence[Span] = batch.spans
        self.positions = batch.positions
        self.block_size = block_size
        self.device = device
        self.ancestors: Mapping[int, Tensor] = ancestors or {}
        self.slots = torch.tensor(
            [
                span.blocks[at // block_size] * block_size + at % block_size
                for span in batch.spans
                for at in range(span.length - span.rows, span.length)
            ],
            dtype=torch.int64,
        ).to(device)
        self._known: dict[Hashable, Any] = {}

    def once(self, key: Hashable, build: Callable[[], T]) -> T:
        """What `build` returned when this step was first asked for `key`."""
        if key not in self._known:
            self._known[key] = build()
        return cast(T, self._known[key])

    def first_key(self, index: int, window: int | None) -> int:
        """The first position that any row of a span may see."""
        span = self.spans[index]
        if window is None or index in self.ancestors:
            return 0
        return max(0, span.length - span.rows - window + 1)

    def read(self, index: int, pool: Tensor, first: int) -> Tensor:
        """A span's keys or values from position `first` on: (L, Hkv, D).

        A view where the blocks are one consecutive run, which the block allocator prefers; a copy of the
        blocks otherwise.
        """
        span = self.spans[index]
        run_start = self.once(("run", index), lambda: _run_start(span.blocks))
        if run_start is not None:
            slot = run_start * self.block_size
            return pool.flatten(0, 1)[slot + first : slot + span.length]
        skipped = first // self.block_size
        ids = self.once(
            ("blocks", index, skipped), lambda: torch.tensor(span.blocks[skipped:], device=self.device)
        )
        start = skipped * self.block_size
        return pool.index_select(0, ids).flatten(0, 1)[first - start : span.length - start]

    def visible(self, index: int, window: int | None) -> Tensor | None:
        """Which keys, from `first_key` on, each row of a span sees: bool (n, L) on the CPU; None means
        all."""
        span = self.spans[index]
        first = self.first_key(index, window)
        if span.rows == 1 and index not in self.ancestors:
            return None
        old = span.length - span.rows
        row_at = torch.arange(old, span.length)[:, None]
        key_at = torch.arange(first, span.length)[None, :]
        seen = key_at <= row_at
        tree = self.ancestors.get(index)
        if tree is not None:
            seen[:, old - first :] = tree
            # A tree's rows share positions, so their distance is not the distance of their slots.
            new = self.positions[span.start : span.start + span.rows]
            row_at = new[:, None]
            key_at = torch.cat([torch.arange(first, old), new])[None, :]
        if window is not None:
            seen &= row_at - key_at < window
        return seen

    def bias(self, index: int, window: int | None, group: int, dtype: torch.dtype) -> Tensor | None:
        """`visible` as an additive mask for G grouped heads: (G x n, L), 0 or -inf; None means all."""

        def build() -> Tensor | None:
            seen = self.visible(index, window)
            if seen is None:
                return None
            bias = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
            return bias.repeat(group, 1).to(self.device)

        return self.once(("bias", index, window, group, dtype), build)


def _run_start(blocks: Sequence[int]) -> int | None:
    """The first id where the ids are one consecutive run."""
    start = blocks[0]
    return start if tuple(blocks) == tuple(range(start, start + len(blocks))) else None


class Attend(Protocol):
    """A kernel: query (Hq, R, D) against each span's keys and values, to (R, Hq, Dv)."""

    def __call__(self, query: Tensor, pool: Pool, step: Step, scoring: Scoring) -> Tensor: ...


def attend_torch(query: Tensor, pool: Pool, step: Step, scoring: Scoring) -> Tensor:
    """The kernel in torch operations, for the CPU: one scaled-dot-product call a span.

    The G query heads of a KV head become G x n rows against the same keys, so keys are read once and never
    repeated in memory.
    """
    heads, _, size = query.shape
    kv_heads = pool.keys.shape[2]
    group = heads // kv_heads
    outputs: list[Tensor] = []
    for index, span in enumerate(step.spans):
        first = step.first_key(index, scoring.window)
        keys = step.read(index, pool.keys, first).transpose(0, 1)  # (Hkv, L, D)
        values = step.read(index, pool.values, first).transpose(0, 1)
        rows = query[:, span.start : span.start + span.rows].reshape(kv_heads, group * span.rows, size)
        bias = step.bias(index, scoring.window, group, query.dtype)
        if scoring.softcap is None and scoring.sinks is None:
            mixed = F.scaled_dot_product_attention(
                rows[None], keys[None], values[None], attn_mask=bias, scale=scoring.scale
            )[0]
        else:
            mixed = _softcapped_attention(rows, keys, values, bias, span.rows, scoring)
        outputs.append(mixed.reshape(heads, span.rows, -1).transpose(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _softcapped_attention(
    rows: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, n: int, scoring: Scoring
) -> Tensor:
    """What SDPA has no argument for: rows (Hkv, G x n, D), keys (Hkv, L, D) to (Hkv, G x n, Dv)."""
    scores = torch.matmul(rows, keys.transpose(1, 2)).float() * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if bias is not None:
        scores = scores + bias
    if scoring.sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        sinks = scoring.sinks.float().view(rows.shape[0], -1, 1).repeat_interleave(n, dim=1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    return torch.matmul(weights.to(values.dtype), values)


@dataclass(frozen=True, slots=True)
class Layer:
    """One attention module's part in a step."""

    pool: Pool
    scoring: Scoring
    writes: bool  # False: the layer reads the keys and values that an earlier layer wrote


class PagedAttention:
    """A model's attention function over its pools; `begin` says which step the next forward is."""

    def __init__(self, layers: Mapping[nn.Module, Layer], attend: Attend) -> None:
        self._layers = layers
        self._attend = attend
        self._step: Step | None = None

    def begin(self, step: Step) -> None:
        self._step = step

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
    ) -> Tensor:
        """`options` were read once, by the probe, and are the same in every step."""
        assert self._step is not None, "a forward ran outside TransformersModel.forward"
        layer = self._layers[module]
        if layer.writes:
            layer.pool.write(self._step.slots, key, value)
        return self._attend(query[0], layer.pool, self._step, layer.scoring)[None]
