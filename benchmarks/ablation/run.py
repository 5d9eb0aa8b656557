"""One run of the ablation: a variant with a seed, trained for a fixed number of steps, judged by replay on the way."""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adaflash.acceptance import Acceptance, Step, replay
from adaflash.checkpoint import load_drafter, save_drafter
from adaflash.distill import DistillConfig, Distiller
from adaflash.drafter import Drafter, random_drafter
from adaflash.drafter_config import DrafterConfig
from adaflash.target import Features, Target
from benchmarks.ablation.data import Data
from benchmarks.ablation.variants import BASE, Setting, Variant

SEQUENCES, ANCHORS = 8, 48
STEPS = {"scratch": 60, "shift": 40}
EVERY = 20  # steps between two evaluations; the logs of a serving drafter are renewed then
OLD_DOMAIN, NEW_DOMAIN = "code", "math"
START_STEPS = 100


@dataclass
class Bench:
    """What all runs share. `work` keeps the drafters that the runs start from."""

    target: Target
    config: DrafterConfig
    data: Data
    work: Path

    def pool(self, domain: str) -> list[Features]:
        """Training sequences of one domain."""
        return [f for f, d in zip(self.data.training, self.data.training_domains, strict=True) if d == domain]

    def distiller(self, drafter: Drafter, v: Variant, head: Tensor, seed: int) -> Distiller:
        """With the baseline's settings where the variant has none of its own."""
        config = DistillConfig(**BASE | {"anchors": ANCHORS} | v.config)
        return Distiller(drafter, self.target.embedding, head, config, seed)


def run(bench: Bench, v: Variant, seed: int) -> dict[str, Any]:
    """A result row: the curve of replayed tau over slots trained, final tau per domain, seconds per step."""
    drafter, found = load_start(bench, v.setting, seed)
    head, vocabulary = draft_head(bench, v)
    d = bench.distiller(drafter, v, head, seed)
    chooser, curve, seconds, slots = random.Random(seed), [[0, found.tau]], [], 0
    for _ in range(STEPS[v.setting] // EVERY):
        batches = [draw(bench, v, chooser) for _ in range(EVERY)]
        for batch in serve(bench, d, batches) if needs_logs(d.config) else batches:
            started = time.perf_counter()
            report = d.step(batch)
            seconds.append(time.perf_counter() - started)
            slots += report.slots if report else 0
        found = judge(bench, d.averaged, head, vocabulary)
        curve.append([slots, found.tau])
    return {
        "variant": v.name,
        "setting": v.setting,
        "seed": seed,
        "tau": found.tau,
        "domains": found.by(bench.data.held_out_domains),
        "curve": curve,
        "step_seconds": statistics.median(seconds),
    }


def step_seconds(bench: Bench, v: Variant, steps: int = 4) -> float:
    """Median time of a few steps with nothing beside, all processors in use."""
    d = bench.distiller(random_drafter(bench.config, 0), v, draft_head(bench, v)[0], 0)
    chooser, seconds = random.Random(0), []
    for _ in range(steps):
        batch = draw(bench, v, chooser)
        started = time.perf_counter()
        d.step(batch)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def judge(bench: Bench, drafter: Drafter, head: Tensor, vocabulary: Tensor | None) -> Acceptance:
    """Replay on the held-out sequences of both domains."""
    return replay(drafter, bench.data.held_out, bench.target.embedding, head, vocabulary=vocabulary)


def draw(bench: Bench, v: Variant, chooser: random.Random) -> list[Features]:
    """The sequences of one step."""
    if v.setting == "scratch":
        return chooser.sample(bench.data.training, SEQUENCES)
    fresh = round(SEQUENCES * v.new_share)
    return chooser.sample(bench.pool(NEW_DOMAIN), fresh) + chooser.sample(bench.pool(OLD_DOMAIN), SEQUENCES - fresh)


def needs_logs(config: DistillConfig) -> bool:
    """Whether the variant reads what serving accepted."""
    return config.anchors_at != "random" or config.loss == "draft_opd"


def serve(bench: Bench, d: Distiller, batches: list[list[Features]]) -> list[list[Features]]:
    """The same batches with the log that serving the current drafter would have written."""
    distinct = list({id(f): f for batch in batches for f in batch}.values())
    found = replay(d.averaged, distinct, bench.target.embedding, bench.target.head)
    logs = {id(f): tuple(steps) for f, steps in zip(distinct, found.steps, strict=True)}
    return [[dataclasses.replace(f, accepted=logs[id(f)]) for f in batch] for batch in batches]


def draft_head(bench: Bench, v: Variant) -> tuple[Tensor, Tensor | None]:
    """The target's head, or its rows for the tokens that the training responses use most."""
    if not v.vocabulary:
        return bench.target.head, None
    counts = Counter(t for s in bench.data.samples for t in s.output_ids)
    common = [t for t, _ in counts.most_common(v.vocabulary)]
    seen = set(common)
    rest = [t for t in range(bench.target.head.shape[0]) if t not in seen]
    tokens = torch.tensor(sorted(common + rest[: v.vocabulary - len(common)]))
    return bench.target.head[tokens].contiguous(), tokens


def make_start(bench: Bench, setting: Setting, seed: int) -> None:
    """The drafter that all runs of a setting and seed begin from: random, or distilled on the old domain only."""
    drafter = random_drafter(bench.config, seed)
    if setting == "shift":
        d = bench.distiller(drafter, Variant("start", setting), bench.target.head, seed)
        chooser = random.Random(seed)
        for _ in range(START_STEPS):
            d.step(chooser.sample(bench.pool(OLD_DOMAIN), SEQUENCES))
        drafter = d.averaged
    save_drafter(drafter, start_path(bench.work, setting, seed), torch.float32)
    found = judge(bench, drafter, bench.target.head, None)
    walks = [[dataclasses.astuple(s) for s in walk] for walk in found.walks]
    (start_path(bench.work, setting, seed) / "walks.json").write_text(json.dumps(walks))


def load_start(bench: Bench, setting: Setting, seed: int) -> tuple[Drafter, Acceptance]:
    """That drafter and its replay."""
    home = start_path(bench.work, setting, seed)
    walks = json.loads((home / "walks.json").read_text())
    return load_drafter(home), Acceptance([[Step(*s) for s in walk] for walk in walks])


def start_path(work: Path, setting: Setting, seed: int) -> Path:
    """Where it is kept."""
    return work / f"start-{setting}-{seed}"
