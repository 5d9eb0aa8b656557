"""Extends SGLang's speculative worker class in each scheduler rank: capture, verify lengths, penalties, cache salt.

Called once from the `create_worker` hook. The stock worker's decode step is not touched; what is exchanged are objects
that it holds (planner, proposer) and functions that it calls.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from sglang.srt.managers.auxiliary_output import append_auxiliary_output
from torch import Tensor

from serving.sglang_plugin import last_layer, penalties, receipts
from serving.sglang_plugin.capture import StepOnDevice, start_capture
from serving.sglang_plugin.penalties import Penalties
from serving.sglang_plugin.settings import OFF_FRACTION, VerifySettings
from serving.sglang_plugin.steps import Stopwatch

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
            self._adaflash_adaptive = adaptive(self, rank)
            vocabulary = self.target_worker.model_runner.model_config.vocab_size
            self._adaflash_penalties = Penalties(follow_chain(self), vocabulary)
            penalties.install()
            self._adaflash_stopwatch = Stopwatch()
            self._adaflash_capture = start_capture(self._adaflash_adaptive) if rank == 0 else None
            receipts.write(receipts.STARTED, rank, **describe(self))

        def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if self._adaflash_adaptive is not None and not batch.forward_mode.is_extend():
                self._adaflash_adaptive.begin_step(len(batch.reqs))
            with self._adaflash_penalties.step(batch):
                result = super().forward_batch_generation(batch, *args, **kwargs)
            if self._adaflash_penalties.needed:
                self._count_emitted(result)
            output = getattr(result, "logits_output", None)
            if self._adaflash_capture is not None and output is not None:
                seconds = self._adaflash_stopwatch.lap(len(batch.reqs) if result.accept_lens is not None else 0)
                step = StepOnDevice(self._adaflash_capture, result, self._adaflash_adaptive, seconds)
                output.auxiliary_device_output = append_auxiliary_output(output.auxiliary_device_output, step)
            return result

        def _count_emitted(self, result: Any) -> None:
            tokens, accepted = result.next_token_ids, result.accept_lens
            if accepted is None:
                self._adaflash_penalties.prefilled(tokens)
            else:
                self._adaflash_penalties.verified(tokens.view(len(accepted), -1), accepted)

        def init_attention_backends(self) -> None:
            super().init_attention_backends()
            if VerifySettings.from_environment().mode == "adaptive":
                require_ragged(self.target_worker.model_runner.attn_backend)

        def _can_skip_verify_logits(self, *args: Any, **kwargs: Any) -> bool:
            """`DFLASH` on several ranks may take the argmax of shards; not where penalties change the logits."""
            return not self._adaflash_penalties.needed and super()._can_skip_verify_logits(*args, **kwargs)

        def set_dspark_forced_budget_frac(self, frac: float | None) -> None:
            """SGLang's switch takes no null: the whole budget ends forcing, almost nothing of it ends drafting."""
            super().set_dspark_forced_budget_frac(frac if frac is not None and frac < 1 else None)
            if self._adaflash_adaptive is not None:
                self._adaflash_adaptive.forced_off = frac is not None and frac <= OFF_FRACTION

    Extended.__name__, Extended.__qualname__ = worker_class.__name__, worker_class.__qualname__
    return Extended


def adaptive(worker: Any, rank: int) -> Any:
    """The planner's extension where verify lengths are chosen, None where whole blocks are verified."""
    settings = VerifySettings.from_environment()
    if settings.mode == "static" or not hasattr(worker, "_verify_planner"):
        return None
    from serving.sglang_plugin.adaptive import Adaptive

    return Adaptive(worker, settings, leader=rank == 0)


def require_ragged(backend: Any) -> None:
    """Ends the start on an attention backend that would read packed rows as whole blocks; SGLang does not check."""
    from serving import sglang_cpu

    if not sglang_cpu.active() and not getattr(backend, "supports_ragged_verify_graph", False):
        raise RuntimeError(
            f"verify = adaptive needs ragged verification, which {type(backend).__name__} does not have: set "
            'engine_args = ["--attention-backend", "fa3"] (or fa4, trtllm_mha), or verify = static'
        )


def follow_chain(worker: Any) -> Any:
    """A function that returns anchor and drafts [R, T] of the verify step under way."""
    if not hasattr(worker, "_proposer"):
        return lambda: worker._draft_block_tokens_buf
    proposer, latest = worker._proposer, {}
    original = proposer.propose

    def propose(**kwargs: Any) -> Any:
        latest["proposal"] = proposal = original(**kwargs)
        return proposal

    def chain() -> Tensor:
        proposal = latest["proposal"]
        return torch.cat([proposal.draft_block_ids[:, :1], proposal.draft_block.draft_tokens], 1)

    proposer.propose = propose
    return chain


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
