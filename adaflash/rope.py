"""Rotary position embedding of the drafter: frequencies for plain and scaled variants, and the rotation itself.

The scaled variants take their frequencies from transformers, which is what SGLang's own classes reproduce.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adaflash.drafter_config import DrafterConfig


@dataclass(frozen=True)
class Rope:
    """`inverse_frequency` [rotary_dim / 2] fp32 and the factor on cos and sin (1 except for YaRN)."""

    inverse_frequency: Tensor
    scale: float


def rope_of(c: DrafterConfig) -> Rope:
    """Frequencies for a drafter's config."""
    half = c.rotary_dim // 2
    if c.rope_scaling is None:
        return Rope(c.rope_theta ** (-torch.arange(half, dtype=torch.float32, device="cpu") / half), 1.0)
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**c.rope_scaling, "rope_theta": c.rope_theta, "partial_rotary_factor": c.partial_rotary_factor}
    parameters.setdefault("original_max_position_embeddings", c.max_position_embeddings)
    hf = Qwen3Config(
        hidden_size=c.hidden_size,
        num_attention_heads=c.num_attention_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_position_embeddings,
        rope_parameters=parameters,
    )
    with torch.device("cpu"):
        frequency, scale = ROPE_INIT_FUNCTIONS[c.rope_scaling["rope_type"]](hf, torch.device("cpu"))
    return Rope(frequency.float(), float(scale))


def rotate(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Half-split rotation of the leading dimensions of each head; the rest passes unchanged.

    x [n, heads, head_dim], positions [n] int64.
    """
    frequency = rope.inverse_frequency.to(x.device)
    half = frequency.shape[0]
    angle = positions[:, None].float() * frequency
    cos, sin = (angle.cos() * rope.scale)[:, None, :], (angle.sin() * rope.scale)[:, None, :]
    a, b = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat([turned, x[..., 2 * half :]], -1)
