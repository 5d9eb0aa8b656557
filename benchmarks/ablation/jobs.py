"""What the ablation's processes run: each loads target and data once, then takes one job after the other."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch

from adaflash.bootstrap import drafter_config, target_dtype
from adaflash.samples import Progress
from adaflash.target import Target
from benchmarks.ablation import data
from benchmarks.ablation.run import Bench, make_start, run, step_seconds
from benchmarks.ablation.variants import Setting, Variant
from demo.model import ensure_model

LAYERS, BLOCK = 2, 8
_bench: Bench | None = None


def make_bench(a: argparse.Namespace, show: Progress) -> Bench:
    """Target and data; the first call makes the answers."""
    model = str(ensure_model())
    config = drafter_config(model, layers=LAYERS, block=BLOCK)
    target = Target(model, config.target_layer_ids, target_dtype(model))
    return Bench(target, config, data.load(target, model, a.prompts, a.work, a.sequences, a.held_out, show), a.work)


def enter(a: argparse.Namespace) -> None:
    """In each process, once."""
    global _bench
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // a.processes))
    _bench = make_bench(a, lambda *_: None)


def start_job(setting: Setting, seed: int) -> None:
    """In a process of the pool."""
    assert _bench is not None
    make_start(_bench, setting, seed)


def run_job(variant: Variant, seed: int) -> dict[str, Any]:
    """In a process of the pool."""
    assert _bench is not None
    return run(_bench, variant, seed)


def time_job(variant: Variant) -> float:
    """In a process of the pool, with the others idle."""
    assert _bench is not None
    return step_seconds(_bench, variant)
