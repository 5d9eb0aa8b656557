"""Turns a worker's settings into a checked SGLang command line and environment, and starts the engine process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from adaflash.checkpoint import check_weights, read_drafter_config, read_weights
from adaflash.drafter_config import SLIDING, DrafterConfig, DrafterConfigError
from adaflash.target import target_shape
from serving.sglang_plugin import loader, receipts
from serving.worker.config import WorkerConfig


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


def on_cpu() -> bool:
    """True where no accelerator is visible to torch."""
    from serving.sglang_cpu import _accelerator_present

    return not _accelerator_present()


def command(c: WorkerConfig, drafter: Drafter | None) -> list[str]:
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
        "SGLANG_RAGGED_VERIFY_MODE": "static",
        "SGLANG_DSPARK_USE_GREEDY_DRAFT": "1",
    }
    if c.route == "dspark":
        env["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "serving.sglang_plugin.models"
    if on_cpu():
        env["SGLANG_PLATFORM"] = "torch_cpu"
        # Two spinning OpenMP pools on two cores cost an order of magnitude; waiting passively costs a few per cent.
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return env


def start(c: WorkerConfig, drafter: Drafter | None, target: str, run_dir: Path, stage: Path) -> subprocess.Popen[bytes]:
    """Starts the engine in its own session, so that a Ctrl-C in the terminal reaches the agent only."""
    env = environment(c, target, run_dir, stage)
    return subprocess.Popen(command(c, drafter), env=env, start_new_session=True, stdin=subprocess.DEVNULL)
