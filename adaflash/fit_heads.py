"""`adaflash fit-length-head`: gives a drafter its length and confidence heads, or refits and calibrates those it has.

The drafter's trunk stays bit for bit what it was. To be run after a drafter changed, on samples of current traffic;
progress is kept in `<out>.fitting`, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from adaflash.acceptance import Acceptance, length_rule, replay, survival_rule
from adaflash.checkpoint import weights_fingerprint
from adaflash.distill import Blocks, DistillConfig, draw_blocks, heads_loss
from adaflash.drafter import Drafter, random_drafter
from adaflash.errors import UserError
from adaflash.fingerprints import fingerprint
from adaflash.heads import DEFAULT_WIDTH, expected_calibration_error, fit_temperatures
from adaflash.samples import Progress
from adaflash.target import Features, Target
from adaflash.vocabulary import HiddenTeacher, SlotValues, slot_pass

RATE, LEAST_SURVIVAL = 1.3, 0.3
_SEQUENCES, _SAVE_EVERY, _HELD_OUT = 8, 50, 0.2
_CALIBRATION_ANCHORS = 1024


class FitError(UserError):
    """The heads cannot be fitted; the message says why."""


@dataclass(frozen=True)
class Fit:
    """What fitting reached on held-out samples: calibration error before and after, and what each rule would do."""

    steps: int
    error_before: float
    error_after: float
    static: Acceptance
    by_length: Acceptance
    by_survival: Acceptance


def with_heads(drafter: Drafter, seed: int) -> Drafter:
    """The drafter itself if it has both heads, else a copy with the missing ones, freshly initialised."""
    if drafter.length_head is not None and drafter.confidence_head is not None:
        return drafter
    width = drafter.config.length_head or DEFAULT_WIDTH
    out = random_drafter(drafter.config.with_heads(length_head=width, confidence_head=True), seed)
    out.load_state_dict(drafter.state_dict(), strict=False)
    return out


def fit_heads(
    drafter: Drafter,
    target: Target,
    features: Sequence[Features],
    file: Path,
    *,
    steps: int,
    rate: float,
    seed: int,
    progress: Progress,
) -> Fit:
    """Trains the heads of `drafter` in place, calibrates them on held-out sequences, and reports.

    `file` keeps what an interrupted run has done; FitError if it belongs to another drafter, samples, seed or rate.
    """
    usable = [f for f in features if len(f.ids) - f.prompt >= 2]
    if len(usable) < 4:
        raise FitError("fitting needs at least four samples with something to draft: to train, calibrate and judge on")
    assert drafter.confidence_head is not None and drafter.length_head is not None
    count = max(2, int(len(usable) * _HELD_OUT))  # half of those calibrate, half judge
    mixed = random.Random(seed).sample(usable, len(usable))  # a file may be sorted
    held, training = mixed[:count], mixed[count:]
    heads = [p for n, p in drafter.named_parameters() if n.startswith(("length_head.", "confidence_head."))]
    optimizer = torch.optim.AdamW(heads, lr=rate)
    mine = weights_fingerprint({n: p.detach() for n, p in drafter.trunk_parameters()})
    mine = fingerprint([mine.encode(), f"{seed} {rate}".encode(), *(f.ids.cpu().numpy().tobytes() for f in usable)])
    done = _restore(drafter, optimizer, mine, file)
    config = DistillConfig()
    for step in range(done, steps):
        chooser = random.Random(f"{seed} {step}")
        batch = chooser.sample(training, min(_SEQUENCES, len(training)))
        generator = torch.Generator().manual_seed(chooser.getrandbits(62))
        hidden, blocks, seen = _observe(drafter, target, batch, config, generator)
        optimizer.zero_grad()
        heads_loss(drafter, hidden, blocks, seen.argmax, seen.overlap).backward()
        optimizer.step()
        if (step + 1) % _SAVE_EVERY == 0:
            _save(drafter, optimizer, step + 1, mine, file)
        progress("fitting", step + 1, steps)
    before, after = _calibrate(drafter, target, held[::2], held[1::2], seed)
    walks = [
        replay(drafter, held, target.embedding, target.head, rule)
        for rule in (None, length_rule(RATE), survival_rule(LEAST_SURVIVAL))
    ]
    return Fit(steps, before, after, *walks)


@torch.no_grad()
def _observe(
    drafter: Drafter, target: Target, batch: Sequence[Features], config: DistillConfig, generator: torch.Generator
) -> tuple[Tensor, Blocks, SlotValues]:
    """Blocks on `batch`, their states [n, B, H], and what the slots' distributions say; no loss is computed."""
    blocks = draw_blocks(drafter, target.embedding, batch, config, generator)
    hidden = drafter(drafter.encode([f.context for f in batch]), *blocks.place, blocks.embeddings)
    teacher, used = HiddenTeacher(blocks.teacher_states, target.head), hidden[:, 1:][blocks.inside]
    seen = slot_pass(used, target.head, teacher, blocks.rows, blocks.slots.token, [], overlap=True)
    return hidden, blocks, seen


def _calibrate(
    drafter: Drafter, target: Target, fit_on: Sequence[Features], judge_on: Sequence[Features], seed: int
) -> tuple[float, float]:
    """Fits the temperatures on what held-out blocks really accepted; returns the error on others, before and after."""
    head = drafter.confidence_head
    assert head is not None
    raw, accepted, reached = _outcomes(drafter, target, fit_on, seed)
    other_raw, other_accepted, other_reached = _outcomes(drafter, target, judge_on, seed)

    def error() -> float:
        probability = torch.sigmoid(other_raw / head.temperature)
        return expected_calibration_error(probability[other_reached], other_accepted[other_reached].float())

    head.temperature.fill_(1.0)
    before = error()
    head.temperature.copy_(fit_temperatures(raw, accepted.float(), reached))
    return before, error()


@torch.no_grad()
def _outcomes(
    drafter: Drafter, target: Target, sequences: Sequence[Features], seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Uncalibrated logits, what was accepted, and which slots were reached, each [n, B - 1]."""
    config = DistillConfig(anchors=max(_CALIBRATION_ANCHORS, len(sequences)))
    hidden, blocks, seen = _observe(drafter, target, sequences, config, torch.Generator().manual_seed(seed))
    accepted = (blocks.spread(seen.argmax) == blocks.token) & blocks.inside
    # A slot is only ever judged when every slot before it was accepted.
    before = torch.cat([torch.ones_like(accepted[:, :1]), accepted[:, :-1]], 1).long().cumprod(-1).bool()
    assert drafter.confidence_head is not None
    return drafter.confidence_head.raw(hidden), accepted, before & blocks.inside


def _save(drafter: Drafter, optimizer: torch.optim.Optimizer, step: int, mine: str, file: Path) -> None:
    scratch = file.with_name(file.name + ".tmp")
    state = {"step": step, "of": mine, "heads": _heads_state(drafter), "optimizer": optimizer.state_dict()}
    torch.save(state, scratch)
    os.replace(scratch, file)


def _restore(drafter: Drafter, optimizer: torch.optim.Optimizer, mine: str, file: Path) -> int:
    if not file.is_file():
        return 0
    try:
        state = torch.load(file, weights_only=True, map_location="cpu")
        if state["of"] != mine:
            raise FitError(
                f"{file} belongs to a run with another drafter, samples, seed or rate: give --restart to discard it"
            )
        drafter.load_state_dict(state["heads"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])
    except UserError:
        raise
    except Exception as error:
        raise FitError(f"{file} cannot be read ({type(error).__name__}); give --restart to start afresh") from error


def _heads_state(drafter: Drafter) -> dict[str, Tensor]:
    state = drafter.state_dict()
    return {n: t for n, t in state.items() if n.startswith(("length_head.", "confidence_head."))}
