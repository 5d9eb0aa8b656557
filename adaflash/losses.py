"""Distillation losses behind one interface; the distiller calls `distill` once per step and back-propagates.

A loss is a list of terms (what a slot is compared with), a coefficient per term and slot, and a weight per slot. The
result is always sum_k w_k l_k / sum_k w_k, so that no loss depends on how many slots a batch happens to have.
Sources: AdaFlash arXiv 2607.19223, DFlash 2602.06036, D-PACE 2605.18810, Draft-OPD 2605.29343.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from adaflash.vocabulary import Chunk, SlotValues, Teacher, Term, slot_pass

LossName = Literal["adaflash", "dflash", "sft", "dpace", "tv", "draft_opd"]
ClipKind = Literal["token", "entry"]


@dataclass(frozen=True)
class Slots:
    """Which slots a loss sees, each [n]: block number, slot number k >= 1 in its block, served token, accepted.

    `accepted`: the slot's draft was accepted when the sequence was served (Draft-OPD); blocks are contiguous rows.
    """

    block: Tensor
    slot: Tensor
    token: Tensor
    accepted: Tensor


@dataclass(frozen=True)
class LossSettings:
    """Knobs of all losses; each loss reads the ones it has."""

    name: LossName = "adaflash"
    alpha: float = 0.8
    clip: float = 10.0
    clip_kind: ClipKind = "token"
    decay: float = 7.0
    dpace_floor: float = 0.5
    rejected_weight: float = 1.0


@dataclass(frozen=True)
class DistillLoss:
    """`loss` scalar with gradient; the rest is detached: per slot [n], or a share, for the log and the heads."""

    loss: Tensor
    cross_entropy: Tensor
    divergence: Tensor
    clipped_share: float
    agreement: Tensor
    argmax: Tensor
    overlap: Tensor | None


def distill(
    hidden: Tensor,
    head: Tensor,
    teacher: Teacher,
    rows: Tensor,
    slots: Slots,
    settings: LossSettings,
    *,
    overlap: bool = False,
) -> DistillLoss:
    """The loss of n drafted slots.

    hidden [n, H]: drafter states, the only input that receives a gradient; head [V, H], frozen; rows [n]: each slot's
    row of `teacher`. `overlap` adds 1 - TV per slot, the confidence head's label.
    """
    loss, seen = _Distill.apply(hidden, head, teacher, rows, slots, settings, overlap)
    values: SlotValues = seen.values
    divergence = values.terms[1] if len(values.terms) > 1 else values.terms[0]
    return DistillLoss(
        loss, values.cross_entropy, divergence, seen.clipped, values.agreement, values.argmax, values.overlap
    )


class CrossEntropy:
    """-log p(y), y the teacher's argmax or the served token."""

    def __init__(self, label: Literal["teacher", "served"]) -> None:
        self.label = label

    def __call__(self, c: Chunk, weight: Tensor) -> Tensor:
        y = c.label if self.label == "teacher" else c.token
        c.row += weight
        c.marks.append((y, weight))
        return -c.log_p_of(y)


class ReverseKL:
    """KL(drafter || target) in nats over the whole vocabulary, clipped before any normalisation.

    `token` limits a slot's divergence (a clipped slot has no gradient), `entry` each token's share of it.
    """

    def __init__(self, clip: float, kind: ClipKind) -> None:
        self.clip, self.kind = clip, kind
        # Slots that count, and those of them where the clip took something away; tensors, to spare the device a wait.
        self.used: Tensor | int = 0
        self.clipped: Tensor | int = 0

    def __call__(self, c: Chunk, weight: Tensor) -> Tensor:
        if self.kind == "token":
            raw = torch.linalg.vecdot(c.p, c.gap)
            over, value = raw > self.clip, raw.clamp_max(self.clip)
            kept = weight * ~over
            c.add_multiple(c.gap * kept[:, None])
            c.row -= kept * raw
        else:
            entry = c.p * c.gap
            kept_entries = entry <= self.clip
            over, value = ~kept_entries.all(-1), entry.clamp_max(self.clip).sum(-1)
            slope = (c.gap + 1).mul_(kept_entries)
            c.row -= weight * torch.linalg.vecdot(c.p, slope)
            c.add_multiple(slope.mul_(weight[:, None]))
        counts = weight > 0
        self.used = self.used + counts.sum()
        self.clipped = self.clipped + (over & counts).sum()
        return value


class ForwardKL:
    """KL(target || drafter) in nats."""

    def __call__(self, c: Chunk, weight: Tensor) -> Tensor:
        c.row += weight
        c.add_minus(c.q * weight[:, None])
        return -torch.linalg.vecdot(c.q, c.gap)


class TotalVariation:
    """sum |p - q| / 2: the chance that a sampled draft is rejected."""

    def __call__(self, c: Chunk, weight: Tensor) -> Tensor:
        difference = c.p - c.q
        value = difference.abs().sum(-1) / 2
        half = difference.sign_().mul_(0.5)
        c.row -= weight * torch.linalg.vecdot(c.p, half)
        c.add_multiple(half.mul_(weight[:, None]))
        return value


@dataclass(frozen=True)
class Recipe:
    """A loss: its terms with their coefficients, and the slots' weights once p(label) is known."""

    terms: Callable[[Slots, LossSettings], list[tuple[Term, Tensor]]]
    weights: Callable[[Slots, Tensor, LossSettings], Tensor]


def decay_weights(slot: Tensor, gamma: float) -> Tensor:
    """w_k = exp(-(k - 1) / gamma) for slot numbers k >= 1 (DFlash; AdaFlash, algorithm 2)."""
    return torch.exp(-(slot.float() - 1) / gamma)


def dpace_weights(slots: Slots, p_label: Tensor, floor: float) -> Tensor:
    """s_k = sum_{j >= k} prod_{l <= j} [(1 - a) p_l + a]: what slot k adds to the expected run (D-PACE)."""
    blocks, width = int(slots.block.max()) + 1, int(slots.slot.max())
    factor = p_label.new_zeros(blocks, width, dtype=torch.float32)
    factor[slots.block, slots.slot - 1] = (1 - floor) * p_label + floor
    reach = factor.cumprod(-1)
    return reach.flip(-1).cumsum(-1).flip(-1)[slots.block, slots.slot - 1]


def _constant(slots: Slots, value: float) -> Tensor:
    return torch.full(slots.slot.shape, value, device=slots.slot.device)


def _decay(slots: Slots, _p: Tensor, s: LossSettings) -> Tensor:
    return decay_weights(slots.slot, s.decay)


RECIPES: dict[str, Recipe] = {
    "adaflash": Recipe(
        lambda x, s: [
            (CrossEntropy("teacher"), _constant(x, s.alpha)),
            *([(ReverseKL(s.clip, s.clip_kind), _constant(x, 1 - s.alpha))] if s.alpha < 1 else []),
        ],
        _decay,
    ),
    "dflash": Recipe(lambda x, s: [(CrossEntropy("teacher"), _constant(x, 1.0))], _decay),
    "sft": Recipe(lambda x, s: [(CrossEntropy("served"), _constant(x, 1.0))], lambda x, _p, s: _constant(x, 1.0)),
    "dpace": Recipe(
        lambda x, s: [(CrossEntropy("teacher"), _constant(x, 1.0))],
        lambda x, p, s: dpace_weights(x, p, s.dpace_floor),
    ),
    "tv": Recipe(lambda x, s: [(TotalVariation(), _constant(x, 1.0))], _decay),
    "draft_opd": Recipe(
        lambda x, s: [
            (ForwardKL(), x.accepted.float()),
            (ReverseKL(s.clip, s.clip_kind), s.rejected_weight * (~x.accepted).float()),
        ],
        lambda x, _p, s: _constant(x, 1.0),
    ),
}


@dataclass
class _Seen:
    values: SlotValues
    clipped: float


class _Distill(torch.autograd.Function):
    """Forward computes the gradient too; backward only scales it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        teacher: Teacher,
        rows: Tensor,
        slots: Slots,
        settings: LossSettings,
        overlap: bool,
    ) -> tuple[Tensor, _Seen]:
        recipe = RECIPES[settings.name]
        terms = recipe.terms(slots, settings)
        values = slot_pass(hidden, head, teacher, rows, slots.token, terms, overlap=overlap)
        weight = recipe.weights(slots, values.label_probability, settings)
        share = weight / weight.sum().clamp_min(1e-12)
        loss = share.new_zeros(())
        for (_, coefficient), value in zip(terms, values.terms, strict=True):
            loss = loss + (share * coefficient * value).sum()
        ctx.save_for_backward(values.gradient * share[:, None])
        kl = [t for t, _ in terms if isinstance(t, ReverseKL)]
        return loss, _Seen(values, sum(int(t.clipped) for t in kl) / max(1, sum(int(t.used) for t in kl)))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * upstream[0], None, None, None, None, None, None
