"""Turns a worker's settings into a checked SGLang command line and environment, and starts the engine process."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from adaflash.checkpoint import check_weights, read_drafter_config, read_weights
from adaflash.cost import CostTable, CostTableError
from adaflash.drafter_config import SLIDING, DrafterConfig, DrafterConfigError
from adaflash.errors import UserError
from adaflash.target import target_shape
from serving.sglang_plugin import guard, loader, receipts
from serving.sglang_plugin.settings import RAGGED_MODE
from serving.worker.config import WorkerConfig

logger = logging.getLogger(__name__)

SGLANG_TABLE = "sps.json"


@dataclass(frozen=True)
class Drafter:
    """The drafter an engine starts with: a staged directory, its config and the version label it is served under."""

    directory: Path
    config: DrafterConfig
    label: str


def check_drafter(model: str, directory: Path) -> DrafterConfig:
    """The config of a drafter that fits the target; raises with the offending key otherwise."""
    config = read_drafter_config(directory)
    config.check_target(target_shape(model))
    if on_cpu() and SLIDING in (config.layer_types or ()):
        raise DrafterConfigError(
            "layer_types: sliding_attention layers are not served on the CPU platform; use full_attention"
        )
    check_weights(config, read_weights(directory))
    return config


def check_cost_table(c: WorkerConfig, drafter: Drafter | None, target: str) -> None:
    """Raises CostTableError if the table was measured for something else."""
    if c.cost_table is None or c.verify == "static":
        return
    table = CostTable.load(c.cost_table)
    have: dict[str, tuple[object, object]] = {"target": (table.target, target)}
    if drafter is not None:
        have["block_size"] = (table.block_size, drafter.config.block_size)
    for key, (measured, wanted) in have.items():
        if measured != wanted:
            raise CostTableError(
                f"cost table {c.cost_table}: {key} {measured} was measured, {wanted} is served; "
                "run `adaflash profile-verify` again"
            )
    if table.requests[-1] < c.max_running_requests:
        logger.warning(
            "cost table %s was measured with up to %d requests, up to %d may run: beyond it costs are extrapolated",
            *(c.cost_table, table.requests[-1], c.max_running_requests),
        )


def note_missing_head(c: WorkerConfig, drafter: Drafter | None) -> None:
    """Says so if the rule's head is not there; such a drafter is verified whole."""
    if c.verify == "static" or drafter is None:
        return
    has = drafter.config.length_head if c.verify_rule == "length" else drafter.config.confidence_head
    if not has:
        logger.warning(
            "the drafter has no head for verify_rule %s and is verified whole; `adaflash fit-length-head` gives it one",
            c.verify_rule,
        )


def safest(c: WorkerConfig) -> tuple[WorkerConfig, str]:
    """`c` if the installed SGLang is the one we know; else what can be relied on, and why. UnknownSGLang if strict."""
    report = guard.inspect()
    differs = report.against("adaptive" if c.verify != "static" else c.route)
    if not differs:
        return c, ""
    reason = f"sglang {report.version} differs in {', '.join(differs[:3])}" + (" ..." if len(differs) > 3 else "")
    if c.strict:
        raise UnknownSGLang(f"{reason}: install {guard.SUPPORTED_SGLANG} from the lock file, or set strict = false")
    route = next(r for r in ("dspark", "dflash", "none") if not report.against(r))
    changed = {"route": route, "verify": "static", "cost_table": None}
    return c.model_copy(update=changed), f"{reason}: serving with route {route} and whole blocks"


class UnknownSGLang(UserError):
    """The installed SGLang is not the one that the plugin was written to."""


def on_cpu() -> bool:
    """True where no accelerator is visible to torch."""
    from serving.sglang_cpu import _accelerator_present

    return not _accelerator_present()


def command(c: WorkerConfig, drafter: Drafter | None, run_dir: Path) -> list[str]:
    """The engine's command line."""
    args = [
        *("--model-path", c.model, "--served-model-name", c.served_name, "--host", c.host, "--port", str(c.port)),
        *("--dtype", c.dtype, "--max-running-requests", str(c.max_running_requests)),
        *(f"--admin-api-key={c.admin_key}", "--enable-metrics", "--sleep-on-idle", "--skip-server-warmup"),
        *("--log-level", "warning", "--log-level-http", "error"),
    ]
    if on_cpu():
        args += [
            "--device",
            "cpu",
            "--attention-backend",
            "torch_native",
            "--max-total-tokens",
            str(c.max_total_tokens),
        ]
    if c.context_length is not None:
        args += ["--context-length", str(c.context_length)]
    if not c.overlap:
        args.append("--disable-overlap-schedule")
    if drafter is not None:
        args += ["--speculative-algorithm", c.route.upper(), "--speculative-draft-model-path", str(drafter.directory)]
        args += ["--weight-version", drafter.label, "--custom-weight-loader", loader.IMPORT_PATH]
        if c.route == "dspark":
            # DSPARK counts drafted tokens, the checkpoint counts slots with the anchor.
            args += ["--speculative-dspark-block-size", str(drafter.config.block_size - 1)]
        if c.verify != "static":
            args += ["--speculative-dspark-sps-table-path", str(run_dir / SGLANG_TABLE)]
            if not on_cpu():
                args.append("--speculative-dspark-align-verify-tokens-to-graph-tier")
    return [sys.executable, "-m", "serving.worker.engine", *args, *c.engine_args]


def environment(c: WorkerConfig, target: str, run_dir: Path, stage: Path) -> dict[str, str]:
    """The engine's environment: what our plugin and SGLang's switches read."""
    env = os.environ | {
        receipts.ENV_DIR: str(run_dir),
        loader.ENV_ROOT: str(stage),
        "ADAFLASH_REDIS_URL": c.redis_url,
        "ADAFLASH_MODEL": c.served_name,
        "ADAFLASH_TARGET": target,
        "ADAFLASH_ROUTE": c.route,
        "SGLANG_RAGGED_VERIFY_MODE": RAGGED_MODE[c.verify],
        "SGLANG_DSPARK_USE_GREEDY_DRAFT": "1",
        "SGLANG_DSPARK_FOLDED_PROPOSAL": "1",  # unfolded, confidences would be read from another step's states
    }
    env |= c.verify_settings.to_environment()
    if c.route == "dspark":
        env["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "serving.sglang_plugin.models"
    if on_cpu():
        env["SGLANG_PLATFORM"] = "torch_cpu"
        # Two spinning OpenMP pools on two cores cost an order of magnitude; waiting passively costs a few per cent.
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return env


def end(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """SIGTERM makes SGLang finish what runs; what is left after `seconds` is killed. True if it ended by itself."""
    tree = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
        return False
    finally:
        for child in tree:
            if child.is_running():
                child.kill()
    return True


def scheduler_lost(process: subprocess.Popen[bytes], seen: set[psutil.Process]) -> bool:
    """True if a scheduler of the engine is gone; its HTTP server may live on and answer nothing.

    `seen` keeps the schedulers between calls.
    """
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return False  # the engine itself is gone, which its exit code says better
    seen |= {c for c in children if _has_title(c) and not _forked_by_scheduler(c)}
    return not all(map(_runs, seen))


def _has_title(process: psutil.Process) -> bool:
    try:
        return " ".join(process.cmdline()).startswith("sglang::scheduler")
    except psutil.Error:
        return False  # gone, or a zombie


def _forked_by_scheduler(process: psutil.Process) -> bool:
    """What a scheduler forks, such as `lscpu` while it starts, keeps its title until it executes something."""
    try:
        parent = process.parent()
    except psutil.NoSuchProcess:
        return True  # a scheduler that goes so early ends its engine too
    return parent is not None and _has_title(parent)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start(
    c: WorkerConfig, drafter: Drafter | None, target: str, run_dir: Path, stage: Path, **more: str
) -> subprocess.Popen[bytes]:
    """Starts the engine in its own session, so that a Ctrl-C in the terminal reaches the agent only.

    `more`: further environment.
    """
    env = environment(c, target, run_dir, stage) | more
    # SGLang's planner verifies everything unless it has a table; ours decides in its place.
    flat = {"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [1.0, 1.0], "max_batch_tokens": 2}
    (run_dir / SGLANG_TABLE).write_text(json.dumps(flat))
    return subprocess.Popen(command(c, drafter, run_dir), env=env, start_new_session=True, stdin=subprocess.DEVNULL)
