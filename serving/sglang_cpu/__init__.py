"""An out-of-tree SGLang platform: plain PyTorch on CPU, so that stock SGLang runs without a GPU.

For the quickstart, tests and CI; not for production traffic. SGLang finds it by entry point and calls `activate`.
"""

from __future__ import annotations

import os

NAME = "torch_cpu"


def activate() -> str | None:
    """The platform class for SGLang, or None where an accelerator is present and nobody asked for CPU by name.

    SGLang calls every installed platform when `SGLANG_PLATFORM` is unset and takes any answer, even on a CUDA host.
    """
    if os.environ.get("SGLANG_PLATFORM") != NAME and _accelerator_present():
        return None
    return "serving.sglang_cpu.platform.TorchCpuPlatform"


def _accelerator_present() -> bool:
    import torch

    return torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())


def active() -> bool:
    """True in a process whose SGLang platform is ours."""
    from sglang.srt.platforms import current_platform

    return getattr(current_platform, "device_name", None) == NAME
