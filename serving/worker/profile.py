"""`adaflash profile-verify`: measures what a step costs by requests and rows, on a real engine, for the verify planner.

A random drafter is as expensive as a good one and gets nothing accepted, so every request advances by one token a step
and the batch stays as it is. How many slots are verified is forced through SGLang's own switch, the durations are its
own per-step records; the fit is ours, since SGLang's bins of 64 rows are too coarse for small batches.
"""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from adaflash.bootstrap import target_dtype
from adaflash.checkpoint import read_drafter_config, save_drafter
from adaflash.cost import CostTable, increasing
from adaflash.drafter import random_drafter
from adaflash.drafter_config import DrafterConfig
from adaflash.errors import UserError
from adaflash.heads import DEFAULT_WIDTH
from adaflash.versions import target_fingerprint
from serving.ports import free_port
from serving.sglang_plugin import SUPPORTED_SGLANG
from serving.sglang_plugin.settings import OFF_FRACTION
from serving.worker import launch
from serving.worker.client import Engine, EngineError
from serving.worker.config import WorkerConfig

FRACTIONS = (0.0, 0.15, 0.3, 0.5, 0.75, 1.0)
OFF = -1.0  # stands for a step that drafts nothing
ROUNDS = 3  # passes over all cells, so that a busy moment does not sit in one of them
WARM_STEPS = 4  # per cell and pass, not counted
REQUEST_SECONDS = 600.0

Progress = Callable[[str, int, int], None]


class ProfileError(UserError):
    """The profile could not be taken; the message says why."""


def profile(
    config: WorkerConfig,
    drafter: Path | DrafterConfig,
    *,
    requests: Sequence[int],
    context: int,
    steps: int,
    progress: Progress,
) -> CostTable:
    """Starts an engine with `config` and a drafter of the given shape; `steps` are counted per cell and pass."""
    shape = drafter if isinstance(drafter, DrafterConfig) else read_drafter_config(drafter)
    batches = sorted({r for r in requests if 0 < r <= config.max_running_requests})
    if not batches:
        raise ProfileError(f"no batch size of {list(requests)} fits max_running_requests {config.max_running_requests}")
    longest = batches[-1] * (context + ROUNDS + steps + WARM_STEPS + shape.block_size)
    if longest > config.max_total_tokens and launch.on_cpu():
        raise ProfileError(f"{batches[-1]} requests need {longest} tokens; set max_total_tokens or ask for fewer")
    samples: dict[tuple[int, float], list[float]] = defaultdict(list)
    cells = [(r, f) for r in batches for f in (OFF, *FRACTIONS)] * ROUNDS
    with engine_for(config, shape) as engine:
        for done, (r, fraction) in enumerate(cells):
            progress("steps", done, len(cells))
            samples[r, fraction] += measure(engine, r, fraction, context, steps)
        progress("steps", len(cells), len(cells))
    middle = rising({cell: statistics.median(seconds) for cell, seconds in samples.items()}, batches)
    return CostTable(
        machine=machine(),
        target=target_fingerprint(config.model),
        sglang=SUPPORTED_SGLANG,
        block_size=shape.block_size,
        requests=tuple(batches),
        fractions=FRACTIONS,
        seconds=tuple(tuple(middle[r, f] for f in FRACTIONS) for r in batches),
        plain_seconds=tuple(middle[r, OFF] for r in batches),
    )


def rising(cells: dict[tuple[int, float], float], batches: list[int]) -> dict[tuple[int, float], float]:
    """The nearest costs that fall neither with requests nor with slots."""
    out = dict(cells)
    for _ in range(20):  # alternating projections settle at once unless the measurement was chaotic
        for keys in [[(r, f) for r in batches] for f in (OFF, *FRACTIONS)] + [
            [(r, f) for f in FRACTIONS] for r in batches
        ]:
            out |= dict(zip(keys, increasing([out[k] for k in keys]), strict=True))
    for f in (OFF, *FRACTIONS):  # what is left of chaos
        for low, high in itertools.pairwise(batches):
            out[high, f] = max(out[high, f], out[low, f])
    return out


@contextmanager
def engine_for(config: WorkerConfig, shape: DrafterConfig) -> Iterator[Engine]:
    """An engine whose verify lengths can be forced, with a random drafter that has its heads."""
    heads = shape.with_heads(length_head=shape.length_head or DEFAULT_WIDTH, confidence_head=True)
    changed = {
        "verify": "adaptive",
        "verify_rule": "length",
        "verify_rate": 1000.0,  # every slot is allowed, the forced share decides
        "speculation": "on",
        "cost_table": None,
        "route": "dspark",
        "port": free_port(),
        "redis_url": "",
    }
    c, unknown = launch.safest(config.model_copy(update=changed))
    if unknown:
        raise ProfileError(f"{unknown}: there is nothing to profile")
    with tempfile.TemporaryDirectory(prefix="adaflash-profile-") as folder:
        home = Path(folder)
        save_drafter(random_drafter(heads, 0), home / "drafter", target_dtype(c.model))
        launch.check_drafter(c.model, home / "drafter")
        loaded = launch.Drafter(home / "drafter", heads, "profile")
        process = launch.start(c, loaded, "", home, home, SGLANG_DSPARK_ENABLE_SPS_RECORD="1")
        engine = Engine(c.url, c.admin_key, REQUEST_SECONDS)
        try:
            deadline = time.monotonic() + c.start_seconds
            while not engine.up():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ProfileError("SGLang did not start; its log is above")
                time.sleep(0.5)
            yield engine
        except EngineError as error:
            raise ProfileError(str(error)) from error
        finally:
            launch.end(process, 10)


def measure(engine: Engine, requests: int, fraction: float, context: int, steps: int) -> list[float]:
    """Seconds of steps with exactly `requests` running."""
    share = OFF_FRACTION if fraction == OFF else max(fraction, 2 * OFF_FRACTION)
    engine.set_state(dspark_force_budget_frac=share, dspark_clear_info_records=True)
    prompts = [[(7 * i + j) % 97 + 5 for j in range(context)] for i in range(requests)]
    engine.generate_all(prompts, WARM_STEPS + steps + 1)
    records = [r for r in engine.step_records() if r["num_running_reqs"] == requests and r.get("step_cpu_ms")]
    if len(records) < WARM_STEPS + 2:
        raise ProfileError(f"only {len(records)} steps ran with {requests} requests; give more --steps")
    return [r["step_cpu_ms"] / 1e3 for r in records[WARM_STEPS:]]


def machine() -> str:
    """The device that was measured."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
