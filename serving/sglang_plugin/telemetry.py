"""Counters of the plugin, exported through SGLang's own `/metrics` (its multiprocess directory collects them)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge

from adaflash.live import load_class
from serving.sglang_plugin.settings import VerifySettings

if TYPE_CHECKING:
    from serving.sglang_plugin.capture import Finished

DECODE = "adaflash_decode_"  # counters that the release controller compares, see adaflash.live
JUDGED = {
    "requests": "Number",
    "tokens": "Tokens from verify steps",
    "steps": "Verify steps",
    "tokens_squared": "Squares of the tokens",
    "steps_squared": "Squares of the steps",
    "tokens_steps": "Tokens times steps",
}
LOADS = {"laps": "Decode steps", "seconds": "Seconds of decode steps", "tokens": "Tokens of decode steps"}
DOMAINS_KEPT = 32  # further domain names are counted as "other"


class Telemetry:
    """Created once in rank 0's scheduler."""

    def __init__(self) -> None:
        self._domains = {"other"}
        self.output_tokens = Counter(
            "adaflash_output_tokens_total", "Tokens emitted by verify steps of finished requests.", ["domain"]
        )
        self.verify_steps = Counter("adaflash_verify_steps_total", "Verify steps of finished requests.", ["domain"])
        self.verified_rows = Counter("adaflash_verified_rows_total", "Block rows the target verified, anchor included.")
        self.slot_accepted = Counter("adaflash_slot_accepted_total", "Verify steps that accepted this slot.", ["slot"])
        self.slot_verified = Counter("adaflash_slot_verified_total", "Verify steps that verified this slot.", ["slot"])
        self.requests = Counter(
            "adaflash_finished_requests_total", "Finished requests by how many drafter versions they saw.", ["versions"]
        )
        for versions in ("one", "several"):
            self.requests.labels(versions)
        self.judged = {
            name: Counter(
                f"{DECODE}{name}_total", f"{text} of finished requests that one drafter version served alone."
            )
            for name, text in JUDGED.items()
        }
        self.loads = {
            name: Counter(f"{DECODE}load_{name}_total", f"{text} by the number of requests, up to.", ["load"])
            for name, text in LOADS.items()
        }
        self._before: tuple[str, int] | None = None
        self.wasted_rows = Counter("adaflash_wasted_rows_total", "Verified rows that emitted no token.")
        self.rollouts = Counter(
            "adaflash_rollouts_total", "Finished requests by what became of their rollout.", ["result"]
        )
        self.plugin_active = Gauge(
            "adaflash_plugin_active", "1 while capture runs in the scheduler.", multiprocess_mode="livemax"
        )
        self.plugin_active.set(1)
        settings = VerifySettings.from_environment()
        self.verify_mode = Gauge(
            "adaflash_verify_mode_info",
            "1 for how this worker verifies.",
            ["mode", "rule"],
            multiprocess_mode="livemax",
        )
        self.verify_mode.labels(settings.mode, settings.rule if settings.mode != "static" else "none").set(1)
        for result in ("written", "dropped_queue", "dropped_redis", "opted_out", "invalid", "capture_failed"):
            self.rollouts.labels(result)

    def domain(self, name: str) -> str:
        """`name` if it is among the first few seen, else "other": labels stay bounded."""
        if name not in self._domains and len(self._domains) < DOMAINS_KEPT:
            self._domains.add(name)
        return name if name in self._domains else "other"

    def finished(self, f: Finished) -> None:
        """Counts one finished request."""
        self.requests.labels("several" if len(f.versions) > 1 else "one").inc()
        self._judge(f)
        domain = self.domain(str(f.tags.get("domain") or "other"))
        self.output_tokens.labels(domain).inc(sum(f.accepted))
        self.verify_steps.labels(domain).inc(len(f.accepted))
        self.verified_rows.inc(sum(f.verified))
        # A stop inside a block hides the tail of what was accepted, so a difference is clamped step by step.
        self.wasted_rows.inc(sum(max(v - a, 0) for v, a in zip(f.verified, f.accepted, strict=True)))
        for slot in range(1, max(f.accepted, default=1)):
            self.slot_accepted.labels(str(slot)).inc(sum(a > slot for a in f.accepted))
        for slot in range(1, max(f.verified, default=1)):
            self.slot_verified.labels(str(slot)).inc(sum(v > slot for v in f.verified))

    def stepped(self, emitted: list[int], seconds: float | None) -> None:
        """Counts a decode step: tokens per request. `seconds`: of the step before, None if its batch was another."""
        if seconds is not None and self._before is not None:
            load, tokens = self._before
            for name, amount in (("laps", 1), ("seconds", seconds), ("tokens", tokens)):
                self.loads[name].labels(load).inc(amount)
        self._before = (load_class(len(emitted)), sum(emitted)) if emitted else None

    def _judge(self, f: Finished) -> None:
        """Sums for the release controller's comparison; a request that lived through a swap speaks for nobody."""
        tokens, steps = sum(f.accepted), len(f.accepted)
        if len(f.versions) != 1 or not steps:
            return
        amounts = (1, tokens, steps, tokens**2, steps**2, tokens * steps)
        for name, amount in zip(JUDGED, amounts, strict=True):
            self.judged[name].inc(amount)

    def rollout(self, result: str, count: int = 1) -> None:
        """Counts what became of rollouts."""
        self.rollouts.labels(result).inc(count)

    def capture_failed(self) -> None:
        """Counts a step whose capture raised."""
        self.rollout("capture_failed")
