"""Where blocks are drafted in training: the anchors of a step, and which of their slots serving had accepted.

Fair per conversation: every sequence of a step gets the same number of anchors, however long it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from adaflash.target import Features

AnchorKind = Literal["random", "rejections", "mixed"]


def draw_anchors(
    batch: Sequence[Features], total: int, kind: AnchorKind, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Rows of `batch` and positions, each [n] int64; `total` anchors shared evenly.

    `random`: any response token that has one after it. `rejections`: where a verify step really began, which is where
    the one before it was rejected; a sequence without a log falls back to random. `mixed`: half and half.
    """
    share = max(1, total // len(batch))
    rows, anchors = [], []
    for i, f in enumerate(batch):
        logged = step_starts(f)
        wanted = {"random": 0, "rejections": share, "mixed": share // 2}[kind] if logged else 0
        places = _some(torch.tensor(logged, dtype=torch.int64), wanted, generator)
        free = torch.arange(f.prompt, len(f.ids) - 1)
        if wanted < share:
            places = torch.cat([places, _some(free, share - wanted, generator)])
        rows.append(torch.full_like(places, i))
        anchors.append(places)
    return torch.cat(rows), torch.cat(anchors)


def _some(places: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return places[torch.randperm(len(places), generator=generator)[:count]]


def step_starts(f: Features) -> list[int]:
    """Positions at which the logged verify steps began, those with a token after them."""
    position, out = f.prompt, []
    for emitted in f.accepted:
        if position >= len(f.ids) - 1:
            break
        out.append(position)
        position += emitted
    return out


def accepted_slots(batch: Sequence[Features], rows: Tensor, anchors: Tensor, slots: Tensor) -> Tensor:
    """Which of `slots` [K] (numbers k >= 1) serving accepted at each anchor: bool [n, K].

    A step that emitted e tokens accepted slots 1..e-1 and rejected slot e. An anchor inside a step has the rest of that
    step's run before it; where nothing was logged, nothing counts as accepted.
    """
    runs = []
    for row, anchor in zip(rows.tolist(), anchors.tolist(), strict=True):
        f, position, run = batch[row], batch[row].prompt, 0
        for emitted in f.accepted:
            if position <= anchor < position + emitted:
                run = position + emitted - 1 - anchor
                break
            position += emitted
        runs.append(run)
    return slots[None, :] <= torch.tensor(runs, device=slots.device)[:, None]
