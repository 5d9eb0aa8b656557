"""What a scheduler's verify steps really did beside what was predicted; fed by capture once a step is on the host.

Also feeds the switch that turns speculation off. Runs in rank 0 only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from torch import Tensor

from adaflash.budget import Decision, lengths

BINS = 10


@dataclass(frozen=True)
class StepFacts:
    """What the host knew when the step was launched. `seconds`: how long the step before took, if it was alike."""

    drafting: bool = True
    decision: Decision | None = None
    seconds: float | None = None


class VerifySteps:
    """Counters per verify step. `adaptive`: the rank's `Adaptive`, None where whole blocks are verified blindly."""

    def __init__(self, width: int, adaptive: Any) -> None:
        self._width, self._adaptive = width, adaptive
        self._switch = adaptive.switch if adaptive is not None else None
        self.rows = Histogram(
            "adaflash_verify_length_rows", "Rows verified for a request in a step.", buckets=range(1, width + 1)
        )
        self.mode = Gauge(
            "adaflash_verify_mode_info",
            "1 for how this worker verifies.",
            ["mode", "rule"],
            multiprocess_mode="livemax",
        )
        self.on = Gauge("adaflash_speculation_on", "1 while the drafter runs.", multiprocess_mode="livemax")
        self.heads = Gauge(
            "adaflash_length_head_present",
            "1 if the loaded drafter has the head that the verify rule reads.",
            multiprocess_mode="livemax",
        )
        self.speedup = Gauge(
            "adaflash_speculation_speedup_ratio",
            "Measured tokens per second over plain decoding, by the cost table.",
            multiprocess_mode="livemax",
        )
        self.switches = Counter("adaflash_speculation_switches_total", "Times speculation was switched.", ["to"])
        self.seconds = Counter(
            "adaflash_step_seconds_total",
            "Seconds of steps with a prediction: measured, predicted, predicted for whole blocks.",
            ["kind"],
        )
        self.tokens = Counter(
            "adaflash_step_tokens_total",
            "Tokens of the same steps: measured, predicted, predicted for whole blocks.",
            ["kind"],
        )
        self.slots = Counter("adaflash_confidence_slots_total", "Judged slots by confidence.", ["bin"])
        self.sum = Counter("adaflash_confidence_sum_total", "Sum of their confidences.", ["bin"])
        self.hits = Counter("adaflash_confidence_accepted_total", "Judged slots that were accepted.", ["bin"])
        self._was_on = True
        self.on.set(1)
        settings = adaptive.settings if adaptive is not None else None
        self.mode.labels(settings.mode if settings else "static", settings.rule if settings else "none").set(1)

    def observe(self, accepted: list[int], caps: list[int] | None, confidence: Tensor | None, facts: StepFacts) -> None:
        """One step of R requests. accepted, caps: rows; confidence [R, B - 1] fp32 on the host."""
        requests = len(accepted)
        rows = caps or [self._width] * requests
        for r in rows:
            self.rows.observe(r)
        if self._adaptive is None:
            return
        self.heads.set(self._adaptive.heads_present)
        if confidence is not None:
            self._judge(confidence, accepted, rows)
        if facts.decision is not None and facts.seconds is not None:
            self._compare(accepted, confidence, facts.decision, facts.seconds)
        if self._switch is not None and facts.drafting:
            self._switch.observe(requests, sum(rows) - requests, sum(accepted))
            self.speedup.set(self._switch.gain)
        on = self._adaptive.drafting
        if on != self._was_on:
            self.switches.labels("on" if on else "off").inc()
            self.on.set(on)
            self._was_on = on

    def _judge(self, confidence: Tensor, accepted: list[int], rows: list[int]) -> None:
        """Calibration: a slot is judged if it was verified and every slot before it was accepted."""
        for row, emitted, verified in zip(confidence.tolist(), accepted, rows, strict=True):
            for slot in range(min(emitted, verified - 1)):
                name = str(min(int(row[slot] * BINS), BINS - 1))
                self.slots.labels(name).inc()
                self.sum.labels(name).inc(row[slot])
                self.hits.labels(name).inc(slot < emitted - 1)

    def _compare(self, accepted: list[int], confidence: Tensor | None, d: Decision, seconds: float) -> None:
        """Prediction beside measurement. In `shadow` the tokens are those that the chosen lengths would have left."""
        tokens, taken = accepted, seconds
        if self._adaptive.settings.mode == "shadow" and confidence is not None:
            would = lengths(confidence.cumprod(-1), d.slots).tolist()
            tokens, taken = [min(a, w) for a, w in zip(accepted, would, strict=True)], d.seconds
        for kind, t, s in (
            ("measured", sum(tokens), taken),
            ("predicted", d.tokens, d.seconds),
            ("whole_block", d.whole_tokens, d.whole_seconds),
        ):
            self.tokens.labels(kind).inc(t)
            self.seconds.labels(kind).inc(s)
