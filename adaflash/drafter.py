"""The DFlash drafter: the model that the trainer distils and the SGLang worker serves from one checkpoint layout.

A block has B slots. Slot 0 is the anchor (the last committed token), slots 1..B-1 hold the mask token and predict the
tokens at anchor + 1 .. anchor + B-1 in one forward. Context is the target's hidden states before the anchor
(DFlash, arXiv 2602.06036; the conventions are those of SGLang's `models/dflash.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from adaflash.errors import UserError, one_line

ARCHITECTURE = "DFlashDraftModel"


class DrafterConfigError(UserError):
    """A drafter whose numbers contradict each other or the target; the message names the key and what to change."""


class DrafterConfig(BaseModel):
    """Everything that fixes the drafter's shapes; read from and written to the checkpoint's `config.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    block_size: int = Field(ge=2, description="slots in a block, the anchor included")
    num_target_layers: int = Field(gt=0)
    target_layer_ids: tuple[int, ...] = Field(min_length=1, description="target layers whose output is the context")
    mask_token_id: int = Field(ge=0)
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 8192

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        last = self.num_target_layers - 1
        outside = [i for i in self.target_layer_ids if not 0 <= i <= last]
        if outside:
            raise ValueError(f"target_layer_ids {outside} are outside the target's 0..{last}")
        if last in self.target_layer_ids:
            # SGLang captures a layer's output where the next layer begins; a missing one breaks the first prefill.
            raise ValueError(
                f"target_layer_ids {last} is the target's last layer, whose output SGLang does not capture"
            )
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even for rotary embeddings")
        return self

    def to_checkpoint(self, dtype: torch.dtype) -> dict[str, Any]:
        """The `config.json` of a checkpoint that stock SGLang loads as `DFLASH` and, with our model class, as `DSPARK`.

        The `markov_*` and `sample_from_anchor` keys are what `DSPARK` asks for; `DFLASH` ignores them.
        """
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "use_sliding_window": False,
            "dtype": str(dtype).removeprefix("torch."),
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
            "markov_rank": 1,
            "markov_head_type": "vanilla",
            "sample_from_anchor": False,
        }

    @classmethod
    def from_checkpoint(cls, raw: dict[str, Any]) -> DrafterConfig:
        """Reads a `config.json`; raises DrafterConfigError that names the key that is missing, wrong or unsupported."""
        if raw.get("architectures") != [ARCHITECTURE]:
            raise DrafterConfigError(f"architectures is {raw.get('architectures')}, expected ['{ARCHITECTURE}']")
        refused = {
            "rope_scaling": raw.get("rope_scaling"),
            "attention_bias": raw.get("attention_bias"),
            "use_sliding_window": raw.get("use_sliding_window"),
            "sliding_attention layers": "sliding_attention" in (raw.get("layer_types") or []),
        }
        for key, value in refused.items():
            if value:
                raise DrafterConfigError(f"{key} is not supported by this drafter implementation")
        nested = raw.get("dflash_config") or {}
        known = {k: raw[k] for k in cls.model_fields if k in raw}
        known |= {k: nested[k] for k in ("mask_token_id", "target_layer_ids") if k in nested}
        try:
            return cls(**known)
        except ValueError as error:
            raise DrafterConfigError(one_line(error)) from error

    def check_target(self, target: TargetShape) -> None:
        """Raises DrafterConfigError if this drafter cannot draft for `target`."""
        mine = {
            "vocab_size": (self.vocab_size, target.vocab_size),
            "hidden_size": (self.hidden_size, target.hidden_size),
            "num_target_layers": (self.num_target_layers, target.num_layers),
        }
        for key, (have, want) in mine.items():
            if have != want:
                raise DrafterConfigError(
                    f"drafter {key} is {have} but the target has {want}: use a drafter of this target"
                )


@dataclass(frozen=True)
class TargetShape:
    """What a drafter has to agree on with its target."""

    vocab_size: int
    hidden_size: int
    num_layers: int


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, statistics in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).to(x.dtype)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding, half-split style. x [..., n, heads, head_dim], positions [..., n] int64."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angle = positions[..., None].float() * frequency
    cos, sin = angle.cos()[..., None, :], angle.sin()[..., None, :]
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


@dataclass(frozen=True)
class Context:
    """The target's hidden states as every drafter layer reads them.

    `keys[i]`, `values[i]`: [sequences, length, kv_heads, head_dim], keys already normed and rotated.
    """

    keys: list[Tensor]
    values: list[Tensor]

    @property
    def length(self) -> int:
        return self.keys[0].shape[1]


class Attention(nn.Module):
    """Queries from the block; keys and values from the context before the anchor and from the whole block."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.theta = (
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            c.rope_theta,
        )
        self.q_proj = nn.Linear(c.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, c.rms_norm_eps)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [b, n, hidden], positions [b, n] -> keys, values [b, n, kv_heads, head_dim]."""
        shape = (*x.shape[:2], self.kv_heads, self.head_dim)
        keys = rotate(self.k_norm(self.k_proj(x).view(shape)), positions, self.theta)
        return keys, self.v_proj(x).view(shape)

    def forward(self, x: Tensor, positions: Tensor, context_k: Tensor, context_v: Tensor, visible: Tensor) -> Tensor:
        """x [a, B, hidden], context_{k,v} [a, L, kv_heads, head_dim], visible [a, L] bool -> [a, B, hidden]."""
        a, width, _ = x.shape
        q = rotate(self.q_norm(self.q_proj(x).view(a, width, self.heads, self.head_dim)), positions, self.theta)
        k, v = self.keys_values(x, positions)
        k, v = torch.cat([context_k, k], 1), torch.cat([context_v, v], 1)
        mask = F.pad(visible, (0, width), value=True)[:, None, None, :]
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            enable_gqa=self.heads != self.kv_heads,
        )
        return self.o_proj(out.transpose(1, 2).reshape(a, width, -1))


class MLP(nn.Module):
    """Gated SiLU feed-forward."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention and feed-forward with residuals; the context enters attention without the input norm."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, positions: Tensor, context_k: Tensor, context_v: Tensor, visible: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, context_k, context_v, visible)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """Trunk only: embedding and LM head belong to the target and are passed in by the caller."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.fc = nn.Linear(config.hidden_size * len(config.target_layer_ids), config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def encode(self, context: Tensor) -> Context:
        """context [sequences, length, K * hidden], positions 0..length-1 -> per-layer keys and values."""
        c = self.hidden_norm(self.fc(context))
        positions = torch.arange(c.shape[1], device=c.device).expand(c.shape[:2])
        pairs = [layer.self_attn.keys_values(c, positions) for layer in self.layers]
        return Context([k for k, _ in pairs], [v for _, v in pairs])

    def forward(self, context: Context, sequence: Tensor, anchor: Tensor, block: Tensor) -> Tensor:
        """Drafts one block per anchor.

        sequence [a] int64: row of `context` that anchor i belongs to; anchor [a] int64: its position;
        block [a, B, hidden]: embeddings of the anchor token and of B-1 mask tokens.
        Returns final-normed hidden states [a, B, hidden]; slot k predicts the token at anchor + k.
        """
        positions = anchor[:, None] + torch.arange(block.shape[1], device=block.device)
        visible = torch.arange(context.length, device=block.device) < anchor[:, None]
        x = block
        for layer, k, v in zip(self.layers, context.keys, context.values, strict=True):
            x = layer(x, positions, k[sequence], v[sequence], visible)
        return self.norm(x)

    def block_embeddings(self, embedding: Tensor, anchor_tokens: Tensor) -> Tensor:
        """embedding [vocab, hidden], anchor_tokens [a] -> [a, B, hidden]: the anchor followed by mask tokens."""
        ids = torch.full(
            (len(anchor_tokens), self.config.block_size), self.config.mask_token_id, device=anchor_tokens.device
        )
        ids[:, 0] = anchor_tokens
        return F.embedding(ids, embedding).to(self.fc.weight.dtype)


def random_drafter(config: DrafterConfig, seed: int) -> Drafter:
    """A drafter with random weights: normal, 0.02, output projections scaled down by depth."""
    drafter = Drafter(config)
    generator = torch.Generator().manual_seed(seed)
    depth = math.sqrt(2 * config.num_hidden_layers)
    with torch.no_grad():
        for name, p in drafter.named_parameters():
            if p.ndim == 2:
                std = 0.02 / depth if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
                p.normal_(0.0, std, generator=generator)
    return drafter
