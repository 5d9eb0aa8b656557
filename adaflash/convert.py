"""`adaflash drafter inspect|convert`: looks into a drafter checkpoint, and rewrites it in another project's layout.

Layouts: `sglang` is ours (stock SGLang serves it as `DFLASH`, and as `DSPARK` with our model class), `adaflash` has the
flat config of AdaFlash with its length head, `dflash` is the published DFlash layout without heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from adaflash.checkpoint import (
    CheckpointError,
    build_drafter,
    check_weights,
    checkpoint_dtype,
    read_raw_config,
    read_weights,
    save_drafter,
    write_config,
)
from adaflash.drafter_config import DrafterConfig
from adaflash.target import read_config, target_shape

Layout = Literal["sglang", "adaflash", "dflash"]
_OWN = {"embed_tokens.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
_SERVING_KEYS = (
    "markov_rank",
    "markov_head_type",
    "sample_from_anchor",
    "enable_confidence_head",
    "confidence_head_with_markov",
)


def inspect(directory: Path, target: str | None) -> dict[str, Any]:
    """What a checkpoint is; raises CheckpointError or DrafterConfigError naming what makes it unusable."""
    raw = read_raw_config(directory)
    config, weights = DrafterConfig.from_checkpoint(raw), read_weights(directory)
    check_weights(config, weights)
    if target is not None:
        config.check_target(target_shape(target))
    return {
        "layout": "nested" if raw.get("dflash_config") else "flat",
        "dtype": str(checkpoint_dtype(directory)).removeprefix("torch."),
        "tensors": len(weights),
        "parameters": sum(t.numel() for t in weights.values()),
        "bytes": sum(t.numel() * t.element_size() for t in weights.values()),
        "fits_target": target or "not checked, give --target",
        **config.model_dump(),
    }


def convert(source: Path, out: Path, layout: Layout, *, dtype: str | None, target: str | None) -> DrafterConfig:
    """Reads any known layout and writes `layout`; tensors are equal, apart from a change of dtype."""
    if out.resolve() == source.resolve():
        raise CheckpointError("--out is the source itself; a conversion never overwrites what it reads")
    config = DrafterConfig.from_checkpoint(read_raw_config(source))
    weights = without_targets_own(read_weights(source), target)
    if target is not None:
        config.check_target(target_shape(target))
    drafter = build_drafter(config, weights)
    kept = {
        "sglang": config,
        "adaflash": config.with_heads(length_head=config.length_head, confidence_head=False),
        "dflash": config.with_heads(length_head=None, confidence_head=False),
    }[layout]
    if kept != config:
        smaller = {n: t for n, t in weights.items() if not _dropped(n, kept)}
        drafter = build_drafter(kept, smaller)
    wanted = checkpoint_dtype(source) if dtype is None else getattr(torch, dtype)
    save_drafter(drafter, out, wanted)
    if layout != "sglang":
        write_config(out, foreign_config(kept, layout, wanted))
    return kept


def _dropped(name: str, kept: DrafterConfig) -> bool:
    return (name.startswith("length_head.") and not kept.length_head) or (
        name.startswith("confidence_head.") and not kept.confidence_head
    )


def foreign_config(config: DrafterConfig, layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    """The config without our serving keys; flat for AdaFlash."""
    raw = {k: v for k, v in config.to_checkpoint(dtype).items() if k not in _SERVING_KEYS}
    if layout == "adaflash":
        raw |= raw.pop("dflash_config")
    else:
        raw["dflash_config"].pop("use_thresh_head_two_model")
    return raw


def without_targets_own(weights: Mapping[str, Tensor], target: str | None) -> dict[str, Tensor]:
    """Drops embedding and head where they are the target's very own; refuses them by name otherwise."""
    out = dict(weights)
    for name in _OWN:
        if name not in out:
            continue
        if target is None:
            raise CheckpointError(f"tensor {name}: give --target to see whether it is the target's own")
        if not torch.equal(out[name].float(), _target_tensor(target, name).float()):
            raise CheckpointError(
                f"tensor {name} differs from the target's: a drafter with its own embedding, head or vocabulary is not "
                "supported, stock SGLang drafts with the target's"
            )
        del out[name]
    return out


def _target_tensor(target: str, name: str) -> Tensor:
    """One tensor of a local target, without loading the rest."""
    wanted = _OWN[name]
    if name == "lm_head.weight" and read_config(target).get("tie_word_embeddings"):
        wanted = _OWN["embed_tokens.weight"]
    for file in sorted(Path(target).glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            if wanted in f.keys():  # noqa: SIM118 (not a mapping)
                found: Tensor = f.get_tensor(wanted)
                return found
    raise CheckpointError(f"tensor {wanted} is not in a safetensors file of {target}; give a local directory")
