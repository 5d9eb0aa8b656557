"""Reads and writes drafter checkpoints: an HF-style directory with `config.json` and `model.safetensors`.

Safetensors only; nothing here unpickles. Used by the trainer, the CLI and the worker's staging step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from adaflash.drafter import Drafter, DrafterConfig, DrafterConfigError
from adaflash.errors import UserError

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


class CheckpointError(UserError):
    """A checkpoint that must not be used; the message names the file or tensor."""


def read_drafter_config(directory: str | Path) -> DrafterConfig:
    """The config of a checkpoint; raises CheckpointError or DrafterConfigError with one clear line."""
    path = Path(directory) / CONFIG
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"no drafter at {directory}: {CONFIG} is missing") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    return DrafterConfig.from_checkpoint(raw)


def read_weights(directory: str | Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, on CPU, as stored."""
    path = Path(directory) / WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"no drafter at {directory}: {WEIGHTS} is missing")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error


def check_weights(config: DrafterConfig, weights: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError that names the first tensor which is missing, unknown, mis-shaped or not finite."""
    with torch.device("meta"):
        wanted = {n: tuple(t.shape) for n, t in Drafter(config).state_dict().items()}
    for name in wanted:
        if name not in weights:
            raise CheckpointError(f"tensor {name} is missing")
    for name, tensor in weights.items():
        if name not in wanted:
            raise CheckpointError(f"tensor {name} does not belong to this drafter")
        if tuple(tensor.shape) != wanted[name]:
            raise CheckpointError(f"tensor {name} has shape {tuple(tensor.shape)}, expected {wanted[name]}")
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"tensor {name} is not finite")


def save_drafter(drafter: Drafter, directory: str | Path, dtype: torch.dtype) -> None:
    """Writes a checkpoint in `dtype`; the directory is created and its files are replaced."""
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    tensors = {n: t.detach().to(dtype).contiguous() for n, t in drafter.state_dict().items()}
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    (out / CONFIG).write_text(json.dumps(drafter.config.to_checkpoint(dtype), indent=1))


def load_drafter(directory: str | Path) -> Drafter:
    """A drafter in fp32 from a checked checkpoint."""
    config = read_drafter_config(directory)
    weights = read_weights(directory)
    check_weights(config, weights)
    drafter = Drafter(config)
    drafter.load_state_dict(weights)
    return drafter


def checkpoint_dtype(directory: str | Path) -> torch.dtype:
    """The dtype a checkpoint declares."""
    raw = json.loads((Path(directory) / CONFIG).read_text())
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DrafterConfigError(f"dtype {name!r} is not a torch dtype")
    return dtype
