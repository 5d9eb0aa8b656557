"""The gate: whether a candidate drafter may replace the active one, judged by replay on the held-out slice."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from trainer.config import GateConfig

RESAMPLES = 2000


@dataclass(frozen=True)
class Verdict:
    """A gate report; stored with the version and shown to operators."""

    promote: bool
    why: str
    tau_candidate: float = 1.0
    tau_active: float = 1.0
    domains: dict[str, tuple[float, float]] = field(default_factory=dict)
    sequences: int = 0
    gain_low: float = 0.0  # the gain's confidence interval, paired over sequences
    gain_high: float = 0.0
    served: tuple[float, float] | None = None  # the active drafter's tau: as workers served it, as it is replayed

    def report(self) -> dict[str, Any]:
        """As JSON for the manifest."""
        return asdict(self)


def tau(steps: list[list[int]]) -> float:
    """Tokens per verify step."""
    count = sum(map(len, steps))
    return sum(map(sum, steps)) / count if count else 1.0


def gain_interval(
    candidate: list[list[int]], active: list[list[int]], confidence: float, seed: int = 0
) -> tuple[float, float]:
    """Interval of tau(candidate) - tau(active) by resampling sequences, both drafters on the same ones each time.

    Paired, since sequences differ far more from each other than the drafters do on one of them.
    """
    rng = np.random.default_rng(seed)
    sums = np.array([[sum(s), len(s)] for side in (candidate, active) for s in side], dtype=float)
    new, old = sums[: len(candidate)], sums[len(candidate) :]
    picks = rng.integers(0, len(candidate), size=(RESAMPLES, len(candidate)))
    tokens = [side[picks].sum(1) for side in (new, old)]
    gains = tokens[0][:, 0] / tokens[0][:, 1].clip(1) - tokens[1][:, 0] / tokens[1][:, 1].clip(1)
    low, high = np.quantile(gains, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def judge(
    config: GateConfig,
    domains: list[str],
    candidate: list[list[int]],
    active: list[list[int]],
    finite: bool,
    served: tuple[float, float] | None = None,
) -> Verdict:
    """`candidate[i]`, `active[i]`: replayed steps of held-out sequence i, whose domain is `domains[i]`.

    `served`: the active drafter's tau on the same requests, from the workers' counts and replayed, where it served any.
    """
    if not finite:
        return Verdict(False, "a parameter is not finite")
    if len(domains) < config.min_held_out:
        return Verdict(False, f"only {len(domains)} held-out sequences, {config.min_held_out} are needed")
    per = {
        d: tuple(tau([s for s, of in zip(steps, domains, strict=True) if of == d]) for steps in (candidate, active))
        for d in sorted(set(domains))
    }
    new, old = tau(candidate), tau(active)
    low, high = gain_interval(candidate, active, config.confidence)
    report: dict[str, Any] = dict(tau_candidate=new, tau_active=old, domains=per, sequences=len(domains))
    report |= dict(gain_low=low, gain_high=high, served=served)
    if served is not None and abs(served[1] / served[0] - 1) > config.parity:
        why = f"replay says tau {served[1]:.2f} where workers served {served[0]:.2f} with the active version"
        return Verdict(False, f"{why}: this judge cannot be trusted", **report)
    heard = [d for d in per if domains.count(d) >= config.min_domain]
    worst = min(heard, key=lambda d: per[d][0] / per[d][1], default=None)
    if worst is not None and per[worst][0] < per[worst][1] * (1 - config.worst_domain_loss):
        return Verdict(False, f"domain {worst} would fall from {per[worst][1]:.2f} to {per[worst][0]:.2f}", **report)
    if new < old + config.margin:
        return Verdict(False, f"tau {new:.3f} does not beat the active {old:.3f} by {config.margin}", **report)
    interval = f"{config.confidence:.0%} interval of the gain {low:+.3f} to {high:+.3f}"
    if low <= 0:
        return Verdict(False, f"tau {old:.3f} -> {new:.3f} may be chance: {interval}", **report)
    return Verdict(True, f"tau {old:.3f} -> {new:.3f} on {len(domains)} held-out sequences, {interval}", **report)
