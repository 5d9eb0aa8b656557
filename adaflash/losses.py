"""Distillation losses over drafted slots; the learner calls `distill` once per micro-batch and back-propagates.

The vocabulary is wide and the head is frozen, so the loss and its gradient with respect to the drafter's hidden states
are computed chunk by chunk in one pass: no [slots x vocabulary] tensor outlives its chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 24  # logits held at once: 64 MiB in fp32


@dataclass(frozen=True)
class DistillLoss:
    """`loss` scalar with gradient; the rest are detached per-slot values or shares for the log."""

    loss: Tensor
    cross_entropy: Tensor
    reverse_kl: Tensor
    clipped_share: Tensor
    agreement: Tensor


def decay_weights(slots: Tensor, gamma: float) -> Tensor:
    """w_k = exp(-(k - 1) / gamma) for slot numbers k >= 1 (AdaFlash, algorithm 2)."""
    return torch.exp(-(slots.float() - 1) / gamma)


def distill(
    hidden: Tensor,
    teacher: Tensor,
    head: Tensor,
    weight: Tensor,
    *,
    alpha: float = 0.8,
    clip: float = 10.0,
    teacher_argmax: Tensor | None = None,
) -> DistillLoss:
    """L = sum_k w_k [alpha CE_k + (1 - alpha) min(RKL_k, clip)] / sum_k w_k  (AdaFlash, arXiv 2607.19223).

    hidden [n, H]: drafter states of n slots. teacher [n, H]: the target's final-normed states that predict the same
    tokens. head [V, H], frozen. weight [n] >= 0. CE is against the teacher's argmax (`teacher_argmax` [n] saves its
    logits when alpha is 1). RKL = KL(drafter || target) over the whole vocabulary in nats, clipped per token before any
    normalisation; a clipped token has no KL gradient.
    """
    values = _Distill.apply(hidden, teacher, head, weight, alpha, clip, teacher_argmax)
    return DistillLoss(*values)


class _Distill(torch.autograd.Function):
    """Forward computes the gradient too; backward only scales it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        teacher: Tensor,
        head: Tensor,
        weight: Tensor,
        alpha: float,
        clip: float,
        teacher_argmax: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        n, vocab = hidden.shape[0], head.shape[0]
        total = weight.sum().clamp_min(1e-12)
        grad = torch.empty_like(hidden)
        ce, rkl, agree = (hidden.new_empty(n, dtype=torch.float32) for _ in range(3))
        rows = max(1, _CHUNK_ELEMENTS // vocab)
        use_kl = alpha < 1 or teacher_argmax is None
        for i in range(0, n, rows):
            s = slice(i, i + rows)
            log_p = F.log_softmax(F.linear(hidden[s].to(head.dtype), head).float(), -1)
            p = log_p.exp()
            if use_kl:
                teacher_logits = F.linear(teacher[s].to(head.dtype), head).float()
                label = teacher_logits.argmax(-1)
                gap = log_p - F.log_softmax(teacher_logits, -1)
                rkl[s] = (p * gap).sum(-1)
            else:
                assert teacher_argmax is not None
                label, rkl[s] = teacher_argmax[s], 0.0
            ce[s] = -log_p.gather(-1, label[:, None])[:, 0]
            agree[s] = (log_p.argmax(-1) == label).float()
            # d CE / d logits = p - onehot;  d RKL / d logits = p (gap - RKL)
            if alpha < 1:
                keep = (1 - alpha) * (rkl[s] <= clip).float()
                g = p * (alpha + keep[:, None] * (gap - rkl[s][:, None]))
            else:
                g = p * alpha
            g.scatter_add_(-1, label[:, None], g.new_full((len(label), 1), -alpha))
            g *= (weight[s] / total)[:, None]
            grad[s] = F.linear(g.to(head.dtype), head.t()).to(grad.dtype)
        loss = (weight * (alpha * ce + (1 - alpha) * rkl.clamp_max(clip))).sum() / total
        ctx.save_for_backward(grad)
        clipped = (rkl > clip).float().mean() if n else rkl.sum()
        ctx.mark_non_differentiable(ce, rkl, clipped, agree)
        return loss, ce, rkl, clipped, agree

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * upstream[0], None, None, None, None, None, None
