"""Extends SGLang's speculative worker class in each scheduler rank: capture, cache salt, status receipt.

Called once from the `create_worker` hook. The stock worker's computation is not touched.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from sglang.srt.managers.auxiliary_output import append_auxiliary_output

from serving.sglang_plugin import SUPPORTED_SGLANG, last_layer, receipts
from serving.sglang_plugin.capture import StepOnDevice, start_capture

logger = logging.getLogger(__name__)

_workers: weakref.WeakSet[Any] = weakref.WeakSet()


def extend(worker_class: Any) -> Any:
    """A subclass of `worker_class` under its own name."""

    class Extended(worker_class):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            from sglang.srt.runtime_context import get_parallel

            rank = int(get_parallel().tp_rank)
            _workers.add(self)
            draft = draft_model(self).draft_config
            last_layer.install(
                self.target_worker.model_runner.model, draft.target_layer_ids or (), draft.num_target_layers or 0
            )
            salt_prefix_cache_by_version()
            self._adaflash_capture = start_capture(self) if rank == 0 else None
            receipts.write(receipts.STARTED, rank, **describe(self))

        def forward_batch_generation(self, *args: Any, **kwargs: Any) -> Any:
            result = super().forward_batch_generation(*args, **kwargs)
            output = getattr(result, "logits_output", None)
            if self._adaflash_capture is not None and output is not None:
                step = StepOnDevice(self._adaflash_capture, result.accept_lens, getattr(result, "cap_lens", None))
                output.auxiliary_device_output = append_auxiliary_output(output.auxiliary_device_output, step)
            return result

    Extended.__name__, Extended.__qualname__ = worker_class.__name__, worker_class.__qualname__
    return Extended


def describe(worker: Any) -> dict[str, Any]:
    """What the agent checks before it calls the worker ready."""
    import sglang

    from serving import sglang_cpu
    from serving.sglang_cpu import hooks
    from serving.sglang_plugin import CREATE_WORKER

    targets = [CREATE_WORKER, *([t for _, table in hooks.tables() for t in table] if sglang_cpu.active() else [])]
    model = draft_model(worker)
    return {
        "sglang": sglang.__version__,
        "supported": sglang.__version__ == SUPPORTED_SGLANG,
        "hooks_missing": [t for t in targets if not _applied(t)],
        "worker": type(worker).__mro__[1].__name__,
        "draft_model": f"{type(model).__module__}.{type(model).__name__}",
        "checksum": _checksum(model),
    }


def draft_model(worker: Any) -> Any:
    """The draft model of a DFLASH or DSPARK worker."""
    ((_, runner),) = worker.weight_update_runners()
    return runner.model


def _checksum(model: Any) -> str:
    from serving.sglang_plugin.loader import parameters_checksum

    return parameters_checksum(model)


def _applied(target: str) -> bool:
    """SGLang logs a hook that failed and goes on; an applied one is a wrapper."""
    import pkgutil

    return hasattr(pkgutil.resolve_name(target), "__wrapped__")


def salt_prefix_cache_by_version() -> None:
    """Keys cached prefixes by drafter version, once per process.

    The prefix cache holds the drafter's K/V beside the target's. After a swap the target's are still right, the
    drafter's are the old version's: exact text, but acceptance would mix versions for as long as a prefix stays cached.
    """
    from sglang.srt.managers.schedule_batch import Req

    if getattr(Req.__init__, "_adaflash_salted", False):
        return
    original = Req.__init__

    def salted(self: Any, *args: Any, **kwargs: Any) -> None:
        from sglang.srt.runtime_context import get_serving

        original(self, *args, **kwargs)
        version = get_serving().weight_version
        self.extra_key = f"{self.extra_key or ''}|draft:{version}"

    salted._adaflash_salted = True  # type: ignore[attr-defined]
    Req.__init__ = salted


def refresh_fused_helper() -> None:
    """DFLASH on CUDA copies K/V projections into a fused helper at start; copies the new weights in place.

    Same layout as SGLang's `FusedKVMaterializeHelper`; the addresses stay, so captured graphs stay valid.
    """
    for worker in _workers:
        helper = getattr(worker, "_fused_kv_helper", None)
        if helper is None:
            continue
        attention = [layer.self_attn for layer in draft_model(worker).layers]
        kv = [a.qkv_proj.weight[a.q_size : a.q_size + 2 * a.kv_size] for a in attention]
        helper.flat_kv_weight_t.copy_(torch.cat(kv).t())
        helper.k_norm_weights.copy_(torch.stack([a.k_norm.weight for a in attention]))
