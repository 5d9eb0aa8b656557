"""What the safe mode (stock `DFLASH`) needs on CPU beyond `hooks.py`; registered only on that route."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from serving.sglang_cpu.hooks import accept_chain


def keep_embedding_dtype(
    original: Callable[..., dict[str, Any]], runner: Any, batch: Any, proxies: Any
) -> dict[str, Any]:
    """SGLang casts input embeddings to bf16 whatever the drafter's dtype is; an fp32 drafter then fails."""
    kwargs = original(runner, batch, proxies)
    if batch.input_embeds is not None and batch.replace_embeds is None:
        kwargs["input_embeds"] = batch.input_embeds
    return kwargs


def write_valid_prefix(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, lengths: Tensor, row: int, dtype: torch.dtype
) -> None:
    """Stores the first `lengths[i]` rows of request i; k, v [b * n, ...], slots [b, n]."""
    keep = (torch.arange(slots.shape[1]) < lengths[:, None]).reshape(-1)
    where = slots.reshape(-1)[keep]
    k_cache[where] = k[keep].reshape(-1, *k_cache.shape[1:])
    v_cache[where] = v[keep].reshape(-1, *v_cache.shape[1:])


def sampling_available() -> bool:
    """Replaces SGLang's answer for builds without its kernels, which is greedy verification of sampled requests."""
    return True


def verify_sampled(
    *, candidates: Tensor, next_token_logits: Tensor, sampling_info: Any, **_: Any
) -> tuple[Tensor, Tensor]:
    """Greedy drafts against a sampling target: accept x with probability p(x), else draw from p without x.

    candidates [b, T], next_token_logits [b * T, V]. Returns accepted drafts [b] int32 and the emitted token [b].
    """
    b, width = candidates.shape
    per_row = {n: getattr(sampling_info, n).view(b, 1, 1) for n in ("temperatures", "top_ks", "top_ps")}
    logits = next_token_logits.view(b, width, -1).float() / per_row["temperatures"].clamp_min(1e-5)
    p, index = torch.softmax(logits, -1).sort(-1, descending=True)
    # top-k first, then top-p of what is left: the order of SGLang's own verification
    p = p * (torch.arange(p.shape[-1]) < per_row["top_ks"])
    p = p / p.sum(-1, keepdim=True)
    p = p * (p.cumsum(-1) - p < per_row["top_ps"])
    target = torch.zeros_like(p).scatter_(-1, index, p / p.sum(-1, keepdim=True))
    draft = torch.zeros_like(target[:, : width - 1]).scatter_(-1, candidates[:, 1:, None].long(), 1.0)
    count, last = accept_chain(candidates[:, 1:].long(), target, draft, torch.rand(b, width), torch.rand(b))
    return count.to(torch.int32), last


def unfused_rope(result: None, attention: Any, *args: Any, **kwargs: Any) -> None:
    """bf16 drafters take a triton kernel without a device check; this switches to the plain path."""
    attention.use_table_qk_norm_rope = False


REPLACED: dict[str, Callable[..., Any]] = {
    "sglang.srt.mem_cache.memory_pool._set_kv_buffer_prefix_valid_impl": write_valid_prefix,
    "sglang.srt.speculative.dflash_utils.is_dflash_sampling_verify_available": sampling_available,
    "sglang.srt.speculative.dflash_utils.compute_dflash_sampling_correct_drafts_and_bonus": verify_sampled,
}
AROUND: dict[str, Callable[..., Any]] = {
    "sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs": keep_embedding_dtype,
}
AFTER: dict[str, Callable[..., Any]] = {"sglang.srt.models.dflash.DFlashAttention.__init__": unfused_rope}
