"""Strict numerics in torch: a row's result is bitwise the same in any company.

A matrix product chooses its kernel, and with it the order of its sums, by the number of rows. So every
product here has one shape: linear layers take tiles of 16 rows, the last one padded, and attention takes
tiles of 16 query rows against tiles of 64 keys that start at multiples of 64. A tile that a row does not see
adds exact zeros, in an order that no number of such tiles changes. Activations run over widths of whole
vectors, because torch computes what is left over at an end by another formula. Norms and rotary embeddings
work row by row already.

What this relies on, and the tests check (tests/engine/test_strict.py): a product of one shape gives each row
the same bits whatever the other rows hold and wherever in the tile it stands, as MKL and oneDNN do on x86.
Not for mixtures of experts, whose products depend on which rows chose the same expert.

Legend: R rows, Hq query heads, Hkv KV heads, G = Hq / Hkv, D and Dv head sizes, T key tiles.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.engine.paged_attention import Pool, Scoring, Step

ROWS = 16
KEYS = 64
VECTOR = 64
"""Elements: a multiple of what a loop takes at once on any processor."""

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""How configurations of mixtures of experts say so."""


def why_not(text_config: object) -> str | None:
    """Why a model's rows cannot be kept apart; None where they can."""
    for name in EXPERT_COUNTS:
        count = getattr(text_config, name, None)
        if isinstance(count, int) and count > 1:
            return f"it is a mixture of experts ({name} {count}), whose products depend on the whole batch"
    return None


class TiledLinear(nn.Module):
    """Calls a linear layer on 16 rows at a time: (..., in) to (..., out)."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        padded = F.pad(rows, (0, 0, 0, -len(rows) % ROWS))
        if not len(padded):  # a step whose rows all are prompt rows asks for the logits of no row
            return self.linear(x)  # type: ignore[no-any-return]
        tiles = [self.linear(padded[begin : begin + ROWS]) for begin in range(0, len(padded), ROWS)]
        out = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
        return out[: len(rows)].view(*x.shape[:-1], -1)


class WholeVectors(nn.Module):
    """An activation on rows that are padded to a multiple of what a vector loop takes at once."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        missing = -x.shape[-1] % VECTOR
        if not missing:
            return self.activation(x)  # type: ignore[no-any-return]
        out: Tensor = self.activation(F.pad(x, (0, missing)))
        return out[..., :-missing]


def pad_activations(model: nn.Module) -> int:
    """Wrap every activation in `WholeVectors`; how many there were."""
    homes = ("transformers.activations", "torch.nn.modules.activation")
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__module__ in homes and not isinstance(parent, WholeVectors):
                setattr(parent, name, WholeVectors(child))
                count += 1
    return count


def tile_linears(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> int:
    """Wrap every layer of these kinds in a `TiledLinear`; how many there were."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in kinds:
                setattr(parent, name, TiledLinear(child))
                count += 1
    return count


def attend_strict(query: Tensor, pool: Pool, step: Step, scoring: Scoring) -> Tensor:
    """Query (Hq, R, D) against each span's keys and values in `pool`, to (R, Hq, Dv); sums in float32."""
    outputs = [_attend_span(query, pool, step, scoring, index) for index in range(len(step.spans))]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_span(query: Tensor, pool: Pool, step: Step, scoring: Scoring, index: int) -> Tensor:
    """One span's rows (n, Hq, Dv), a tile of them at a time."""
    span = step.spans[index]
    heads, _, size = query.shape
    kv_heads = pool.keys.shape[2]
    first = step.first_key(index, scoring.window) // KEYS * KEYS
    keys = _tiles(step.read(index, pool.keys, first)).transpose(2, 3)  # (Hkv, T, D, KEYS)
    values = _tiles(step.read(index, pool.values, first))  # (Hkv, T, KEYS, Dv)
    seen = _seen(step, index, scoring.window, first, keys.shape[1])
    rows = query[:, span.start : span.start + span.rows].float().reshape(kv_heads, -1, span.rows, size)
    outputs = []
    for begin in range(0, span.rows, ROWS):
        tile = rows[:, :, begin : begin + ROWS]
        missing = ROWS - tile.shape[2]
        lanes = F.pad(tile, (0, 0, 0, missing)).reshape(kv_heads, 1, -1, size)
        mask = F.pad(seen[begin : begin + ROWS], (0, 0, 0, 0, 0, missing))  # (ROWS, T, KEYS)
        reach = 1 + int(mask.any(dim=2).any(dim=0).nonzero().max())  # tiles after it are seen by no row
        mixed = _attend_tile(lanes, keys[:, :reach], values[:, :reach], mask[:, :reach], scoring)
        mixed = mixed.view(heads, ROWS, -1)[:, : ROWS - missing]
        outputs.append(mixed.transpose(0, 1))
    return torch.cat(outputs).to(query.dtype)


def _tiles(read: Tensor) -> Tensor:
    """(L, Hkv, D) to (Hkv, T, KEYS, D) in float32, padded with zeros."""
    padded = F.pad(read.float(), (0, 0, 0, 0, 0, -len(read) % KEYS))
    return padded.view(-1, KEYS, *read.shape[1:]).permute(2, 0, 1, 3).contiguous()


def _seen(step: Step, index: int, window: int | None, first: int, tiles: int) -> Tensor:
    """Which keys from the tile's start at `first` on each row sees: bool (n, T, KEYS)."""

    def build() -> Tensor:
        span = step.spans[index]
        seen = torch.zeros(span.rows, tiles * KEYS, dtype=torch.bool)
        visible = step.visible(index, window)
        begin = step.first_key(index, window) - first
        seen[:, begin : span.length - first] = True if visible is None else visible
        return seen.view(span.rows, tiles, KEYS).to(step.device)

    return step.once(("seen", index, window, first), build)


def _attend_tile(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scoring: Scoring) -> Tensor:
    """One tile of rows: query (Hkv, 1, G x ROWS, D), keys (Hkv, T, D, KEYS), values (Hkv, T, KEYS, Dv), seen
    (ROWS, T, KEYS), to (Hkv, G x ROWS, Dv).

    Softmax by tiles with a common maximum at the end (Milakov & Gimelshein 2018, arXiv 1805.02867).
    """
    kv_heads, tiles = keys.shape[:2]
    lanes = query.shape[2]
    group = lanes // ROWS
    scores = torch.bmm(
        query.expand(-1, tiles, -1, -1).reshape(kv_heads * tiles, lanes, -1), keys.flatten(0, 1)
    ).view(kv_heads, tiles, lanes, KEYS)
    scores = scores * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    hidden = ~seen.transpose(0, 1).repeat(1, group, 1)  # (T, G x ROWS, KEYS)
    scores = scores.masked_fill(hidden, float("-inf"))
    best = scores.amax(dim=3)  # (Hkv, T, lanes)
    anchor = best.masked_fill(best == float("-inf"), 0.0)
    weights = torch.exp(scores - anchor.unsqueeze(3))
    mixed = torch.bmm(weights.flatten(0, 1), values.flatten(0, 1)).view(kv_heads, tiles, lanes, -1)
    top = best.amax(dim=1)
    sink = None
    if scoring.sinks is not None:
        sink = scoring.sinks.float().view(kv_heads, group).repeat_interleave(ROWS, dim=1)
        top = torch.maximum(top, sink)
    top = top.masked_fill(top == float("-inf"), 0.0)  # lanes that stand for no row
    share = torch.exp(best - top.unsqueeze(1))  # 0 for tiles that a lane does not see
    # Running sums go from tile to tile, so zeros at the end change nothing.
    total = (share * weights.sum(dim=3)).cumsum(dim=1)[:, -1]
    output = (share.unsqueeze(3) * mixed).cumsum(dim=1)[:, -1]
    if sink is not None:
        total = total + torch.exp(sink - top)
    return output / total.masked_fill(total == 0, 1.0).unsqueeze(2)
