"""One optimiser step of on-policy distillation: features in, updated drafter out.

Called by the trainer's learner and by `adaflash pretrain`; both only choose which sequences to pass.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from adaflash.acceptance import encode_padded
from adaflash.drafter import Drafter
from adaflash.losses import decay_weights, distill
from adaflash.target import Features


class DistillConfig(BaseModel):
    """Knobs of the loss and the optimiser."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    alpha: float = Field(0.8, ge=0, le=1, description="share of cross-entropy; the rest is reverse KL")
    clip: float = Field(10.0, gt=0, description="per-token limit of the reverse KL, nats")
    decay: float = Field(7.0, gt=0, description="slot weight exp(-(k-1)/decay)")
    anchors: int = Field(48, gt=0, description="anchors drawn per optimiser step, shared evenly between its sequences")
    learning_rate: float = Field(0.02, gt=0, description="Muon, for the matrices")
    average: float = Field(0.95, ge=0, lt=1, description="decay of the running average of weights; 0: none")
    vector_learning_rate: float = Field(1e-3, gt=0, description="AdamW, for the norms")


@dataclass(frozen=True)
class StepReport:
    """What one step saw: means over its slots."""

    loss: float
    cross_entropy: float
    reverse_kl: float
    clipped_share: float
    agreement: float
    slots: int


class Distiller:
    """Owns drafter, optimisers and random state; everything needed to resume is in `state()`."""

    def __init__(self, drafter: Drafter, embedding: Tensor, head: Tensor, config: DistillConfig, seed: int) -> None:
        self.drafter, self.embedding, self.head, self.config = drafter, embedding, head, config
        matrices = [p for p in drafter.parameters() if p.ndim == 2]
        vectors = [p for p in drafter.parameters() if p.ndim < 2]
        self.muon = torch.optim.Muon(matrices, lr=config.learning_rate, weight_decay=0.0, adjust_lr_fn="original")
        self.adamw = torch.optim.AdamW(vectors, lr=config.vector_learning_rate, weight_decay=0.0)
        self.generator = torch.Generator().manual_seed(seed)
        self.steps = 0
        # The learning rate is constant, since traffic has no end; averaging takes the place of annealing it.
        self.averaged = copy.deepcopy(drafter).requires_grad_(False)

    def step(self, batch: Sequence[Features]) -> StepReport | None:
        """Trains on `batch`; None (and no change) when no sequence has a token to draft after its first."""
        usable = [f for f in batch if len(f.ids) - f.prompt >= 2]
        if not usable:
            return None
        device, width = self.embedding.device, self.drafter.config.block_size
        row, anchor = (x.to(device) for x in self._draw_anchors(usable))
        ids = torch.nn.utils.rnn.pad_sequence([f.ids for f in usable], batch_first=True)
        final = torch.nn.utils.rnn.pad_sequence([f.final for f in usable], batch_first=True)
        lengths = torch.tensor([len(f.ids) for f in usable], device=device)
        prompts = torch.tensor([f.prompt for f in usable], device=device)

        block = self.drafter.block_embeddings(self.embedding, ids[row, anchor])
        hidden = self.drafter(encode_padded(self.drafter, usable), row, anchor, block)
        slot = torch.arange(1, width, device=device).expand(len(row), -1)
        inside = anchor[:, None] + slot < lengths[row][:, None]
        # Target position anchor + k - 1 predicts slot k; `final` starts at position prompt - 1.
        at = (anchor[:, None] + slot - prompts[row][:, None]).clamp_max(final.shape[1] - 1)
        teacher = final[row[:, None], at]
        out = distill(
            hidden[:, 1:][inside],
            teacher[inside],
            self.head,
            decay_weights(slot[inside], self.config.decay),
            alpha=self.config.alpha,
            clip=self.config.clip,
            teacher_argmax=None,
        )
        self.muon.zero_grad()
        self.adamw.zero_grad()
        out.loss.backward()
        self.muon.step()
        self.adamw.step()
        self.steps += 1
        self._average()
        report = StepReport(
            float(out.loss.detach()),
            float(out.cross_entropy.mean()),
            float(out.reverse_kl.mean()),
            float(out.clipped_share),
            float(out.agreement.mean()),
            int(inside.sum()),
        )
        return report

    def _average(self) -> None:
        """Short memory at first, so that a random start is forgotten."""
        keep = min(self.config.average, self.steps / (self.steps + 4))
        with torch.no_grad():
            for mean, p in zip(self.averaged.parameters(), self.drafter.parameters(), strict=True):
                mean.lerp_(p, 1 - keep)

    def _draw_anchors(self, batch: Sequence[Features]) -> tuple[Tensor, Tensor]:
        """The same number of anchors per sequence, so that long ones do not starve short ones."""
        share = max(1, self.config.anchors // len(batch))
        rows, anchors = [], []
        for i, f in enumerate(batch):
            places = torch.randperm(len(f.ids) - 1 - f.prompt, generator=self.generator)[:share] + f.prompt
            rows.append(torch.full_like(places, i))
            anchors.append(places)
        return torch.cat(rows), torch.cat(anchors)

    def finite(self) -> bool:
        """False if any parameter is NaN or infinite; such a drafter is never published."""
        return all(bool(torch.isfinite(p).all()) for p in self.averaged.parameters())


def mean_report(reports: Sequence[StepReport]) -> dict[str, float]:
    """Slot-weighted means of several steps, for the log and the manifest."""
    slots = sum(r.slots for r in reports)
    if not slots:
        return {}
    keys = [k for k in asdict(reports[0]) if k != "slots"]
    return {k: sum(getattr(r, k) * r.slots for r in reports) / slots for k in keys} | {"slots": float(slots)}
