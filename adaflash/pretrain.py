"""`adaflash pretrain`: offline distillation, so that the first request already meets a useful drafter.

Conversations become samples (given responses, or the target's own), samples become features, and the drafter is
distilled on them exactly as the trainer does it on traffic. Every stage is kept in `<out>.training/`, so that an
interrupted run goes on where it stopped; the drafter's own directory holds nothing but the checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from adaflash.acceptance import Acceptance, replay
from adaflash.bootstrap import drafter_config, target_dtype
from adaflash.checkpoint import load_drafter, save_drafter, weights_fingerprint
from adaflash.distill import DistillConfig, Distiller
from adaflash.drafter import Drafter, random_drafter
from adaflash.errors import UserError
from adaflash.fingerprints import fingerprint
from adaflash.samples import Answerer, Conversation, Progress, Sample, featurize, hold_out, read_samples, write_samples
from adaflash.target import Features, Target, target_shape

LONGEST = 2048  # tokens; longer sequences are cut at the end
_SEQUENCES = 8  # sequences per optimiser step
_HELD_OUT = 0.1
_SAVE_EVERY = 20  # optimiser steps


class PretrainError(UserError):
    """The training cannot go on; the message says why."""


@dataclass(frozen=True)
class PretrainOptions:
    """What a run is made of; a run is only continued with the same ones (`steps` may grow)."""

    model: str
    steps: int
    max_tokens: int
    start: str
    layers: int
    block: int
    seed: int
    length_head: bool
    distill: DistillConfig


@dataclass(frozen=True)
class Result:
    """What a pre-training reached. `skipped` counts samples that could not be used."""

    steps: int
    seconds: float
    before: Acceptance
    after: Acceptance
    domains: list[str]
    skipped: int
    resumed_at: int


def pretrain(o: PretrainOptions, conversations: Sequence[Conversation], out: Path, progress: Progress) -> Result:
    """Answers, distils, and writes the drafter to `out`; Ctrl-C ends early and keeps what was learned."""
    began = time.monotonic()
    work = work_folder(out)
    drafter = _first_drafter(o)
    drafter.config.check_target(target_shape(o.model))
    _claim(work, o, drafter, conversations)
    target = Target(o.model, drafter.config.target_layer_ids, target_dtype(o.model))
    drafter.to(target.device)
    samples, skipped = _samples(o, target, conversations, work, progress)
    features = featurize(target, samples, LONGEST, progress)
    places = hold_out(samples, _HELD_OUT)
    held = [features[i] for i in places]
    training = [f for i, f in enumerate(features) if i not in places] or held
    before = replay(drafter, held, target.embedding, target.head)
    distiller = Distiller(drafter, target.embedding, target.head, o.distill, o.seed)
    resumed = _restore(distiller, work)
    try:
        _train(distiller, training, o, work, progress)
    except KeyboardInterrupt:
        progress("stopped early", distiller.steps, o.steps)
    after = replay(distiller.averaged, held, target.embedding, target.head)
    save_drafter(distiller.averaged, out, target_dtype(o.model))
    domains = [samples[i].domain for i in places]
    return Result(distiller.steps, time.monotonic() - began, before, after, domains, skipped, resumed)


def _first_drafter(o: PretrainOptions) -> Drafter:
    if o.start:
        return load_drafter(o.start)
    return random_drafter(drafter_config(o.model, layers=o.layers, block=o.block, length_head=o.length_head), o.seed)


def _train(d: Distiller, training: Sequence[Features], o: PretrainOptions, work: Path, progress: Progress) -> None:
    """The loop: which sequences a step takes depends on its number only, so a resumed run takes the same ones."""
    while d.steps < o.steps:
        chooser = random.Random(f"{o.seed} {d.steps}")
        d.step(chooser.sample(training, min(_SEQUENCES, len(training))))
        if not d.finite():
            raise PretrainError("a parameter became infinite or NaN; what was saved before it stays")
        if d.steps % _SAVE_EVERY == 0 or d.steps == o.steps:
            _save(d, work)
        progress("distilling", d.steps, o.steps)


def _claim(work: Path, o: PretrainOptions, drafter: Drafter, conversations: Sequence[Conversation]) -> None:
    """Makes `work` this run's; refuses one that belongs to other options, conversations or another first drafter."""
    talk = [json.dumps([c.messages, c.domain]).encode() for c in conversations]
    mine = asdict(o) | {"distill": o.distill.model_dump(), "conversations": fingerprint(talk)}
    mine |= {"start": weights_fingerprint(drafter.state_dict())}
    mine.pop("steps")
    file = work / "run.json"
    if file.is_file():
        try:
            theirs = json.loads(file.read_text())
        except ValueError:
            theirs = {}
        differs = sorted(k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k))
        if differs:
            raise PretrainError(
                f"{work} holds an unfinished or finished run with another {', '.join(differs)}: "
                "give --restart to discard it, or another --out"
            )
        return
    work.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(mine))


def work_folder(out: Path) -> Path:
    """Where the stages of a run that writes to `out` are kept."""
    whole = out.absolute()
    return whole.with_name(whole.name + ".training")


def _samples(
    o: PretrainOptions, target: Target, conversations: Sequence[Conversation], work: Path, progress: Progress
) -> tuple[list[Sample], int]:
    """The answers, batch by batch on disk; those of an earlier run are read back."""
    file = work / "samples.jsonl"
    answered = _complete_lines(file)
    if answered < len(conversations):

        def show(what: str, n: int, _total: int) -> None:
            progress(what, answered + n, len(conversations))

        for batch in Answerer(target, o.model).samples(conversations[answered:], o.max_tokens, show):
            write_samples(file, batch)
    samples, skipped = read_samples(file, target.embedding.shape[0], LONGEST)
    return samples, sum(skipped.values())


def _complete_lines(file: Path) -> int:
    """Number of samples already on disk; a line that an interruption tore is cut off."""
    if not file.is_file():
        return 0
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        file.write_bytes(whole)
    return whole.count(b"\n")


def _save(d: Distiller, work: Path) -> None:
    scratch = work / "state.tmp"
    with scratch.open("wb") as f:
        torch.save(d.state(), f)
        f.flush()
        os.fsync(f.fileno())
    scratch.rename(work / "state.pt")


def _restore(d: Distiller, work: Path) -> int:
    file = work / "state.pt"
    if not file.is_file():
        return 0
    try:
        state: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
        d.restore(state)
    except UserError:
        raise
    except Exception as error:
        raise PretrainError(
            f"{file} cannot be read ({type(error).__name__}); give --restart to start afresh"
        ) from error
    return d.steps
