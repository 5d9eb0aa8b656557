"""Replay: what acceptance a drafter would reach on stored sequences, walked exactly as a worker walks them.

Called by the trainer's evaluation and by the offline commands. It has to agree with the acceptance that a worker
serving the same drafter reports; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adaflash.drafter import Context, Drafter
from adaflash.target import Features


@dataclass(frozen=True)
class Acceptance:
    """Tokens emitted by each verify step of each sequence, bonus included, cut at the end of the sequence."""

    steps: list[list[int]]

    @property
    def tau(self) -> float:
        """Acceptance length: tokens per verify step over all sequences; 1.0 when there was no step."""
        taken = sum(map(len, self.steps))
        return sum(map(sum, self.steps)) / taken if taken else 1.0


@torch.inference_mode()
def replay(drafter: Drafter, features: Sequence[Features], embedding: Tensor, head: Tensor) -> Acceptance:
    """Walks all sequences in lock step: draft at the anchor, take the longest matching run + 1, jump.

    The first response token comes from prefill, so it is the first anchor and no step emitted it. `embedding` and
    `head` [vocab, hidden] are the target's.
    """
    width, device = drafter.config.block_size, embedding.device
    context = encode_padded(drafter, features)
    ids, lengths = _pad([f.ids for f in features], width), [len(f.ids) for f in features]
    anchors = [f.prompt for f in features]
    steps: list[list[int]] = [[] for _ in features]
    while live := [i for i, a in enumerate(anchors) if a < lengths[i] - 1]:
        row = torch.tensor(live, device=device)
        anchor = torch.tensor([anchors[i] for i in live], device=device)
        block = drafter.block_embeddings(embedding, ids[row, anchor])
        hidden = drafter(context, row, anchor, block)[:, 1:]
        # Two-dimensional: on a strided 3-D input torch copies the whole transposed head at every call.
        flat = hidden.reshape(-1, hidden.shape[-1]).to(head.dtype)
        proposed = F.linear(flat, head).argmax(-1).view(len(live), width - 1)
        wanted = ids[row[:, None], anchor[:, None] + torch.arange(1, width, device=device)]
        matched = (proposed == wanted).long().cumprod(-1).sum(-1).tolist()
        for i, run in zip(live, matched, strict=True):
            emitted = min(run + 1, lengths[i] - 1 - anchors[i])
            steps[i].append(emitted)
            anchors[i] += emitted
    return Acceptance(steps)


def encode_padded(drafter: Drafter, features: Sequence[Features]) -> Context:
    """Drafter keys and values of several sequences' context, right-padded; anchors mask the padding by position."""
    width = max(len(f.context) for f in features)
    dtype = drafter.fc.weight.dtype
    return drafter.encode(
        torch.stack([F.pad(f.context.to(dtype), (0, 0, 0, width - len(f.context))) for f in features])
    )


def _pad(rows: Sequence[Tensor], extra: int) -> Tensor:
    """Right-pads token rows with -1, `extra` columns beyond the longest, so that no lookup leaves the table."""
    width = max(map(len, rows)) + extra
    return torch.stack([F.pad(r, (0, width - len(r)), value=-1) for r in rows])
