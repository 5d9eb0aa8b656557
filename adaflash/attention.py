"""Block attention of the drafter over packed rows: many anchors of many sequences in one pass, nothing padded.

Every block sees its sequence's context before its anchor, and itself. On CPU the blocks are sorted and walked in small
tiles, so that a mask exists for one tile only and a context is never copied per anchor; on CUDA the same rule is a
`flex_attention` block mask. (DFlash, arXiv 2602.06036, section 3; sliding layers as SGLang's `models/dflash.py`.)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_TILE_ROWS = 128  # block rows attended at once on CPU


@dataclass(frozen=True)
class Layout:
    """Where the blocks of one forward belong.

    `order` [n] sorts the blocks by (sequence, anchor); everything else is in sorted order. `starts[s]`, `lengths[s]`:
    rows of sequence s in the packed context. `positions` [n * width] of every block row.
    """

    order: Tensor
    sequence: list[int]
    anchor: list[int]
    starts: list[int]
    lengths: list[int]
    width: int
    positions: Tensor
    masks: dict[int | None, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, sequence: Tensor, anchor: Tensor, lengths: Sequence[int], width: int) -> Layout:
        """sequence, anchor [n] int64: block i starts at position anchor[i] of context row sequence[i]."""
        pairs = list(zip(sequence.tolist(), anchor.tolist(), strict=True))
        order = sorted(range(len(pairs)), key=pairs.__getitem__)
        starts = [0]
        for n in lengths:
            starts.append(starts[-1] + n)
        device = anchor.device
        places = torch.tensor(order, device=device)
        positions = (anchor[places, None] + torch.arange(width, device=device)).flatten()
        rows, anchors = [pairs[i][0] for i in order], [pairs[i][1] for i in order]
        return cls(places, rows, anchors, starts, list(lengths), width, positions)


def attend(
    q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, layout: Layout, window: int | None
) -> Tensor:
    """q [n * B, heads, d], k and v [n * B, kv_heads, d], context_{k,v} [rows, kv_heads, d] -> [n * B, heads, d].

    `window`: tokens that a sliding layer sees, itself included; such a layer is causal inside the block, too.
    """
    if q.is_cuda:
        return _flex(q, k, v, context_k, context_v, layout, window)
    return _tiles(q, k, v, context_k, context_v, layout, window)


def _tiles(
    q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, layout: Layout, window: int | None
) -> Tensor:
    """Tile by tile; the heads that share keys are rows of the same product."""
    heads, kv_heads, d = q.shape[1], k.shape[1], q.shape[2]
    group, width = heads // kv_heads, layout.width
    out = []
    for first, last in _tile_bounds(layout):
        rows = slice(first * width, last * width)
        start, seen = layout.starts[layout.sequence[first]], min(layout.anchor[last - 1], _length(layout, first))
        keys = torch.cat([context_k[start : start + seen], k[rows]]).transpose(0, 1)[None]
        values = torch.cat([context_v[start : start + seen], v[rows]]).transpose(0, 1)[None]
        n = (last - first) * width
        queries = q[rows].view(n, kv_heads, group, d).permute(1, 2, 0, 3).reshape(1, kv_heads, group * n, d)
        mask = _tile_mask(layout, first, last, seen, window).to(q.device).repeat(group, 1)
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        out.append(attended.view(kv_heads, group, n, d).permute(2, 0, 1, 3).reshape(n, heads, d))
    return torch.cat(out) if out else q


def _length(layout: Layout, block: int) -> int:
    return layout.lengths[layout.sequence[block]]


def _tile_bounds(layout: Layout) -> list[tuple[int, int]]:
    """[first, last) blocks of each tile; a tile never spans two sequences."""
    size, bounds, first = max(1, _TILE_ROWS // layout.width), [], 0
    for i in range(1, len(layout.sequence) + 1):
        if i == len(layout.sequence) or layout.sequence[i] != layout.sequence[first] or i - first == size:
            bounds.append((first, i))
            first = i
    return bounds if layout.sequence else []


def _tile_mask(layout: Layout, first: int, last: int, seen: int, window: int | None) -> Tensor:
    """[rows, seen + rows] bool: which of the tile's keys each of its rows attends to."""
    anchor = torch.tensor(layout.anchor[first:last])
    width, n = layout.width, last - first
    block, slot = torch.arange(n).repeat_interleave(width), torch.arange(width).repeat(n)
    position = anchor[block] + slot
    context = torch.arange(seen)
    to_context = context < anchor[block, None]
    to_block = block[:, None] == block
    if window is not None:
        to_context &= context > position[:, None] - window
        to_block &= (position <= position[:, None]) & (position > position[:, None] - window)
    return torch.cat([to_context, to_block], 1)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, layout: Layout, window: int | None
) -> Tensor:
    """One call over [all contexts ; all blocks]; the block mask is built once per forward and kind of layer."""
    keys, values = torch.cat([context_k, k]), torch.cat([context_v, v])
    mask = layout.masks.get(window)
    if mask is None:
        mask = layout.masks[window] = flex_mask(layout, len(context_k), window, q.device)
    out = _flex_attention(q.is_cuda)(
        q.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        block_mask=mask,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


@functools.cache
def _flex_attention(compiled: bool) -> Any:
    """Uncompiled it is a slow, exact stand-in that the tests hold against the tiles."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention


def flex_mask(layout: Layout, context_rows: int, window: int | None, device: torch.device) -> Any:
    """The `BlockMask` of a layout."""
    from torch.nn.attention.flex_attention import create_block_mask

    n, width = len(layout.sequence), layout.width
    lengths = torch.tensor(layout.lengths, device=device)
    context_row = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
    context_position = torch.cat([torch.arange(x, device=device) for x in layout.lengths])
    block = torch.arange(n, device=device).repeat_interleave(width)
    row = torch.tensor(layout.sequence, device=device)[block]
    anchor = torch.tensor(layout.anchor, device=device)[block]
    position = layout.positions.to(device)
    key_row = torch.cat([context_row, row])
    key_position = torch.cat([context_position, position])
    key_block = torch.cat([torch.full_like(context_row, -1), block])

    def rule(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        in_context = (key_block[j] < 0) & (key_row[j] == row[i]) & (key_position[j] < anchor[i])
        in_block = key_block[j] == block[i]
        if window is not None:
            near = key_position[j] > position[i] - window
            return (in_context & near) | (in_block & near & (key_position[j] <= position[i]))
        return in_context | in_block

    return create_block_mask(rule, None, None, n * width, context_rows + n * width, device=str(device))
