"""The DFlash drafter: the model that the trainer distils and the SGLang worker serves from one checkpoint layout.

A block has B slots. Slot 0 is the anchor (the last committed token), slots 1..B-1 hold the mask token and predict the
tokens at anchor + 1 .. anchor + B-1 in one forward. Context is the target's hidden states before the anchor
(DFlash, arXiv 2602.06036; the conventions are those of SGLang's `models/dflash.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adaflash.attention import Layout, attend
from adaflash.drafter_config import DrafterConfig
from adaflash.heads import ConfidenceHead, LengthHead
from adaflash.rope import rope_of, rotate


@dataclass(frozen=True)
class Context:
    """The target's hidden states of several sequences as every drafter layer reads them, packed row after row.

    `keys[i]`, `values[i]`: [rows, kv_heads, head_dim], keys already normed and rotated; `lengths` of the sequences.
    """

    keys: list[Tensor]
    values: list[Tensor]
    lengths: list[int]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, statistics in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Queries from the block; keys and values from the context before the anchor and from the whole block."""

    def __init__(self, c: DrafterConfig, window: int | None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.window, self.rope = window, rope_of(c)
        self.q_proj = nn.Linear(c.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, c.rms_norm_eps)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [n, hidden], positions [n] -> keys, values [n, kv_heads, head_dim]."""
        shape = (len(x), self.kv_heads, self.head_dim)
        keys = rotate(self.k_norm(self.k_proj(x).view(shape)), positions, self.rope)
        return keys, self.v_proj(x).view(shape)

    def forward(self, x: Tensor, layout: Layout, context_k: Tensor, context_v: Tensor) -> Tensor:
        """x [n * B, hidden] in the layout's order -> the same shape."""
        q = self.q_norm(self.q_proj(x).view(len(x), self.heads, self.head_dim))
        q = rotate(q, layout.positions, self.rope)
        k, v = self.keys_values(x, layout.positions)
        return self.o_proj(attend(q, k, v, context_k, context_v, layout, self.window).flatten(1))


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

    def __init__(self, c: DrafterConfig, window: int | None) -> None:
        super().__init__()
        self.self_attn = Attention(c, window)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, layout: Layout, context_k: Tensor, context_v: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), layout, context_k, context_v)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """Trunk and optional heads: embedding and LM head belong to the target and are passed in by the caller."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config, window) for window in config.windows())
        self.fc = nn.Linear(config.hidden_size * len(config.target_layer_ids), config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.length_head = LengthHead(config.hidden_size, config.length_head) if config.length_head else None
        self.confidence_head = (
            ConfidenceHead(config.hidden_size, config.block_size - 1) if config.confidence_head else None
        )

    def trunk_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """What the distillation trains; heads are fitted on their own and never pull on the trunk."""
        return [(n, p) for n, p in self.named_parameters() if not n.startswith(("length_head.", "confidence_head."))]

    def encode(self, contexts: Sequence[Tensor]) -> Context:
        """contexts[s] [length, K * hidden], positions 0..length-1 -> per-layer keys and values."""
        lengths = [len(c) for c in contexts]
        packed = torch.cat(list(contexts)).to(self.fc.weight.dtype)
        positions = torch.cat([torch.arange(n, device=packed.device) for n in lengths])
        c = self.hidden_norm(self.fc(packed))
        pairs = [layer.self_attn.keys_values(c, positions) for layer in self.layers]
        return Context([k for k, _ in pairs], [v for _, v in pairs], lengths)

    def forward(self, context: Context, sequence: Tensor, anchor: Tensor, block: Tensor) -> Tensor:
        """Drafts one block per anchor.

        sequence [a] int64: sequence of `context` that anchor i belongs to; anchor [a] int64: its position;
        block [a, B, hidden]: embeddings of the anchor token and of B-1 mask tokens.
        Returns final-normed hidden states [a, B, hidden]; slot k predicts the token at anchor + k.
        """
        layout = Layout.of(sequence, anchor, context.lengths, block.shape[1])
        x = block[layout.order].flatten(0, 1)
        for layer, k, v in zip(self.layers, context.keys, context.values, strict=True):
            x = layer(x, layout, k, v)
        out = self.norm(x).view(block.shape)
        return out[torch.argsort(layout.order)]

    def block_embeddings(self, embedding: Tensor, anchor_tokens: Tensor) -> Tensor:
        """embedding [vocab, hidden], anchor_tokens [a] -> [a, B, hidden]: the anchor followed by mask tokens."""
        ids = torch.full(
            (len(anchor_tokens), self.config.block_size), self.config.mask_token_id, device=anchor_tokens.device
        )
        ids[:, 0] = anchor_tokens
        return F.embedding(ids, embedding).to(self.fc.weight.dtype)


def random_drafter(config: DrafterConfig, seed: int) -> Drafter:
    """A drafter with random weights: normal, 0.02, output projections scaled down by depth."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # the heads take torch's own initialisation
        drafter = Drafter(config)
    generator = torch.Generator().manual_seed(seed)
    depth = math.sqrt(2 * config.num_hidden_layers)
    with torch.no_grad():
        for name, p in drafter.named_parameters():
            if p.ndim == 2:
                std = 0.02 / depth if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
                p.normal_(0.0, std, generator=generator)
    return drafter
