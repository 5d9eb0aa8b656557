"""One optimiser step of on-policy distillation: features in, updated drafter out.

Called by the trainer's learner and by the offline commands; all only choose which sequences to pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from adaflash.anchors import AnchorKind, accepted_slots, draw_anchors
from adaflash.drafter import Drafter
from adaflash.errors import UserError
from adaflash.heads import confidence_loss, length_loss
from adaflash.losses import ClipKind, DistillLoss, LossName, LossSettings, Slots, distill
from adaflash.optim import OptimizerName, Optimizers, WeightAverage, load_optimizer
from adaflash.target import Features
from adaflash.vocabulary import HiddenTeacher

FROZEN_CONTEXT = ("fc.", "hidden_norm.", "k_proj.", "v_proj.", "k_norm.")


class DistillConfig(BaseModel):
    """Knobs of the loss and the optimiser; the defaults follow docs/ablation.md."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    loss: LossName = Field("dpace", description="dpace, adaflash, dflash, sft, tv or draft_opd")
    alpha: float = Field(0.8, ge=0, le=1, description="adaflash: share of cross-entropy; the rest is reverse KL")
    clip: float = Field(10.0, gt=0, description="limit of the reverse KL, nats")
    clip_kind: ClipKind = Field("token", description="what the limit is on: a slot's divergence (token) or its entries")
    decay: float = Field(7.0, gt=0, description="slot weight exp(-(k-1)/decay)")
    dpace_floor: float = Field(0.5, ge=0, le=1, description="dpace: smoothing of the weights")
    rejected_weight: float = Field(1.0, gt=0, description="draft_opd: weight of rejected slots")
    anchors: int = Field(48, gt=0, description="anchors drawn per optimiser step, shared evenly between its sequences")
    anchors_at: AnchorKind = Field("random", description="random places, logged rejections, or half of each (mixed)")
    optimizer: OptimizerName = Field("muon", description="for the matrices: muon or adamw")
    learning_rate: float = Field(0.02, gt=0, description="of the optimiser for the matrices")
    average: float = Field(0.95, ge=0, lt=1, description="decay of the running average of weights; 0: none")
    vector_learning_rate: float = Field(1e-3, gt=0, description="AdamW, for the norms")
    head_learning_rate: float = Field(2e-4, gt=0, description="AdamW, for the length and confidence heads")
    compile: bool = Field(False, description="torch.compile for the drafter's feed-forward; needs a C++ compiler")
    freeze_context: bool = Field(False, description="keep fc, hidden_norm, k_proj, v_proj and k_norm as they are")

    def loss_settings(self) -> LossSettings:
        """The part that `losses` reads."""
        return LossSettings(
            self.loss,
            self.alpha,
            self.clip,
            self.clip_kind,
            self.decay,
            self.dpace_floor,
            self.rejected_weight,
        )


@dataclass(frozen=True)
class StepReport:
    """What one step saw: means over its slots."""

    loss: float
    cross_entropy: float
    divergence: float
    clipped_share: float
    agreement: float
    slots: int


class RestoreError(UserError):
    """A saved state that does not belong to this configuration; the message names the setting."""


class Distiller:
    """Owns drafter, optimisers and random state; everything needed to resume is in `state()`."""

    def __init__(self, drafter: Drafter, embedding: Tensor, head: Tensor, config: DistillConfig, seed: int) -> None:
        self.drafter, self.embedding, self.head, self.config = drafter, embedding, head, config
        for name, p in drafter.trunk_parameters():
            p.requires_grad_(not (config.freeze_context and any(part in name for part in FROZEN_CONTEXT)))
        trunk = [p for _, p in drafter.trunk_parameters() if p.requires_grad]
        names = {n for n, _ in drafter.trunk_parameters()}
        heads = [p for n, p in drafter.named_parameters() if n not in names]
        self.optimizers = Optimizers(trunk, config.optimizer, config.learning_rate, config.vector_learning_rate)
        self.head_optimizer = torch.optim.AdamW(heads, lr=config.head_learning_rate) if heads else None
        self.generator = torch.Generator().manual_seed(seed)
        self.steps = 0
        self.average = WeightAverage(drafter, config.average)
        if config.compile:
            for layer in drafter.layers:
                layer.mlp.compile()  # in place: parameter names stay

    @property
    def averaged(self) -> Drafter:
        """What is judged and published."""
        return self.average.drafter

    def step(self, batch: Sequence[Features]) -> StepReport | None:
        """Trains on `batch`; None (and no change) when no sequence has a token to draft after its first."""
        usable = [f for f in batch if len(f.ids) - f.prompt >= 2]
        if not usable:
            return None
        blocks = draw_blocks(self.drafter, self.embedding, usable, self.config, self.generator)
        hidden = self.drafter(self.drafter.encode([f.context for f in usable]), *blocks.place, blocks.embeddings)
        out = blocks.loss(hidden, self.head, self.config, overlap=self.head_optimizer is not None)
        (out.loss + heads_loss(self.drafter, hidden.detach(), blocks, out.argmax, out.overlap)).backward()
        self.optimizers.step()
        if self.head_optimizer is not None:
            self.head_optimizer.step()
            self.head_optimizer.zero_grad()
        self.steps += 1
        self.average.update(self.drafter, self.steps)
        return StepReport(
            float(out.loss.detach()),
            float(out.cross_entropy.mean()),
            float(out.divergence.mean()),
            out.clipped_share,
            float(out.agreement.mean()),
            int(blocks.inside.sum()),
        )

    def finite(self) -> bool:
        """False if any parameter is NaN or infinite; such a drafter is never published."""
        return all(bool(torch.isfinite(p).all()) for p in self.averaged.parameters())

    def state(self) -> dict[str, Any]:
        """Tensors and numbers only; `restore` continues exactly."""
        return {
            "steps": self.steps,
            "kind": self._kind(),
            "drafter": self.drafter.state_dict(),
            "averaged": self.averaged.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "heads": self.head_optimizer.state_dict() if self.head_optimizer else None,
            "generator": self.generator.get_state(),
        }

    def _kind(self) -> dict[str, Any]:
        """What decides which tensors and momenta there are."""
        c, d = self.config, self.drafter.config
        mine = {"distill.optimizer": c.optimizer, "distill.freeze_context": c.freeze_context}
        return mine | {"length_head": d.length_head, "confidence_head": d.confidence_head}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up where `state` was made; raises RestoreError if that had other parameters to train."""
        for key, value in self._kind().items():
            if state["kind"].get(key) != value:
                saved = state["kind"].get(key)
                raise RestoreError(
                    f"{key} is {value} but the saved state has {saved}: set it back or move the state away"
                )
        self.steps = state["steps"]
        self.drafter.load_state_dict(state["drafter"])
        self.averaged.load_state_dict(state["averaged"])
        self.optimizers.load_state_dict(state["optimizers"])
        if self.head_optimizer is not None and state["heads"] is not None:
            load_optimizer(self.head_optimizer, state["heads"])
        self.generator.set_state(state["generator"])


@dataclass(frozen=True)
class Blocks:
    """The drafted blocks of one step: n blocks of B slots on a batch of sequences.

    `place`: their sequence and anchor, each [n]; `embeddings` [n, B, H]; `inside` [n, B - 1]: slots before the end of
    their sequence; `token` [n, B - 1] served tokens (0 outside); `greedy` [n]: the target's argmax was served;
    `teacher_states` [P, H]: the target's final states; `rows`, `slots`: flat, for the m slots inside.
    """

    place: tuple[Tensor, Tensor]
    embeddings: Tensor
    inside: Tensor
    token: Tensor
    greedy: Tensor
    teacher_states: Tensor
    rows: Tensor
    slots: Slots

    def loss(self, hidden: Tensor, head: Tensor, config: DistillConfig, *, overlap: bool) -> DistillLoss:
        """hidden [n, B, H] drafter states -> the loss over the slots inside."""
        teacher = HiddenTeacher(self.teacher_states, head)
        used = hidden[:, 1:][self.inside]
        return distill(used, head, teacher, self.rows, self.slots, config.loss_settings(), overlap=overlap)

    def spread(self, flat: Tensor) -> Tensor:
        """Values of the m slots inside, back in [n, B - 1]; 0 outside."""
        out = flat.new_zeros(self.inside.shape)
        out[self.inside] = flat
        return out


def draw_blocks(
    drafter: Drafter, embedding: Tensor, batch: Sequence[Features], config: DistillConfig, generator: torch.Generator
) -> Blocks:
    """Chooses anchors on `batch` and gathers what their slots are trained on."""
    device, width = embedding.device, drafter.config.block_size
    row, anchor = draw_anchors(batch, config.anchors, config.anchors_at, generator)
    row, anchor = row.to(device), anchor.to(device)
    lengths = torch.tensor([len(f.ids) for f in batch], device=device)
    prompts = torch.tensor([f.prompt for f in batch], device=device)
    starts = lengths.cumsum(0) - lengths
    states = torch.tensor([len(f.final) for f in batch], device=device)
    ids = torch.cat([f.ids for f in batch])
    numbers = torch.arange(1, width, device=device)
    slot = numbers.expand(len(row), -1)
    inside = anchor[:, None] + slot < lengths[row][:, None]
    token = ids[(starts[row][:, None] + anchor[:, None] + slot).clamp_max(len(ids) - 1)] * inside
    # Target position anchor + k - 1 predicts slot k; `final` starts at position prompt - 1.
    at = (states.cumsum(0) - states)[row][:, None] + anchor[:, None] + slot - prompts[row][:, None]
    block = torch.arange(len(row), device=device)[:, None].expand_as(slot)
    accepted = accepted_slots(batch, row, anchor, numbers)
    return Blocks(
        (row, anchor),
        drafter.block_embeddings(embedding, ids[starts[row] + anchor]),
        inside,
        token,
        torch.tensor([f.greedy for f in batch], device=device)[row],
        torch.cat([f.final for f in batch]),
        at[inside],
        Slots(block[inside], slot[inside], token[inside], accepted[inside]),
    )


def heads_loss(drafter: Drafter, hidden: Tensor, blocks: Blocks, argmax: Tensor, overlap: Tensor | None) -> Tensor:
    """What the heads learn from the same blocks; zero without heads.

    hidden [n, B, H], detached; argmax and overlap (1 - TV) of the m slots inside.
    """
    loss = hidden.new_zeros(())
    matched = (blocks.spread(argmax) == blocks.token) & blocks.inside
    if drafter.length_head is not None:
        # A block cut by the end of its sequence says nothing about how far the run would have gone.
        whole = blocks.inside[:, -1]
        if bool(whole.any()):
            run = matched.float().cumprod(-1).sum(-1)
            if overlap is not None:
                # Sampled tokens say little about one block; its expected run under 1 - TV per slot says it all.
                expected = blocks.spread(overlap).cumprod(-1).sum(-1)
                run = torch.where(blocks.greedy, run, expected)
            loss = loss + length_loss(drafter.length_head(hidden[whole]), run[whole], drafter.config.block_size)
    if drafter.confidence_head is not None and overlap is not None:
        # Greedy verification accepts or not, however flat the distributions are; sampled tokens need the expectation.
        label = torch.where(blocks.greedy[:, None], matched.float(), blocks.spread(overlap))
        # A slot is judged only if every slot before it was accepted, and its confidence is meant under that condition.
        reach = torch.cat([torch.ones_like(label[:, :1]), label[:, :-1]], 1).cumprod(-1)
        loss = loss + confidence_loss(drafter.confidence_head.raw(hidden), label, reach * blocks.inside)
    return loss


def mean_report(reports: Sequence[StepReport]) -> dict[str, float]:
    """Slot-weighted means of several steps, for the log and the manifest."""
    slots = sum(r.slots for r in reports)
    if not slots:
        return {}
    keys = [f.name for f in dataclasses.fields(StepReport) if f.name != "slots"]
    return {k: sum(getattr(r, k) * r.slots for r in reports) / slots for k in keys} | {"slots": float(slots)}
