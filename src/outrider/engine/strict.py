"""Strict numerics in torch: a row's result is bitwise the same in any company.

A matrix product chooses its kernel, and with it the order of its sums, by the number of rows. So every
product here has one shape: linear layers take tiles of 16 rows, the last one padded, and attention takes
tiles of 16 query rows against tiles of 64 keys that start at multiples of 64. A tile that a row does not see
adds exact zeros, in an order that no number of such tiles changes. Activations run over widths of whole
vectors, because torch computes what is left over at an end by another formula. Norms and rotary embeddings
work row by row already.

What this relies on: a product of one shape gives each row the same bits whatever the other rows hold and
wherever in the tile it stands, as MKL and oneDNN do on x86. No library promises it, so every model is asked
at its start (`rows_that_change`), on the machine that it will run on. And on one thread: torch's loops are
cut among threads at places that depend on the number of rows, and end each piece by that other formula.
Not for mixtures of experts, whose products depend on which rows chose the same expert.

Legend: R rows, Hq query heads, Hkv KV heads, G = Hq / Hkv, D and Dv head sizes, T key tiles.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.engine.model import Batch, CausalModel, Span
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


CHECKED_ROWS = 84
"""Two tiles of keys and six of rows, the last of each begun."""


def check_blocks(model: CausalModel) -> int:
    """Blocks that `rows_that_change` writes to: two texts."""
    return 2 * -(-_checked_length(model) // model.block_size)


def rows_that_change(model: CausalModel) -> Tensor:
    """How far each row's logits move (n,) between a text computed whole, and cut and in company; 0 where all
    bits are the same. Writes to the first `check_blocks` blocks."""
    length = _checked_length(model)
    each = check_blocks(model) // 2
    tokens = torch.randint(model.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))

    def run(*parts: tuple[int, int, int]) -> Tensor:
        """One step of parts (text, begin, end); the logits of the first part's rows."""
        spans = []
        rows = 0
        for text, begin, end in parts:
            blocks = range(text * each, text * each + -(-end // model.block_size))
            spans.append(Span(rows, end - begin, end, tuple(blocks)))
            rows += end - begin
        positions = torch.cat([torch.arange(begin, end) for _, begin, end in parts])
        flat = torch.cat([tokens[text, begin:end] for text, begin, end in parts])
        return model.forward(Batch(flat, positions, tuple(spans), torch.arange(spans[0].rows))).clone()

    whole = run((0, 0, length))
    middle = length // 2
    ends = sorted({0, max(0, middle - 1), middle, min(length, middle + 5), length - 1, length})
    cut = torch.cat([run((0, begin, end), (1, begin, begin + 1)) for begin, end in pairwise(ends)])
    same = (whole.view(torch.int32) == cut.view(torch.int32)).all(dim=1)
    distance = torch.nan_to_num((whole - cut).abs(), nan=float("inf")).amax(dim=1)
    return distance.masked_fill(same, 0.0)


def _checked_length(model: CausalModel) -> int:
    return min(CHECKED_ROWS, model.max_model_len)


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
    kv_heads = pool.keys.shape[2]
    first = step.first_key(index, scoring.window) // KEYS * KEYS
    keys = _tiles(step.read(index, pool.keys, first)).transpose(2, 3)  # (Hkv, T, D, KEYS)
    values = _tiles(step.read(index, pool.values, first))  # (Hkv, T, KEYS, Dv)
    seen = _seen(step, index, scoring.window, first, keys.shape[1])
    rows = query[:, span.start : span.start + span.rows].float()
    rows = rows.reshape(kv_heads, -1, span.rows, query.shape[2])  # (Hkv, G, n, D)
    outputs = []
    for begin in range(0, span.rows, ROWS):
        mask = seen[begin : begin + ROWS].transpose(0, 1)  # (T, n, KEYS)
        reach = 1 + int(mask.any(dim=2).any(dim=1).nonzero().max())  # tiles after it are seen by no row
        tile = rows[:, :, begin : begin + ROWS]
        outputs.append(_attend_tile(tile, keys[:, :reach], values[:, :reach], mask[:reach], scoring))
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
    """One tile of n <= ROWS rows: query (Hkv, G, n, D), keys (Hkv, T, D, KEYS), values (Hkv, T, KEYS, Dv),
    seen (T, n, KEYS), to (n, Hq, Dv).

    Softmax by tiles with a common maximum at the end (Milakov & Gimelshein 2018, arXiv 1805.02867). Products
    and the few exponentials that are not over whole tiles of keys take all ROWS, the rest the n real ones.
    """
    kv_heads, group, n, _ = query.shape
    tiles = keys.shape[1]
    lanes = _all_rows(query).flatten(1, 2).unsqueeze(1).expand(-1, tiles, -1, -1)  # (Hkv, T, G x ROWS, D)
    scores = torch.bmm(lanes.flatten(0, 1), keys.flatten(0, 1))
    scores = scores.view(kv_heads, tiles, group, ROWS, KEYS)[:, :, :, :n] * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.masked_fill(~seen.unsqueeze(1), float("-inf"))
    best = scores.amax(dim=4)  # (Hkv, T, G, n)
    anchor = best.masked_fill(best == float("-inf"), 0.0)  # of tiles that a row does not see
    weights = torch.exp(scores - anchor.unsqueeze(4))
    mixed = torch.bmm(_all_rows(weights).view(kv_heads * tiles, -1, KEYS), values.flatten(0, 1))
    mixed = mixed.view(kv_heads, tiles, group, ROWS, -1)[:, :, :, :n]
    top = best.amax(dim=1)  # (Hkv, G, n)
    sinks = None if scoring.sinks is None else scoring.sinks.float().view(kv_heads, group, 1)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    share = _exp_of_rows(best - top.unsqueeze(1))  # 0 for tiles that a row does not see
    # Running sums go from tile to tile, so zeros at the end change nothing.
    total = (share * weights.sum(dim=4)).cumsum(dim=1)[:, -1]
    output = (share.unsqueeze(4) * mixed).cumsum(dim=1)[:, -1]
    if sinks is not None:
        total = total + _exp_of_rows(sinks - top)
    return (output / total.unsqueeze(3)).permute(2, 0, 1, 3).flatten(1, 2)


def _all_rows(tile: Tensor) -> Tensor:
    """(..., n, size) to (..., ROWS, size), padded with zeros."""
    return F.pad(tile, (0, 0, 0, ROWS - tile.shape[-2]))


def _exp_of_rows(x: Tensor) -> Tensor:
    """exp of (..., n) over whole vectors."""
    return torch.exp(F.pad(x, (0, ROWS - x.shape[-1])))[..., : x.shape[-1]]
