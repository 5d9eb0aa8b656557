"""The drafter as SGLang's `DSPARK` route runs it: a DFlash checkpoint, unchanged, under stock speculation code.

`DSPARK` is a DFlash trunk plus a Markov head on the logits; ours is zero, which makes it exactly DFlash while keeping
ragged verification, whose lengths come from the drafter's heads. SGLang picks this class by the architecture's name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.models.dspark import BaseDSparkMarkovHead, DSparkDraftModel
from torch import Tensor

from serving.sglang_plugin.models.heads import Heads
from serving.sglang_plugin.settings import VerifySettings

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
        self.confidence_head: Heads | None
        if self.confidence_head is not None:  # SGLang's own, which it makes unless whole blocks are verified
            width = (getattr(config, "dflash_config", None) or {}).get("thresh_head_bottleneck_dim")
            drafted = int(config.block_size) - 1  # a DFlash checkpoint counts the anchor, `DSPARK` does not
            self.confidence_head = Heads(config.hidden_size, drafted, width, VerifySettings.from_environment())
        if not torch.cuda.is_available():
            for layer in self.layers:
                layer.self_attn.use_table_qk_norm_rope = False  # a triton kernel without a device check, bf16 only

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Keeps the block's states with the anchor row, which SGLang drops before it asks for confidences."""
        out = super().forward(*args, **kwargs)
        self._block = out.hidden_states
        return out

    def compute_confidence(
        self, *, anchor_tokens: Tensor, draft_tokens: Tensor, confidence_features: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Confidence of each drafted slot [n, B - 1], and the same again where SGLang expects logits to log."""
        block = self._block.view(len(draft_tokens), draft_tokens.shape[1] + 1, -1)
        assert self.confidence_head is not None
        confidence = self.confidence_head(block)
        return confidence, confidence

    def _build_fused_kv_write_bundle(self, pool: Any) -> Any:
        return super()._build_fused_kv_write_bundle(pool) if self.fc.weight.is_cuda else None

    def own_names(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Checkpoint tensors under the names they have in this model; heads that have no use here are left out."""
        own: dict[str, Tensor] = {}
        for name, tensor in weights:
            head = Heads.own_name(name)
            if head is None:
                own[name] = tensor
            elif self.confidence_head is not None and self.confidence_head.takes(head, tensor):
                own[f"confidence_head.{head}"] = tensor
        return own

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads and then drops what SGLang derived from the old weights; stale copies cost acceptance silently."""
        own = self.own_names(weights)
        heads = {n: own.pop(n) for n in list(own) if n.startswith("confidence_head.")}
        super().load_weights(own.items())
        if self.confidence_head is not None:
            self.confidence_head.load({n.removeprefix("confidence_head."): t for n, t in heads.items()})
        self.refresh_derived()

    def _load_confidence_weights(self, **_: Any) -> None:
        """Ours are loaded above; SGLang's version refuses a drafter without heads."""

    def refresh_derived(self) -> None:
        """Forgets the stacked and fused K/V projections, rebuilt on next use, and notes which heads there are."""
        self._fused_kv_write_cache = None
        self.__dict__.pop("_stacked_ctx_kv_cache", None)
        if self.confidence_head is not None:
            self.confidence_head.remember()


EntryClass = [DFlashDraftModel]
