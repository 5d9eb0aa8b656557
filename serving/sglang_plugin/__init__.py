"""The part of AdaFlash that runs inside stock SGLang; SGLang finds it by entry point and calls `register`.

Kept cheap: SGLang calls this in every process. Everything that needs the scheduler is imported when the scheduler
creates its speculative worker.
"""

from __future__ import annotations

from typing import Any

SUPPORTED_SGLANG = "0.5.23"
CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"


def register() -> None:
    """Registers our hooks; SGLang applies them and only logs failures, so `status.hooks_applied` checks later."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from serving import sglang_cpu

    if sglang_cpu.active():
        from serving.sglang_cpu import hooks

        hooks.register()
    HookRegistry.register(CREATE_WORKER, _around_create_worker, HookType.AROUND)


def _around_create_worker(original: Any, algorithm: Any, server_args: Any) -> Any:
    """Called in each scheduler rank: the stock worker class, extended by rollout capture and the swap's bookkeeping."""
    worker_class = original(algorithm, server_args)
    if algorithm.name not in ("DFLASH", "DSPARK"):
        return worker_class
    from serving.sglang_plugin.worker import extend

    return extend(worker_class)
