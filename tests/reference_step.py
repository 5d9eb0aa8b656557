"""A distillation step as one would first write it: one dense mask over all blocks and contexts, dense logits, autograd.

The yardstick of `benchmarks/distill_step.py`, and what the packed step has to agree with in loss and gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from adaflash.drafter import Drafter
from adaflash.drafter_config import DrafterConfig
from adaflash.losses import LossSettings, Slots
from adaflash.target import Features
from tests.reference import frequencies
from tests.reference_losses import plain_loss


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, position: Tensor, c: DrafterConfig) -> Tensor:
    """x [n, heads, d], position [n]."""
    inverse, scale = frequencies(c)
    angle = position[:, None].float() * torch.tensor(inverse)
    cos = torch.cat([angle.cos(), angle.cos()], -1)[:, None].to(x.dtype) * scale
    sin = torch.cat([angle.sin(), angle.sin()], -1)[:, None].to(x.dtype) * scale
    x, rest = x[..., : c.rotary_dim], x[..., c.rotary_dim :]
    a, b = x.chunk(2, -1)
    return torch.cat([x * cos + torch.cat([-b, a], -1) * sin, rest], -1)


def hidden_states(
    drafter: Drafter, embedding: Tensor, batch: Sequence[Features], row: Tensor, anchor: Tensor
) -> Tensor:
    """Final-normed states [n, B, H] of blocks at `anchor` [n] of sequences `row` [n]."""
    c, w = drafter.config, dict(drafter.named_parameters())
    width, n = c.block_size, len(row)
    context = torch.cat([f.context for f in batch])
    context = norm(context @ w["fc.weight"].T, w["hidden_norm.weight"], c.rms_norm_eps)
    owner = torch.cat([torch.full((len(f.context),), i) for i, f in enumerate(batch)])
    place = torch.cat([torch.arange(len(f.context)) for f in batch])
    ids = torch.full((n, width), c.mask_token_id)
    ids[:, 0] = torch.stack([batch[r].ids[a] for r, a in zip(row.tolist(), anchor.tolist(), strict=True)])
    x = F.embedding(ids, embedding).flatten(0, 1).to(context.dtype)
    position = (anchor[:, None] + torch.arange(width)).flatten()
    block = torch.arange(n).repeat_interleave(width)
    sees_context = (owner == row[block][:, None]) & (place < anchor[block][:, None])
    mask = torch.cat([sees_context, block == block[:, None]], 1)
    group = c.num_attention_heads // c.num_key_value_heads
    for i in range(c.num_hidden_layers):
        p = {k.removeprefix(f"layers.{i}."): v for k, v in w.items() if k.startswith(f"layers.{i}.")}
        h = norm(x, p["input_layernorm.weight"], c.rms_norm_eps)
        source, where = torch.cat([context, h]), torch.cat([place, position])
        q = (h @ p["self_attn.q_proj.weight"].T).view(len(h), -1, c.head_dim)
        k = (source @ p["self_attn.k_proj.weight"].T).view(len(source), -1, c.head_dim)
        v = (source @ p["self_attn.v_proj.weight"].T).view(len(source), -1, c.head_dim)
        q = rotate(norm(q, p["self_attn.q_norm.weight"], c.rms_norm_eps), position, c)
        k = rotate(norm(k, p["self_attn.k_norm.weight"], c.rms_norm_eps), where, c)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(c.head_dim)
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -math.inf).softmax(-1), v)
        x = x + attended.flatten(1) @ p["self_attn.o_proj.weight"].T
        h = norm(x, p["post_attention_layernorm.weight"], c.rms_norm_eps)
        gated = F.silu(h @ p["mlp.gate_proj.weight"].T) * (h @ p["mlp.up_proj.weight"].T)
        x = x + gated @ p["mlp.down_proj.weight"].T
    return norm(x, w["norm.weight"], c.rms_norm_eps).view(n, width, -1)


def reference_loss(
    drafter: Drafter,
    embedding: Tensor,
    head: Tensor,
    batch: Sequence[Features],
    row: Tensor,
    anchor: Tensor,
    settings: LossSettings,
) -> Tensor:
    """The whole step's loss, differentiable in the drafter's parameters. Nothing accepted (no log)."""
    width = drafter.config.block_size
    hidden = hidden_states(drafter, embedding, batch, row, anchor)
    used, teacher, blocks, slots, tokens = [], [], [], [], []
    for i, (r, a) in enumerate(zip(row.tolist(), anchor.tolist(), strict=True)):
        f = batch[r]
        for k in range(1, width):
            if a + k < len(f.ids):
                used.append(i * width + k)
                teacher.append(f.final[a + k - 1 - (f.prompt - 1)])
                blocks.append(i)
                slots.append(k)
                tokens.append(f.ids[a + k])
    block, slot = torch.tensor(blocks), torch.tensor(slots)
    what = Slots(block, slot, torch.stack(tokens), torch.zeros(len(block), dtype=torch.bool))
    states, states_q = hidden.flatten(0, 1)[used], torch.stack(teacher)
    return plain_loss((states @ head.T).log_softmax(-1), (states_q @ head.T).log_softmax(-1), what, settings)
