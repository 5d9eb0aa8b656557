"""The drafter as SGLang's `DSPARK` route runs it: a DFlash checkpoint, unchanged, under stock speculation code.

`DSPARK` is a DFlash trunk plus a Markov head on the logits; ours is zero, which makes it exactly DFlash while keeping
ragged verification. SGLang picks this class by the checkpoint's architecture name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.models.dspark import BaseDSparkMarkovHead, DSparkDraftModel
from torch import Tensor

logger = logging.getLogger(__name__)


class ZeroMarkovHead(BaseDSparkMarkovHead):
    """Adds nothing to the drafter's logits."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.register_buffer("zero", torch.zeros(1, vocab_size), persistent=False)

    def step_bias(self, prev_tokens: Tensor, *, hidden_states: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.zero.expand(len(prev_tokens), -1), state

    def step_logits_dtype(self, base_dtype: torch.dtype) -> torch.dtype:
        return base_dtype


class DFlashDraftModel(DSparkDraftModel):
    """Named as the checkpoints name it, so that one layout serves both the `DFLASH` and the `DSPARK` route."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config=config, quant_config=quant_config, prefix=prefix)
        self.markov_head = ZeroMarkovHead(int(config.vocab_size))
        if not torch.cuda.is_available():
            for layer in self.layers:
                layer.self_attn.use_table_qk_norm_rope = False  # a triton kernel without a device check, bf16 only

    def _build_fused_kv_write_bundle(self, pool: Any) -> Any:
        return super()._build_fused_kv_write_bundle(pool) if self.fc.weight.is_cuda else None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads and then drops what SGLang derived from the old weights; stale copies cost acceptance silently."""
        super().load_weights(weights)
        self.refresh_derived()

    def refresh_derived(self) -> None:
        """Forgets the stacked and fused K/V projections; they are rebuilt on next use."""
        self._fused_kv_write_cache = None
        self.__dict__.pop("_stacked_ctx_kv_cache", None)


EntryClass = [DFlashDraftModel]
