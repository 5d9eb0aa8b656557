"""Reads and writes drafter checkpoints: an HF-style directory with `config.json` and safetensors.

Safetensors only; nothing here unpickles. Used by the trainer, the CLI and the worker's staging step. The spellings of
other projects exist here and nowhere else: AdaFlash's name of the length head, `model.` prefixes, sharded files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from adaflash.drafter import Drafter
from adaflash.drafter_config import DrafterConfig, DrafterConfigError
from adaflash.errors import UserError
from adaflash.fingerprints import fingerprint

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_THEIR_LENGTH_HEAD, _LENGTH_HEAD = "thresh_head_two_model.", "length_head."
_ALIASES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
_TARGETS_OWN = ("embed_tokens.weight", "lm_head.weight")


class CheckpointError(UserError):
    """A checkpoint that must not be used; the message names the file or tensor."""


def read_raw_config(directory: str | Path) -> dict[str, Any]:
    """The `config.json` as it stands."""
    path = Path(directory) / CONFIG
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"no drafter at {directory}: {CONFIG} is missing") from None
    except OSError as error:
        raise CheckpointError(f"no drafter at {directory}: {error.strerror}; give the directory") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return raw


def read_drafter_config(directory: str | Path) -> DrafterConfig:
    """The config of a checkpoint; raises CheckpointError or DrafterConfigError with one clear line."""
    return DrafterConfig.from_checkpoint(read_raw_config(directory))


def read_weights(directory: str | Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint on CPU, as stored, under our names."""
    out: dict[str, Tensor] = {}
    for path in _weight_files(Path(directory)):
        try:
            out |= load_file(path)
        except SafetensorError as error:
            raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
    return {_our_name(name): tensor for name, tensor in out.items()}


def _weight_files(home: Path) -> list[Path]:
    if (home / WEIGHTS).is_file():
        return [home / WEIGHTS]
    if (home / INDEX).is_file():
        try:
            shards = sorted(set(json.loads((home / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError):
            raise CheckpointError(f"{home / INDEX} has no weight_map") from None
        for name in shards:
            if Path(name).name != name or not (home / name).is_file():
                raise CheckpointError(f"{home / INDEX} names {name}, which is not in the directory")
        return [home / name for name in shards]
    if list(home.glob("*.bin")):
        raise CheckpointError(f"{home} has pickled weights only; convert them to {WEIGHTS}, they are never unpickled")
    raise CheckpointError(f"no drafter at {home}: {WEIGHTS} is missing")


def _our_name(name: str) -> str:
    name = name.removeprefix("model.")
    name = _ALIASES.get(name, name)
    return _LENGTH_HEAD + name.removeprefix(_THEIR_LENGTH_HEAD) if name.startswith(_THEIR_LENGTH_HEAD) else name


def _their_name(name: str) -> str:
    return _THEIR_LENGTH_HEAD + name.removeprefix(_LENGTH_HEAD) if name.startswith(_LENGTH_HEAD) else name


def check_weights(config: DrafterConfig, weights: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError that names the first tensor which is missing, unknown, mis-shaped or not finite."""
    with torch.device("meta"):
        wanted = {n: tuple(t.shape) for n, t in Drafter(config).state_dict().items()}
    for name in wanted:
        if name not in weights:
            raise CheckpointError(f"tensor {_their_name(name)} is missing")
    for name, tensor in weights.items():
        spelled = _their_name(name)
        if name in _TARGETS_OWN or name in ("d2t", "t2d"):
            raise CheckpointError(
                f"tensor {spelled}: a drafter with its own embedding, head or vocabulary is not supported, stock "
                "SGLang drafts with the target's; `adaflash drafter convert` drops it where it equals the target's"
            )
        if name not in wanted:
            raise CheckpointError(f"tensor {spelled} does not belong to this drafter")
        if tuple(tensor.shape) != wanted[name]:
            raise CheckpointError(f"tensor {spelled} has shape {tuple(tensor.shape)}, expected {wanted[name]}")
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"tensor {spelled} is not finite")


def save_drafter(drafter: Drafter, directory: str | Path, dtype: torch.dtype) -> None:
    """Writes a checkpoint in `dtype`, its heads in fp32; the directory is created, each of its files replaced at once.

    Shards and index of an earlier checkpoint in the same directory go, since loaders would prefer them.
    """
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    trunk = {n for n, _ in drafter.trunk_parameters()}
    tensors = {
        _their_name(n): t.detach().to(dtype if n in trunk else torch.float32).contiguous()
        for n, t in drafter.state_dict().items()
    }
    save_file(tensors, out / (WEIGHTS + ".tmp"), metadata={"format": "pt"})
    os.replace(out / (WEIGHTS + ".tmp"), out / WEIGHTS)
    write_config(out, drafter.config.to_checkpoint(dtype))
    for old in [*out.glob("model-*-of-*.safetensors"), out / INDEX]:
        old.unlink(missing_ok=True)


def write_config(directory: Path, raw: Mapping[str, Any]) -> None:
    """Replaces the `config.json`."""
    scratch = directory / (CONFIG + ".tmp")
    scratch.write_text(json.dumps(raw, indent=1))
    os.replace(scratch, directory / CONFIG)


def weights_fingerprint(weights: Mapping[str, Tensor]) -> str:
    """sha256 over names and values."""
    parts = ((n.encode(), t.detach().cpu().contiguous().view(torch.uint8)) for n, t in sorted(weights.items()))
    return fingerprint(x for name, t in parts for x in (name, t.numpy().tobytes()))


def load_drafter(directory: str | Path) -> Drafter:
    """A drafter in fp32 from a checked checkpoint."""
    return build_drafter(read_drafter_config(directory), read_weights(directory))


def build_drafter(config: DrafterConfig, weights: Mapping[str, Tensor]) -> Drafter:
    """A drafter in fp32 from tensors under our names; raises CheckpointError naming the tensor that does not fit."""
    check_weights(config, weights)
    drafter = Drafter(config)
    drafter.load_state_dict(weights)
    return drafter


def checkpoint_dtype(directory: str | Path) -> torch.dtype:
    """The dtype a checkpoint declares."""
    raw = read_raw_config(directory)
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DrafterConfigError(f"dtype {name!r} is not a torch dtype")
    return dtype
