"""The numbers that fix a drafter's shapes, and the `config.json` spellings they are read from and written to.

Read from published DFlash and AdaFlash checkpoints and from our own; what we cannot run exactly as SGLang would is
refused by the name of the key (conventions: SGLang 0.5.23, `models/dflash.py` and `speculative/dflash_utils.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from adaflash.errors import UserError, one_line

ARCHITECTURE = "DFlashDraftModel"
SLIDING, FULL = "sliding_attention", "full_attention"
LayerType = Literal["full_attention", "sliding_attention"]
_NESTED = ("mask_token_id", "target_layer_ids", "block_size", "num_target_layers")
_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
# Read by one of transformers and SGLang, or differently by both.
_ROPE_REFUSED = (
    *("rope_dim", "mrope_section", "attention_factor", "attn_factor", "extrapolation_factor"),
    *("mscale", "mscale_all_dim", "truncate"),
)

# Keys that change what a drafter computes and that this implementation does not compute.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "is_causal": (None,),
    "use_gemma_norm": (False, None),
    "attention_sink_bias": (False, None),
    "attention_value_scale": (None, 1, 1.0),
    "projector_type": (None, ""),
    "conv_kernel_size": (None, 0),
    "selector_rank": (None, 0),
    "output_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "hidden_act": (None, "silu"),
    "rope_is_neox_style": (None, True),
    "is_neox_style": (None, True),
    "mlp_bias": (False, None),
    "quantization_config": (None,),
}


class DrafterConfigError(UserError):
    """A drafter whose numbers contradict each other or the target; the message names the key and what to change."""


@dataclass(frozen=True)
class TargetShape:
    """What a drafter has to agree on with its target."""

    vocab_size: int
    hidden_size: int
    num_layers: int


class DrafterConfig(BaseModel):
    """Everything that fixes the drafter's shapes; read from and written to the checkpoint's `config.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    block_size: int = Field(ge=2, description="slots in a block, the anchor included")
    num_target_layers: int = Field(gt=0)
    target_layer_ids: tuple[int, ...] = Field(min_length=1, description="target layers whose output is the context")
    mask_token_id: int = Field(ge=0)
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = Field(None, description="HF rope parameters; None: plain")
    partial_rotary_factor: float = Field(1.0, gt=0, le=1, description="share of each head that is rotated")
    max_position_embeddings: int = 8192
    layer_types: tuple[LayerType, ...] | None = Field(None, description="one per layer; None: all full attention")
    sliding_window: int | None = Field(None, gt=0, description="tokens a sliding layer sees, itself included")
    length_head: int | None = Field(None, gt=0, description="width of the scalar length head; None: no head")
    confidence_head: bool = Field(False, description="has a confidence for every slot")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        last = self.num_target_layers - 1
        outside = [i for i in self.target_layer_ids if not 0 <= i <= last]
        if outside:
            raise ValueError(f"target_layer_ids {outside} are outside the target's 0..{last}")
        if sorted(set(self.target_layer_ids)) != list(self.target_layer_ids):
            # SGLang captures in the order of depth, whatever order the checkpoint lists.
            raise ValueError(f"target_layer_ids {list(self.target_layer_ids)} must be increasing")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} x partial_rotary_factor rotates {self.rotary_dim}, not even")
        kind = (self.rope_scaling or {}).get("rope_type", "default")
        if kind not in _ROPE_NEEDS:
            raise ValueError(f"rope_scaling type {kind!r} is not supported; known: {', '.join(_ROPE_NEEDS)}")
        missing = [key for key in _ROPE_NEEDS[kind] if not isinstance((self.rope_scaling or {}).get(key), int | float)]
        if missing:
            raise ValueError(f"rope_scaling {kind} needs a number for {missing[0]}")
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers")
        if SLIDING in (self.layer_types or ()) and self.sliding_window is None:
            raise ValueError("sliding_window is missing but layer_types has sliding_attention")
        return self

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of each head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    def windows(self) -> list[int | None]:
        """Per layer: the sliding window, or None for full attention."""
        kinds = self.layer_types or (FULL,) * self.num_hidden_layers
        return [self.sliding_window if kind == SLIDING else None for kind in kinds]

    def with_heads(self, *, length_head: int | None, confidence_head: bool) -> DrafterConfig:
        """The same drafter with other heads."""
        return self.model_copy(update={"length_head": length_head, "confidence_head": confidence_head})

    def trunk(self) -> DrafterConfig:
        """The same without heads: what has to be equal for one drafter to replace another in a running engine."""
        return self.with_heads(length_head=None, confidence_head=False)

    def to_checkpoint(self, dtype: torch.dtype) -> dict[str, Any]:
        """The `config.json` of a checkpoint that stock SGLang loads as `DFLASH` and, with our model class, as `DSPARK`.

        The `markov_*` and `sample_from_anchor` keys are what `DSPARK` asks for; `DFLASH` ignores them.
        """
        rope = {"rope_type": "default", **(self.rope_scaling or {}), "rope_theta": self.rope_theta}
        if self.partial_rotary_factor != 1:
            rope["partial_rotary_factor"] = self.partial_rotary_factor
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": rope,
            "partial_rotary_factor": self.partial_rotary_factor,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": False,
            "layer_types": list(self.layer_types or (FULL,) * self.num_hidden_layers),
            "use_sliding_window": SLIDING in (self.layer_types or ()),
            "sliding_window": self.sliding_window,
            "dtype": str(dtype).removeprefix("torch."),
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                "use_thresh_head_two_model": self.length_head is not None,
                **({"thresh_head_bottleneck_dim": self.length_head} if self.length_head else {}),
            },
            "markov_rank": 1,
            "markov_head_type": "vanilla",
            "sample_from_anchor": False,
            "enable_confidence_head": self.confidence_head,
            "confidence_head_with_markov": False,
        }

    @classmethod
    def from_checkpoint(cls, raw: Mapping[str, Any]) -> DrafterConfig:
        """Reads a flat or nested `config.json`; raises DrafterConfigError naming the key that cannot be used."""
        if not isinstance(raw, Mapping):
            raise DrafterConfigError("config.json is not a JSON object")
        if raw.get("architectures") != [ARCHITECTURE]:
            raise DrafterConfigError(f"architectures is {raw.get('architectures')}, expected ['{ARCHITECTURE}']")
        nested: Mapping[str, Any] = raw.get("dflash_config") or {}
        _refuse(raw, nested)
        known = {k: raw[k] for k in cls.model_fields if raw.get(k) is not None}
        known |= {k: nested[k] for k in _NESTED if k in nested}
        known.pop("length_head", None), known.pop("confidence_head", None)
        known |= _rope(raw)
        if set(known.get("layer_types") or ()) <= {FULL}:
            known.pop("sliding_window", None)
            known.pop("layer_types", None)
        if nested.get("use_thresh_head_two_model", raw.get("use_thresh_head_two_model")):
            flat = raw.get("thresh_head_bottleneck_dim", 256)
            known["length_head"] = nested.get("thresh_head_bottleneck_dim", flat)
        known["confidence_head"] = bool(raw.get("enable_confidence_head", False))
        try:
            return cls(**known)
        except ValueError as error:
            raise DrafterConfigError(one_line(error)) from error

    def check_target(self, target: TargetShape) -> None:
        """Raises DrafterConfigError if this drafter cannot draft for `target`."""
        mine = {
            "vocab_size": (self.vocab_size, target.vocab_size),
            "hidden_size": (self.hidden_size, target.hidden_size),
            "num_target_layers": (self.num_target_layers, target.num_layers),
        }
        for key, (have, want) in mine.items():
            if have != want:
                raise DrafterConfigError(
                    f"drafter {key} is {have} but the target has {want}: use a drafter of this target"
                )


def _refuse(raw: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    for key, harmless in _REFUSED.items():
        value = nested.get(key, raw.get(key))
        if value not in harmless:
            raise DrafterConfigError(f"{key} {value!r} is not supported by this drafter implementation")
    draft_vocab = raw.get("draft_vocab_size", nested.get("draft_vocab_size"))
    if draft_vocab not in (None, raw.get("vocab_size")):
        raise DrafterConfigError(
            f"draft_vocab_size {draft_vocab}: a reduced draft vocabulary is not supported, stock SGLang drafts with "
            "the target's own head"
        )


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    out: dict[str, Any] = {"rope_scaling": None}
    theta = rope.pop("rope_theta", None) or raw.get("rope_theta")
    partial = rope.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor")
    if theta is not None:
        out["rope_theta"] = float(theta)
    if partial is not None:
        out["partial_rotary_factor"] = float(partial)
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    for key in _ROPE_REFUSED:
        if rope.get(key) is not None:
            raise DrafterConfigError(f"rope_scaling {key} is not supported by this drafter implementation")
    if kind != "default":
        out["rope_scaling"] = {"rope_type": kind, **rope}
    return out
