"""Makes the first drafter of a target: a config derived from the target's, and random weights.

Called by `adaflash drafter init` and by the demo.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from adaflash.checkpoint import save_drafter
from adaflash.drafter import random_drafter
from adaflash.drafter_config import DrafterConfig, DrafterConfigError
from adaflash.errors import one_line
from adaflash.heads import DEFAULT_WIDTH
from adaflash.target import read_config

_MASK_NAMES = ("<|mask|>", "<mask>", "[MASK]")


def drafter_config(
    target: str,
    *,
    layers: int,
    block: int,
    layer_ids: Sequence[int] | None = None,
    mask_token_id: int | None = None,
    length_head: bool = False,
) -> DrafterConfig:
    """A drafter shaped like the target's own layers; raises DrafterConfigError naming what does not fit.

    `length_head` gives it both heads of `adaflash.heads`.
    """
    t = read_config(target)
    t = t.get("text_config") or t
    depth, heads = int(t["num_hidden_layers"]), int(t["num_attention_heads"])
    rope = t.get("rope_parameters") or {}
    try:
        return DrafterConfig(
            vocab_size=t["vocab_size"],
            hidden_size=t["hidden_size"],
            intermediate_size=t["intermediate_size"],
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=t.get("num_key_value_heads") or heads,
            head_dim=t.get("head_dim") or t["hidden_size"] // heads,
            block_size=block,
            num_target_layers=depth,
            target_layer_ids=tuple(layer_ids) if layer_ids else spread_layers(depth),
            mask_token_id=mask_token_id if mask_token_id is not None else find_mask_token(target),
            rms_norm_eps=t.get("rms_norm_eps", 1e-6),
            rope_theta=float(t.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
            max_position_embeddings=t["max_position_embeddings"],
            length_head=DEFAULT_WIDTH if length_head else None,
            confidence_head=length_head,
        )
    except ValueError as error:
        raise DrafterConfigError(one_line(error)) from error


def spread_layers(depth: int, count: int = 5) -> tuple[int, ...]:
    """`count` layers spread evenly from the second to the third-last, as the published DFlash drafters choose them."""
    if depth <= count + 1:
        return tuple(range(depth - 1))
    first, last = 1, max(depth - 3, count)
    return tuple(sorted({round(first + i * (last - first) / (count - 1)) for i in range(count)}))


def find_mask_token(target: str) -> int:
    """A mask token by name, else the highest special token that is neither EOS nor padding."""
    tokens = json.loads(_tokenizer_file(target).read_text()).get("added_tokens", [])
    by_name = {t["content"]: t["id"] for t in tokens}
    for name in _MASK_NAMES:
        if name in by_name:
            return int(by_name[name])
    config = read_config(target)
    used: set[int | None] = set()
    for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
        value = config.get(key)
        used |= set(value) if isinstance(value, list) else {value}
    free = [t["id"] for t in tokens if t.get("special") and t["id"] not in used and "im_" not in t["content"]]
    if not free:
        raise DrafterConfigError("mask_token_id: no unused special token found; give --mask-token-id")
    return int(max(free))


def _tokenizer_file(target: str) -> Path:
    """The target's tokenizer.json, local or from the hub."""
    local = Path(target) / "tokenizer.json"
    if local.is_file():
        return local
    from transformers.utils import cached_file

    try:
        return Path(str(cached_file(target, "tokenizer.json")))
    except OSError:
        raise DrafterConfigError(
            "mask_token_id: the target has no tokenizer.json to choose one from; give --mask-token-id"
        ) from None


def init_drafter(
    target: str,
    out: Path,
    *,
    layers: int = 2,
    block: int = 8,
    layer_ids: Sequence[int] | None = None,
    mask_token_id: int | None = None,
    length_head: bool = False,
    dtype: str | None = None,
    seed: int = 0,
) -> DrafterConfig:
    """Writes a random drafter checkpoint to `out`."""
    config = drafter_config(
        target, layers=layers, block=block, layer_ids=layer_ids, mask_token_id=mask_token_id, length_head=length_head
    )
    save_drafter(random_drafter(config, seed), out, target_dtype(target) if dtype is None else getattr(torch, dtype))
    return config


def target_dtype(target: str) -> torch.dtype:
    """The dtype the target's checkpoint declares."""
    t = read_config(target)
    t = t.get("text_config") or t
    name = t.get("dtype") or t.get("torch_dtype") or "float32"
    return getattr(torch, str(name).removeprefix("torch."))
