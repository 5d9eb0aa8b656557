"""Start-up hook of the CPU environment: lets a CUDA-built torchvision import beside a CPU-only torch.

torchvision is only imported, never used, on the text path; its C++ operators cannot load here, and then its own
registration of fake kernels fails because the operators are not declared. This declares them just in time.
"""

import importlib.abc
import sys
from typing import Any


class _DeclareOperators(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for op in ("nms", "qnms"):
                self.library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.modules[__name__].library = self.library  # type: ignore[attr-defined]


sys.meta_path.insert(0, _DeclareOperators())
