"""Every loss as its formula reads, dense and differentiable; any float dtype. The slow, obvious counterpart."""

from __future__ import annotations

import torch
from torch import Tensor

from adaflash.losses import LossSettings, Slots


def log_probabilities(hidden: Tensor, teacher: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Drafter's and target's log-probabilities [n, V]."""
    return (hidden @ head.T).log_softmax(-1), (teacher @ head.T).log_softmax(-1)


def plain_loss(log_p: Tensor, log_q: Tensor, slots: Slots, s: LossSettings) -> Tensor:
    """sum_k w_k l_k / sum_k w_k, written out."""
    p, q = log_p.exp(), log_q.exp()
    label = log_q.argmax(-1)
    ce_teacher = -log_p.gather(-1, label[:, None])[:, 0]
    if s.clip_kind == "token":
        rkl = (p * (log_p - log_q)).sum(-1).clamp_max(s.clip)
    else:
        rkl = (p * (log_p - log_q)).clamp_max(s.clip).sum(-1)
    decay = torch.exp(-(slots.slot - 1).to(log_p.dtype) / s.decay)
    one = torch.ones_like(decay)
    if s.name == "adaflash":
        value, weight = s.alpha * ce_teacher + (1 - s.alpha) * rkl, decay
    elif s.name == "dflash":
        value, weight = ce_teacher, decay
    elif s.name == "sft":
        value, weight = -log_p.gather(-1, slots.token[:, None])[:, 0], one
    elif s.name == "tv":
        value, weight = (p - q).abs().sum(-1) / 2, decay
    elif s.name == "dpace":
        value, weight = ce_teacher, dpace(p.gather(-1, label[:, None])[:, 0].detach(), slots, s.dpace_floor)
    else:
        forward = (q * (log_q - log_p)).sum(-1)
        value, weight = torch.where(slots.accepted, forward, s.rejected_weight * rkl), one
    return (weight * value).sum() / weight.sum()


def dpace(p: Tensor, slots: Slots, floor: float) -> Tensor:
    """s_k = sum over j >= k of prod over l <= j of [(1 - a) p_l + a], one block at a time."""
    out = torch.zeros_like(p)
    for b in slots.block.unique():
        members = (slots.block == b).nonzero()[:, 0]
        for k in range(len(members)):
            for j in range(k, len(members)):
                product = torch.ones((), dtype=p.dtype)
                for m in members[: j + 1]:
                    product = product * ((1 - floor) * p[m] + floor)
                out[members[k]] += product
    return out


def event_log_probabilities(log_p: Tensor, log_q: Tensor, ids: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """Both distributions over (k stored tokens, rest): [n, k + 1]."""
    kept = log_p.gather(-1, ids)
    rest = (1 - kept.exp().sum(-1, keepdim=True)).log()
    tail = torch.log1p(-stored.exp().sum(-1, keepdim=True))
    return torch.cat([kept, rest], -1), torch.cat([stored, tail], -1)
