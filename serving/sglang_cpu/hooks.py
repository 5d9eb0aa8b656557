"""Torch replacements for the call sites on SGLang 0.5.23's speculative path that have no CPU branch.

`serving.sglang_plugin.register` calls `register` in every SGLang process whose platform is ours.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

ROUTE = "ADAFLASH_ROUTE"  # set by the launcher: dspark or dflash


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
    width = candidates.shape[1]
    drafts = candidates[:, 1:].long()
    count, last = accept_chain(
        drafts, target_probs, draft_probs, uniform_samples, uniform_samples_for_final_sampling.reshape(-1)
    )
    emitted = torch.cat([drafts, drafts.new_zeros(len(drafts), 1)], -1)
    emitted.scatter_(-1, count[:, None], last[:, None])
    predicts[retrive_index.long()] = emitted.to(predicts.dtype)
    accept_index.copy_(torch.where(torch.arange(width) <= count[:, None], retrive_index, -1))
    accept_token_num.copy_(count)


def accept_chain(
    drafts: Tensor, target: Tensor, draft: Tensor, coins: Tensor, final_coin: Tensor
) -> tuple[Tensor, Tensor]:
    """Speculative sampling (Leviathan et al. 2023, algorithm 1) of a chain of n drafted tokens, batched.

    drafts [b, n]; target [b, n + 1, V] and draft [b, >= n, V] probabilities; coins [b, >= n] and final_coin [b]
    uniform.
    Returns how many drafts were accepted [b] and the token emitted after them [b].
    """
    b, n = drafts.shape
    p = target[:, :n].gather(-1, drafts[..., None]).squeeze(-1)
    q = draft[:, :n].gather(-1, drafts[..., None]).squeeze(-1)
    count = ((coins[:, :n] * q < p) & (q > 0)).long().cumprod(-1).sum(-1)
    request = torch.arange(b)
    mass = target[request, count]
    if n:
        residual = (mass - draft[request, count.clamp_max(n - 1)]).clamp_min(0)
        mass = torch.where((count < n)[:, None], residual, mass)
    cumulative = mass.double().cumsum(-1)
    draw = (final_coin.double() * cumulative[:, -1])[:, None]
    last = torch.searchsorted(cumulative, draw, right=True).squeeze(-1)
    return count, last.clamp_max(mass.shape[-1] - 1)


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


def tables() -> list[tuple[str, dict[str, Callable[..., Any]]]]:
    """Hooks by SGLang's hook type for the route that this process serves."""
    found = [("replace", REPLACED), ("around", AROUND)]
    if os.environ.get(ROUTE) == "dflash":
        from serving.sglang_cpu import dflash_hooks as d

        found += [("replace", d.REPLACED), ("around", d.AROUND), ("after", d.AFTER)]
    return found


def register() -> None:
    """Registers every hook; SGLang applies them when it has loaded all plugins."""
    from sglang.srt.arg_groups.choices import add_draft_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_draft_attention_backend_choices(["torch_native"])

    @register_attention_backend("torch_native")
    def _backend(runner: Any) -> Any:
        from serving.sglang_cpu.attention import TorchCpuAttention

        return TorchCpuAttention(runner)

    for kind, table in tables():
        for target, hook in table.items():
            HookRegistry.register(target, hook, HookType(kind))
    _ignore_record_stream_on_cpu()


def _ignore_record_stream_on_cpu() -> None:
    """CPU tensors have no streams; torch raises where ignoring is right."""
    original = torch.Tensor.record_stream

    def record_stream(self: Tensor, stream: Any) -> None:
        if self.device.type != "cpu":
            original(self, stream)

    torch.Tensor.record_stream = record_stream
