"""Our paged attention kernel for CUDA, in Triton, with the call signature of `attend_torch`.

One program computes one tile: `tile_rows` new rows of one span, all query heads of one KV head, so a tile has
a fixed number of lanes (rows x heads). It walks the span's keys in tiles of a fixed size that start at
multiples of that size, with an online softmax (Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867;
the tiling is FlashAttention's, Dao et al. 2022, https://arxiv.org/abs/2205.14135). A key tile that a row does
not see changes nothing in its sums, exactly: so what a row gets depends on its own sequence, not on what
shares its tile or its step, as long as the device's matrix product treats its rows alike.

Keys are gathered through the block table one by one, so any page size works. Not implemented: splitting one
long context over several programs, which small batches on large GPUs would like.

Where this ran: numerically against dense attention in Triton's interpreter on a CPU (tests), for float32 and
float16; the interpreter (3.9) has no bfloat16 product. It compiles to machine code for compute capability 8.0
and 9.0 (tests), but has not run on a GPU yet, where the same tests would run it; tile sizes are chosen by
shared memory, not by measurement. float32 with heads of 256 takes 140 KiB, more than consumer GPUs have.

Triton comes with CUDA builds of torch. This module can be imported without it, `attend_triton` cannot be
called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.engine.paged_attention import Pool, Scoring, Step

try:
    import triton
    import triton.language as tl
except ImportError:  # torch builds without CUDA come without Triton
    triton = None

LANES = 64
"""Rows x query heads of a tile. More than any verify block needs, so that prefill reads keys less often."""


@dataclass(frozen=True, slots=True)
class Tables:
    """A step on the device, for tiles of one size. S spans, P tiles."""

    blocks: Tensor  # (S, most blocks of a span) int32
    rows: Tensor  # (S,) int32, new rows
    starts: Tensor  # (S,) int32, first row in the step
    lengths: Tensor  # (S,) int32, keys
    tile_spans: Tensor  # (P,) int32, the span of each tile
    tile_rows: Tensor  # (P,) int32, the tile's first row within its span


@dataclass(frozen=True, slots=True)
class AncestorTables:
    """The trees of a step on the device."""

    seen: Tensor  # all spans' (n, n) matrices one after the other, int8; chains get a lower triangle
    offsets: Tensor  # (S,) int32, where each span's matrix starts
    positions: Tensor  # (R,) int32


def _tables(step: Step, tile_rows: int) -> Tables:
    spans = step.spans
    longest = max(len(span.blocks) for span in spans)
    tiles = [(i, first) for i, span in enumerate(spans) for first in range(0, span.rows, tile_rows)]

    def table(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(step.device)

    return Tables(
        blocks=table([[*span.blocks, *(0,) * (longest - len(span.blocks))] for span in spans]),
        rows=table([span.rows for span in spans]),
        starts=table([span.start for span in spans]),
        lengths=table([span.length for span in spans]),
        tile_spans=table([span for span, _ in tiles]),
        tile_rows=table([first for _, first in tiles]),
    )


def _ancestor_tables(step: Step) -> AncestorTables:
    matrices = [
        step.ancestors[i].flatten() if i in step.ancestors else torch.ones(n, n).tril().bool().flatten()
        for i, n in enumerate(span.rows for span in step.spans)
    ]
    offsets = [0]
    for matrix in matrices[:-1]:
        offsets.append(offsets[-1] + len(matrix))
    return AncestorTables(
        seen=torch.cat([matrix.cpu() for matrix in matrices]).to(torch.int8).to(step.device),
        offsets=torch.tensor(offsets, dtype=torch.int32).to(step.device),
        positions=step.positions.to(torch.int32).to(step.device),
    )


def attend_triton(query: Tensor, pool: Pool, step: Step, scoring: Scoring) -> Tensor:
    """Query (Hq, R, D) against each span's keys and values in `pool`, to (R, Hq, Dv)."""
    heads, total_rows, key_size = query.shape
    _, page, kv_heads, value_size = pool.values.shape
    group = heads // kv_heads
    group_lanes = triton.next_power_of_2(group)
    tile_rows = max(1, LANES // group_lanes)
    key_lanes = max(16, triton.next_power_of_2(key_size))
    value_lanes = max(16, triton.next_power_of_2(value_size))
    # Two tiles of keys and values have to fit in shared memory (about 100 KiB on consumer GPUs).
    small = key_lanes * query.element_size() > 256
    tables = step.once(("triton", tile_rows), lambda: _tables(step, tile_rows))
    trees = step.once("triton trees", lambda: _ancestor_tables(step)) if step.ancestors else None
    output = torch.empty(total_rows, heads, value_size, dtype=query.dtype, device=query.device)
    keys, values = pool.keys.flatten(0, 1), pool.values.flatten(0, 1)
    _attend_tile[(len(tables.tile_spans), kv_heads)](
        query,
        keys,
        values,
        output,
        scoring.sinks if scoring.sinks is not None else query,
        tables.blocks,
        tables.rows,
        tables.starts,
        tables.lengths,
        tables.tile_spans,
        tables.tile_rows,
        trees.seen if trees else query,
        trees.offsets if trees else query,
        trees.positions if trees else query,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        output.stride(0),
        output.stride(1),
        tables.blocks.stride(0),
        scoring.scale,
        scoring.softcap or 0.0,
        scoring.window or 0,
        page=page,
        group=group,
        group_lanes=group_lanes,
        tile_rows=tile_rows,
        tile_keys=32 if small else 64,
        key_size=key_size,
        key_lanes=key_lanes,
        value_size=value_size,
        value_lanes=value_lanes,
        has_softcap=scoring.softcap is not None,
        has_window=scoring.window is not None,
        has_sinks=scoring.sinks is not None,
        has_trees=trees is not None,
        # TF32 would round float32 products to ten bits.
        precision="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=2,
    )
    return output


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _attend_tile(  # type: ignore[no-untyped-def]
        query,  # (Hq, R, D), last dimension dense
        keys,  # (slots, Hkv, D), last dimension dense
        values,  # (slots, Hkv, Dv), last dimension dense
        output,  # (R, Hq, Dv), last dimension dense
        sinks,  # (Hq,)
        blocks,
        span_rows,
        span_starts,
        span_lengths,
        tile_spans,
        tile_first_rows,
        tree_seen,
        tree_offsets,
        positions,
        query_head_stride,
        query_row_stride,
        key_slot_stride,
        key_head_stride,
        value_slot_stride,
        value_head_stride,
        output_row_stride,
        output_head_stride,
        blocks_stride,
        scale,
        softcap,
        window,
        page: tl.constexpr,
        group: tl.constexpr,
        group_lanes: tl.constexpr,
        tile_rows: tl.constexpr,
        tile_keys: tl.constexpr,
        key_size: tl.constexpr,
        key_lanes: tl.constexpr,
        value_size: tl.constexpr,
        value_lanes: tl.constexpr,
        has_softcap: tl.constexpr,
        has_window: tl.constexpr,
        has_sinks: tl.constexpr,
        has_trees: tl.constexpr,
        precision: tl.constexpr,
    ):
        log2_e: tl.constexpr = 1.4426950408889634
        tile = tl.program_id(0)
        kv_head = tl.program_id(1)
        span = tl.load(tile_spans + tile)
        first_row = tl.load(tile_first_rows + tile)
        rows = tl.load(span_rows + span)
        start = tl.load(span_starts + span)
        length = tl.load(span_lengths + span)
        old = length - rows  # keys that were there before this step

        lane = tl.arange(0, tile_rows * group_lanes)
        row = first_row + lane // group_lanes  # within the span
        member = lane % group_lanes
        head = kv_head * group + member
        real = (row < rows) & (member < group)
        key_at = tl.arange(0, key_lanes)
        value_at = tl.arange(0, value_lanes)
        q = tl.load(
            query
            + head[:, None].to(tl.int64) * query_head_stride
            + (start + row)[:, None].to(tl.int64) * query_row_stride
            + key_at[None, :],
            mask=real[:, None] & (key_at < key_size)[None, :],
            other=0.0,
        )

        # Tiles of keys start at multiples of their size, so that a row's sums are grouped the same in every
        # step.
        low = 0
        if has_window and not has_trees:
            low = tl.maximum(0, old + first_row - window + 1) // tile_keys * tile_keys
        high = tl.minimum(length, old + first_row + tile_rows)

        best = tl.full([tile_rows * group_lanes], float("-inf"), tl.float32)
        total = tl.zeros([tile_rows * group_lanes], tl.float32)
        mixed = tl.zeros([tile_rows * group_lanes, value_lanes], tl.float32)
        for base in range(low, high, tile_keys):
            at = base + tl.arange(0, tile_keys)  # positions of the keys in their span
            there = at < length
            block = tl.load(blocks + span * blocks_stride + at // page, mask=there, other=0)
            slot = block.to(tl.int64) * page + at % page
            k = tl.load(
                keys + slot[None, :] * key_slot_stride + kv_head * key_head_stride + key_at[:, None],
                mask=there[None, :] & (key_at < key_size)[:, None],
                other=0.0,
            )
            scores = tl.dot(q, k, input_precision=precision) * scale
            if has_softcap:
                # tanh by exp, the same on every device; the sign is put back at the end
                shrunk = tl.exp2(tl.abs(scores) * (-2.0 * log2_e / softcap))
                tanh = (1.0 - shrunk) / (1.0 + shrunk)
                scores = tl.where(scores < 0, -tanh, tanh) * softcap

            seen = real[:, None] & there[None, :] & (at[None, :] <= (old + row)[:, None])
            row_at = old + row
            seen_from = at
            if has_trees:
                new = at - old  # index of the key among the new rows, negative for old keys
                is_new = (new >= 0) & there
                flat = tl.load(tree_offsets + span) + row[:, None] * rows + new[None, :]
                relative = tl.load(tree_seen + flat, mask=real[:, None] & is_new[None, :], other=1)
                seen = seen & (relative != 0)
                row_at = tl.load(positions + start + row, mask=row < rows, other=0)
                seen_from = tl.where(is_new, tl.load(positions + start + new, mask=is_new, other=0), at)
            if has_window:
                seen = seen & (row_at[:, None] - seen_from[None, :] < window)
            scores = tl.where(seen, scores * log2_e, float("-inf"))

            # A row that sees nothing of this tile keeps best, total and mixed bit for bit.
            new_best = tl.maximum(best, tl.max(scores, 1))
            anchor = tl.where(new_best == float("-inf"), 0.0, new_best)
            decay = tl.exp2(best - anchor)
            weights = tl.exp2(scores - anchor[:, None])
            total = total * decay + tl.sum(weights, 1)
            v = tl.load(
                values + slot[:, None] * value_slot_stride + kv_head * value_head_stride + value_at[None, :],
                mask=there[:, None] & (value_at < value_size)[None, :],
                other=0.0,
            )
            mixed = mixed * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=precision)
            best = new_best

        if has_sinks:
            sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * log2_e
            new_best = tl.maximum(best, sink)
            decay = tl.exp2(best - new_best)
            total = total * decay + tl.exp2(sink - new_best)
            mixed = mixed * decay[:, None]

        # Lanes that stand for no row have an empty sum; they are not stored.
        mixed = mixed / tl.where(real, total, 1.0)[:, None]
        tl.store(
            output
            + (start + row)[:, None].to(tl.int64) * output_row_stride
            + head[:, None].to(tl.int64) * output_head_stride
            + value_at[None, :],
            mixed.to(output.dtype.element_ty),
            mask=real[:, None] & (value_at < value_size)[None, :],
        )
