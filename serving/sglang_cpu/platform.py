"""The platform object that SGLang asks what a CPU can do; `serving.sglang_cpu.activate` names it."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from serving.sglang_cpu import NAME


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """torch-only operators, `torch_native` attention, DFLASH and DSPARK allowed."""

    _enum = PlatformEnum.OOT
    device_name = NAME
    device_type = "cpu"
    capabilities = PlatformCapabilities()
    supported_quantization: list[str] = []  # noqa: RUF012  (SGLang's own declaration is a plain list)

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Nothing: the worker passes every argument itself."""

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return "torch_native"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in ("DFLASH", "DSPARK")

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == "torch_native"

    def get_speculative_cache_locs_fn(self) -> Any:
        return _cache_locations

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def get_dispatch_key_name(self) -> str:
        return "native"


def _cache_locations(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:
    """KV slots of `draft_token_num` tokens from `start_offset` on, for each request in turn: [batch * tokens] int64."""
    columns = start_offset.long()[:, None] + torch.arange(draft_token_num, device=device)
    return req_to_token[req_pool_indices.long()[:, None], columns].reshape(-1).long()
