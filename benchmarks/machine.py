"""What the figures were measured on, for the head of every result."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch


def describe() -> dict[str, Any]:
    """Processor, cores, memory and versions; no host name and no path."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    flags = ""
    if info.is_file():
        lines = dict(line.split(":", 1) for line in info.read_text().split("\n\n")[0].splitlines() if ":" in line)
        fields = {k.strip(): v.strip() for k, v in lines.items()}
        model, flags = fields.get("model name", model), fields.get("flags", "")
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "avx512_bf16": "avx512_bf16" in flags,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
