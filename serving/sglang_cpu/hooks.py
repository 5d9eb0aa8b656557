"""Torch replacements for the call sites on SGLang 0.5.23's speculative path that have no CPU branch.

`serving.sglang_plugin.register` calls `register` in every SGLang process whose platform is ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def copy_kv(
    data_ptrs: Tensor, strides: Tensor, target: Tensor, source: Tensor, count: int, upper: int, config: dict[str, Any]
) -> None:
    """KV moves between slots. Chains never move anything; SGLang's warm-up asks for slot 0 -> slot 0."""
    if not torch.equal(target[:count], source[:count]):
        raise NotImplementedError("tree speculation (topk > 1) needs KV moves, which the CPU platform does not have")


def assign_slots(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, locations: Tensor, batch_size: int
) -> None:
    """Writes each request's new KV slots, which lie one after the other in `locations`, into its row of the table."""
    values = locations.to(req_to_token.dtype)
    taken = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = values[taken : taken + last - first]
        taken += last - first


def sample_chain(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
    *,
    block_verification: bool = False,
) -> None:
    """Speculative sampling of a chain of width T for each of b requests, into the kernel's output buffers.

    candidates [b, T]: anchor and T-1 drafted tokens. Token j is accepted with probability min(1, p_j / q_j); the first
    rejected one is replaced by a draw from max(p - q, 0); after T-1 acceptances one more is drawn from p. Every emitted
    token is then distributed as the target's. predicts[row]: token emitted after the row; accept_index [b, T]: accepted
    rows, then -1; accept_token_num [b]: accepted drafts.
    """
    if block_verification:
        raise NotImplementedError("block verification is not available on the CPU platform")
    b, width = candidates.shape
    drafts = candidates[:, 1:].long()
    p = target_probs[:, : width - 1].gather(-1, drafts[..., None]).squeeze(-1)
    q = draft_probs[:, : width - 1].gather(-1, drafts[..., None]).squeeze(-1)
    accepted = (uniform_samples[:, : width - 1] * q < p) & (q > 0)
    count = accepted.long().cumprod(-1).sum(-1)
    request = torch.arange(b)
    final = target_probs[request, count]
    rejected_at = count.clamp_max(max(width - 2, 0))
    residual = (final - draft_probs[request, rejected_at]).clamp_min(0) if width > 1 else final
    mass = torch.where((count < width - 1)[:, None], residual, final).double().cumsum(-1)
    draw = uniform_samples_for_final_sampling.reshape(b, 1).double() * mass[:, -1:]
    last = torch.searchsorted(mass, draw, right=True).squeeze(-1).clamp_max(mass.shape[-1] - 1)
    emitted = torch.cat([drafts, drafts.new_zeros(b, 1)], -1)
    emitted[request, count] = last
    predicts[retrive_index.long()] = emitted.to(predicts.dtype)
    rows = torch.arange(width)
    accept_index.copy_(torch.where(rows <= count[:, None], retrive_index, -1))
    accept_token_num.copy_(count)


def allow_dspark(original: Callable[[Any], None], server_args: Any) -> None:
    """SGLang allows DSPARK on cuda, npu and xpu only and asks no platform; its checks see "cuda" while they run."""
    from sglang.srt.arg_groups import speculative_hook

    with _device_reads_cuda(speculative_hook):
        original(server_args)


@contextlib.contextmanager
def _device_reads_cuda(module: Any) -> Iterator[None]:
    view = module.resolving_view

    class CudaView:
        def __init__(self, args: Any) -> None:
            self._view = view(args)

        def __getattr__(self, name: str) -> Any:
            return "cuda" if name == "device" else getattr(self._view, name)

    module.resolving_view = CudaView
    try:
        yield
    finally:
        module.resolving_view = view


REPLACED: dict[str, Callable[..., Any]] = {
    "sglang.kernels.ops.kvcache.cache_move.copy_all_layer_kv_cache_func": copy_kv,
    "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func": assign_slots,
    "sglang.kernels.ops.speculative.reject_sampling.chain_speculative_sampling_triton": sample_chain,
}
AROUND: dict[str, Callable[..., Any]] = {"sglang.srt.arg_groups.speculative_hook._handle_dspark": allow_dspark}


def register() -> list[str]:
    """Registers every hook and returns their targets, for the start-up proof that they were applied."""
    from sglang.srt.arg_groups.choices import add_draft_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_draft_attention_backend_choices(["torch_native"])

    @register_attention_backend("torch_native")
    def _backend(runner: Any) -> Any:
        from serving.sglang_cpu.attention import TorchCpuAttention

        return TorchCpuAttention(runner)

    for target, hook in REPLACED.items():
        HookRegistry.register(target, hook, HookType.REPLACE)
    for target, hook in AROUND.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    _ignore_record_stream_on_cpu()
    return [*REPLACED, *AROUND]


def _ignore_record_stream_on_cpu() -> None:
    """CPU tensors have no streams; torch raises where ignoring is right."""
    original = torch.Tensor.record_stream

    def record_stream(self: Tensor, stream: Any) -> None:
        if self.device.type != "cpu":
            original(self, stream)

    torch.Tensor.record_stream = record_stream  # type: ignore[method-assign,assignment]
