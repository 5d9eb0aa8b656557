"""What a scheduler's verify steps really did beside what was predicted; fed by capture once a step is on the host.

Also feeds the switch that turns speculation off. Runs in rank 0 only, in the scheduler's thread: steps are added up in
plain numbers and written to the counters a few times a second.
"""

from __future__ import annotations

import collections
import math
import time
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge
from torch import Tensor

from adaflash.budget import Decision, lengths

BINS = 10
KINDS = ("measured", "predicted", "whole_block")
_FLUSH_SECONDS = 0.25
_FEW_REQUESTS = 8  # so few that writing at once costs nothing


@dataclass(frozen=True)
class StepFacts:
    """What the host knew when the step was launched. `seconds`: how long the step before took, if it was alike."""

    drafting: bool = True
    decision: Decision | None = None
    seconds: float | None = None


class VerifySteps:
    """Counters per verify step of a worker that chooses lengths. `adaptive`: the rank's `Adaptive`."""

    def __init__(self, width: int, adaptive: Any) -> None:
        self._width, self._adaptive = width, adaptive
        rows = Counter("adaflash_verify_length_total", "Times a request verified so many rows in a step.", ["rows"])
        seconds = Counter(
            "adaflash_step_seconds_total",
            "Seconds of steps with a prediction: measured, predicted, predicted for whole blocks.",
            ["kind"],
        )
        tokens = Counter(
            "adaflash_step_tokens_total",
            "Tokens of the same steps: measured, predicted, predicted for whole blocks.",
            ["kind"],
        )
        slots = Counter("adaflash_confidence_slots_total", "Judged slots by confidence.", ["bin"])
        sums = Counter("adaflash_confidence_sum_total", "Sum of their confidences.", ["bin"])
        hits = Counter("adaflash_confidence_accepted_total", "Judged slots that were accepted.", ["bin"])
        bins = [str(b) for b in range(BINS)]
        self._bound = {
            "rows": [rows.labels(str(r)) for r in range(1, width + 1)],
            "slots": [slots.labels(b) for b in bins],
            "sum": [sums.labels(b) for b in bins],
            "hits": [hits.labels(b) for b in bins],
            "tokens": [tokens.labels(k) for k in KINDS],
            "seconds": [seconds.labels(k) for k in KINDS],
        }
        self._heads = _gauge(
            "adaflash_length_head_present", "1 if the loaded drafter has the head that the verify rule reads."
        )
        self._on = _gauge("adaflash_speculation_on", "1 while the drafter runs.")
        self._speedup = _gauge("adaflash_speculation_speedup_ratio", "Measured tokens per second over plain decoding.")
        self._switches = Counter("adaflash_speculation_switches_total", "Times speculation was switched.", ["to"])
        self._pending: collections.Counter[tuple[str, int]] = collections.Counter()
        self._flushed, self._was_on = 0.0, True
        self._on.set(1)

    def observe(
        self,
        accepted: list[int],
        caps: list[int] | None,
        confidence: Tensor | None,
        facts: StepFacts,
        requests: int,
        tokens: int,
    ) -> None:
        """One step of R rows. accepted, caps [R]; confidence [R, B - 1] fp32 on the host.

        `requests` of them were still running and got `tokens`: a stop hides the tail of a block, and with overlapped
        scheduling a finished request takes part in one more step.
        """
        rows = caps or [self._width] * len(accepted)
        for r in rows:
            self._pending["rows", r - 1] += 1
        if confidence is not None and self._adaptive.heads_present and self._adaptive.settings.rule == "survival":
            self._judge(confidence, accepted, rows)
        if facts.decision is not None and facts.seconds is not None:
            self._compare(accepted, confidence, facts.decision, facts.seconds)
        switch = self._adaptive.switch
        if switch is not None and requests:
            slots = round((sum(rows) - len(rows)) * requests / len(rows))
            switch.observe(requests, slots, tokens, facts.drafting, facts.seconds)
        now = time.monotonic()
        if len(accepted) <= _FEW_REQUESTS or now - self._flushed > _FLUSH_SECONDS:
            self._flushed = now
            self._flush()

    def _flush(self) -> None:
        for (name, place), amount in self._pending.items():
            self._bound[name][place].inc(amount)
        self._pending.clear()
        self._heads.set(self._adaptive.heads_present)
        if self._adaptive.switch is not None:
            self._speedup.set(self._adaptive.switch.gain)
        on = self._adaptive.drafting
        if on != self._was_on:
            self._switches.labels("on" if on else "off").inc()
            self._on.set(on)
            self._was_on = on

    def _judge(self, confidence: Tensor, accepted: list[int], rows: list[int]) -> None:
        """Calibration: a slot is judged if it was verified and every slot before it was accepted."""
        for row, emitted, verified in zip(confidence.tolist(), accepted, rows, strict=True):
            for slot in range(min(emitted, verified - 1)):
                if math.isfinite(row[slot]):
                    place = min(int(row[slot] * BINS), BINS - 1)
                    self._pending["slots", place] += 1
                    self._pending["sum", place] += row[slot]
                    self._pending["hits", place] += slot < emitted - 1

    def _compare(self, accepted: list[int], confidence: Tensor | None, d: Decision, seconds: float) -> None:
        """Prediction beside measurement. In `shadow` the tokens are those that the chosen lengths would have left."""
        tokens, taken = accepted, seconds
        if self._adaptive.settings.mode == "shadow" and confidence is not None:
            would = lengths(confidence.cumprod(-1), d.slots).tolist()
            tokens, taken = [min(a, w) for a, w in zip(accepted, would, strict=True)], d.seconds
        for place, (t, s) in enumerate(
            ((sum(tokens), taken), (d.tokens, d.seconds), (d.whole_tokens, d.whole_seconds))
        ):
            self._pending["tokens", place] += t  # type: ignore[assignment]
            self._pending["seconds", place] += s  # type: ignore[assignment]


def _gauge(name: str, text: str) -> Gauge:
    return Gauge(name, text, multiprocess_mode="livemax")
