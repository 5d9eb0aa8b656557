"""Loads a staged drafter version into the running draft model; SGLang calls `load` in the scheduler during a swap.

The payload is a small JSON message, not tensors. An exception here would kill the server, so none leaves: on any
failure the previous tensors are put back, and the receipt tells the agent what is really loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from serving.sglang_plugin import receipts

logger = logging.getLogger(__name__)

ENV_ROOT = "ADAFLASH_STAGE_DIR"
IMPORT_PATH = "serving.sglang_plugin.loader.load"
MESSAGE = "adaflash.swap"
RECEIPT = "loaded"

_HEADS = ("thresh_head_two_model.", "confidence_head.")
_PARTS = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def load(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """SGLang's custom-weight-loader signature. `named_tensors`: one uint8 tensor with the JSON `{swap, directory}`."""
    from sglang.srt.runtime_context import get_parallel

    try:
        _load(model, named_tensors, int(get_parallel().tp_rank))
    except Exception:
        logger.exception("a drafter swap could not be reported; the agent takes the missing receipt as a broken engine")


def _load(model: Any, named_tensors: list[tuple[str, Tensor]], rank: int) -> None:
    swap = ""
    try:
        message = json.loads(bytes(dict(named_tensors)[MESSAGE].cpu().numpy()).decode())
        swap = message["swap"]
        weights = own_names(model, _read(Path(message["directory"])))
        _replace(model, weights)
    except Exception as error:
        logger.exception("drafter swap %s failed, the previous drafter stays", swap)
        receipts.write(RECEIPT, rank, swap=swap, ok=False, error=f"{type(error).__name__}: {error}")
    else:
        receipts.write(RECEIPT, rank, swap=swap, ok=True, tensors=len(weights), checksum=parameters_checksum(model))


def _read(directory: Path) -> dict[str, Tensor]:
    root = Path(os.environ[ENV_ROOT]).resolve()
    resolved = directory.resolve()
    if root not in resolved.parents:
        raise PermissionError(f"{directory} is outside the staging folder")
    return load_file(resolved / "model.safetensors")


def _replace(model: Any, weights: dict[str, Tensor]) -> None:
    """All or nothing: loads `weights`, proves that they are in the parameters, or restores what was there."""
    _synchronize()
    kept = {name: p.detach().clone() for name, p in _state(model)}
    try:
        check_shapes(model, weights)
        model.load_weights(weights.items())
        _refresh(model)
        _prove(model, weights)
    except BaseException:
        for name, p in _state(model):
            p.data.copy_(kept[name])
        _refresh(model)
        raise
    finally:
        _synchronize()


def own_names(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that `model` has a place for, by its names; whole-block verification has none for the heads."""
    if hasattr(model, "own_names"):
        own: dict[str, Tensor] = model.own_names(weights.items())
        return own
    return {n: t for n, t in weights.items() if not n.startswith(_HEADS)}


def _state(model: Any) -> list[tuple[str, Tensor]]:
    """What a load changes: the draft parameters, and which heads are present."""
    heads = [(n, b) for n, b in model.named_buffers() if n.startswith("confidence_head.")]
    return [(n, p) for n, p in model.named_parameters() if not _shared(n)] + heads


def _shared(name: str) -> bool:
    """The target's embedding and head hang under the draft model but are not ours to touch."""
    return name.startswith(("embed_tokens.", "lm_head."))


def check_shapes(model: Any, weights: dict[str, Tensor]) -> None:
    """Raises ValueError for a tensor that has no place in the model, and for a parameter that gets no tensor."""
    params = {n: p for n, p in model.named_parameters() if not _shared(n)}
    covered = set()
    for name, tensor in weights.items():
        part, merged = _merged(name)
        if merged not in params:
            raise ValueError(f"tensor {name} has no place in the drafter")
        want = params[merged].shape
        fits = tensor.shape[1:] == want[1:] and tensor.shape[0] <= want[0] if part else tensor.shape == want
        if not fits and torch.distributed.get_world_size() == 1:
            raise ValueError(f"tensor {name} has shape {tuple(tensor.shape)}, the drafter's is {tuple(want)}")
        covered.add(merged)
    missing = params.keys() - covered - {n for n in params if n.startswith("confidence_head.")}
    if missing:
        raise ValueError(f"no tensor for {sorted(missing)[0]}")


def _merged(name: str) -> tuple[str | None, str]:
    for part, whole in _PARTS.items():
        if f".{part}." in name:
            return part, name.replace(f".{part}.", f".{whole}.")
    return None, name


def _prove(model: Any, weights: dict[str, Tensor]) -> None:
    """Compares every parameter with the file (single rank; sharded ranks hold slices and rely on SGLang's loaders)."""
    if torch.distributed.get_world_size() > 1:
        return
    params = dict(model.named_parameters())
    rows: dict[str, int] = {}
    for name in sorted(weights, key=_merge_order):
        _, merged = _merged(name)
        start = rows.get(merged, 0)
        tensor = weights[name]
        loaded = params[merged].data[start : start + tensor.shape[0]]
        rows[merged] = start + tensor.shape[0]
        if not torch.equal(loaded.cpu(), tensor.to(loaded.dtype)):
            raise ValueError(f"tensor {name} did not arrive in the model")


def _merge_order(name: str) -> tuple[str, int]:
    """q, k, v and gate, up lie in this order in SGLang's merged parameters."""
    part, merged = _merged(name)
    return merged, list(_PARTS).index(part) if part else 0


def _refresh(model: Any) -> None:
    """Derived copies: in the draft model for DSPARK, in the worker's fused helper for DFLASH."""
    if hasattr(model, "refresh_derived"):
        model.refresh_derived()
    from serving.sglang_plugin.worker import refresh_fused_helper

    refresh_fused_helper()


def _synchronize() -> None:
    """No forward may be reading the weights while they change."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def parameters_checksum(model: Any) -> str:
    """sha256 over names and bytes of the draft parameters as they are on the device."""
    h = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        if not _shared(name):
            h.update(name.encode())
            h.update(p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()
