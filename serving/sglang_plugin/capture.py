"""Rollout capture inside the scheduler: per verify step what was accepted, per finished request one record.

Uses SGLang's auxiliary-output contract (`srt/managers/auxiliary_output.py`): the worker attaches a `StepOnDevice` to
its result, SGLang copies it to the host with everything else and calls `consume` after the tokens are committed. The
scheduler thread only appends to a bounded queue; packing and Redis are the writer thread's.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from serving.sglang_plugin.telemetry import Telemetry
from serving.sglang_plugin.verify_telemetry import StepFacts, VerifySteps
from serving.sglang_plugin.writer import RolloutWriter

logger = logging.getLogger(__name__)

TAGS = "adaflash"  # key of our tags in a request's `custom_params`
_EXPIRY_SECONDS = 3600.0  # aborted requests never finish; their state is dropped after this


@dataclass
class _Steps:
    """Verify steps of one running request."""

    accepted: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    touched: float = 0.0


@dataclass(frozen=True)
class Finished:
    """A finished request as the scheduler hands it to the writer thread: plain lists, nothing of SGLang's."""

    request_id: str
    tags: dict[str, Any]
    versions: list[tuple[str, int, int]]
    prompt_ids: list[int]
    output_ids: list[int]
    accepted: list[int]
    verified: list[int]
    temperature: float
    top_p: float
    top_k: int
    finish_reason: str
    finished_at: float


class Capture:
    """Steps of all running requests of one scheduler."""

    def __init__(
        self,
        width: int,
        offer: Callable[[Finished], None],
        telemetry: Telemetry,
        steps: VerifySteps | None = None,
    ) -> None:
        self.width, self.steps, self._offer, self._telemetry = width, steps, offer, telemetry
        self._running: dict[str, _Steps] = {}
        self._swept = time.monotonic()

    def consume(self, batch: Any, commits: Any, accepted: list[int] | None, caps: list[int] | None) -> None:
        """One step of `batch`. `accepted` is None after prefill, whose token no verify step emitted."""
        now = time.monotonic()
        for i, (request, commit) in enumerate(zip(batch.reqs, commits, strict=True)):
            if commit is None:
                continue
            steps = self._running.get(request.rid)
            if steps is None:
                steps = self._running[request.rid] = _Steps()
            steps.touched = now
            if accepted is not None:
                # What became visible: a stop inside the block hides the tail of what was accepted.
                steps.accepted.append(len(commit.token_ids))
                steps.verified.append(caps[i] if caps is not None and caps[i] else self.width)
            elif commit.output_index > 0:
                # A retracted request was prefilled again: this token came from prefill, as a step of its own.
                steps.accepted.append(len(commit.token_ids))
                steps.verified.append(1)
            if request.finished():
                del self._running[request.rid]
                self._finish(request, steps)
        if now - self._swept > 60:
            self._swept = now
            self._running = {k: v for k, v in self._running.items() if now - v.touched < _EXPIRY_SECONDS}

    def _finish(self, request: Any, steps: _Steps) -> None:
        from sglang.srt.runtime_context import get_serving
        from sglang.srt.utils.weight_versions import compute_weight_version_spans

        params = request.sampling_params
        tags = (params.custom_params or {}).get(TAGS) if isinstance(params.custom_params, dict) else None
        length = request.finished_len if request.finished_len is not None else len(request.output_ids)
        spans = compute_weight_version_spans(
            request.weight_version_events, current_version=get_serving().weight_version, num_output_tokens=length
        )
        reason = request.finished_reason
        finished = Finished(
            request_id=request.rid,
            tags=tags if isinstance(tags, dict) else {},
            versions=[(s.version, s.start, s.end) for s in spans],
            prompt_ids=list(request.origin_input_ids),
            output_ids=list(request.output_ids[:length]),
            accepted=steps.accepted,
            verified=steps.verified,
            temperature=float(params.temperature),
            top_p=float(params.top_p),
            top_k=int(params.top_k),
            finish_reason=str(reason.to_json().get("type", "")) if reason is not None else "",
            finished_at=time.time(),
        )
        self._telemetry.finished(finished)
        self._offer(finished)


class StepOnDevice:
    """SGLang's DeviceAuxiliaryOutput: clones, since the originals may live in graph buffers."""

    def __init__(self, capture: Capture, result: Any, adaptive: Any, seconds: float | None) -> None:
        """`adaptive`: the rank's `Adaptive` or None. `seconds`: how long the step before took, if it was alike."""
        self.capture = capture
        verify = result.accept_lens is not None
        confidence = adaptive.confidence if adaptive is not None and verify else None
        tensors = (result.accept_lens, getattr(result, "cap_lens", None), confidence)
        self.tensors = tuple(t.clone() if t is not None else None for t in tensors)
        self.seconds = seconds
        self.facts: StepFacts | None = None
        if capture.steps is not None and verify:
            self.facts = StepFacts(adaptive.drafting, adaptive.decision, seconds)

    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> StepOnHost:
        """Starts the copies; SGLang synchronises before `consume`."""
        accepted, caps, confidence = (copy_tensor(t) if t is not None else None for t in self.tensors)
        return StepOnHost(self.capture, accepted, caps, confidence, self.facts, self.seconds)


@dataclass(frozen=True)
class StepOnHost:
    """SGLang's HostAuxiliaryOutput. Nothing here may break serving: a failure is counted and logged."""

    capture: Capture
    accepted: Tensor | None
    caps: Tensor | None
    confidence: Tensor | None = None
    facts: StepFacts | None = None
    seconds: float | None = None

    def consume(self, batch: Any, commits: Any) -> None:
        """Called by SGLang right before the step's tokens are streamed."""
        try:
            accepted = self.accepted.tolist() if self.accepted is not None else None
            caps = self.caps.tolist() if self.caps is not None else None
            self.capture.consume(batch, commits, accepted, caps)
            emitted = [len(c.token_ids) for c in commits if c is not None] if accepted is not None else []
            self.capture._telemetry.stepped(emitted, self.seconds)
            if self.facts is not None and accepted is not None and self.capture.steps is not None:
                self.capture.steps.observe(accepted, caps, self.confidence, self.facts, len(emitted), sum(emitted))
        except Exception:
            logger.exception("rollout capture failed on a step")
            self.capture._telemetry.capture_failed()


def start_capture(adaptive: Any) -> Capture:
    """The capture of a scheduler, with its writer thread; what it needs comes from the launcher's environment."""
    from sglang.srt.runtime_context import get_spec

    telemetry = Telemetry()
    width = int(get_spec().speculative_num_draft_tokens)
    writer = RolloutWriter(
        url=os.environ.get("ADAFLASH_REDIS_URL", ""),
        model=os.environ.get("ADAFLASH_MODEL", ""),
        target=os.environ.get("ADAFLASH_TARGET", ""),
        telemetry=telemetry,
    )
    writer.start()
    steps = VerifySteps(width, adaptive) if adaptive is not None else None
    return Capture(width, writer.offer, telemetry, steps)
