"""What a worker's requests and steps did while one drafter version ran, and whether a candidate is as good as the rest.

Workers put their counters into the registry; the release controller compares differences of them. Acceptance is
compared over all steps, speed only between steps of about the same load: how long a step takes is mostly how many
requests share it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from adaflash.config import Section

LOADS = (1, 2, 4, 8, 16, 32, 64)  # upper bounds of the load classes, the last one open
LEAST_REQUESTS = 20  # finished requests that either side needs for a verdict
EARLY_REQUESTS = 3  # of the canary, for a failure so clear that every further request would be one too many
EARLY_SIGMAS = 5.0  # asked again every second
LEAST_LAPS = 20  # engine steps of a load class that either side needs for a comparison of speed


Amount = Annotated[FiniteFloat, Field(ge=0)]  # counters come from processes that may be broken


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Load(Frozen):
    """Engine steps with about the same number of requests: how many, their seconds, and the tokens they emitted."""

    laps: Amount = 0.0
    seconds: Amount = 0.0
    tokens: Amount = 0.0


class Counters(Frozen):
    """Finished requests that one version served alone: their number, verify steps and tokens, and the sums of squares.

    Steps of one request are alike, so requests are what counts as independent.
    """

    requests: Amount = 0.0
    tokens: Amount = 0.0
    steps: Amount = 0.0
    tokens_squared: Amount = 0.0
    steps_squared: Amount = 0.0
    tokens_steps: Amount = 0.0
    loads: dict[str, Load] = Field(default={})

    def __add__(self, other: Counters) -> Counters:
        return self._with(other, 1)

    def __sub__(self, other: Counters) -> Counters:
        return self._with(other, -1)

    def _with(self, other: Counters, sign: int) -> Counters:
        def joined(a: Any, b: Any, names: Iterable[str]) -> dict[str, float]:
            return {n: max(getattr(a, n) + sign * getattr(b, n), 0.0) for n in names}

        loads = {
            name: Load(**joined(self.loads.get(name, Load()), other.loads.get(name, Load()), Load.model_fields))
            for name in self.loads.keys() | other.loads.keys()
        }
        return Counters(**joined(self, other, SUMS), loads=loads)

    @property
    def tau(self) -> float:
        """Tokens per verify step of a request."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def variance(self) -> float:
        """Of that ratio, from one request to the next."""
        if self.requests < 2 or not self.steps:
            return math.inf
        spread = self.tokens_squared - 2 * self.tau * self.tokens_steps + self.tau**2 * self.steps_squared
        return max(spread, 0.0) / self.steps**2 * self.requests / (self.requests - 1)


SUMS = tuple(n for n in Counters.model_fields if n != "loads")


class CanaryPolicy(Section):
    """What a candidate has to show on live traffic."""

    skip_seconds: float = Field(10, ge=0, description="left out of the comparison after the canary's swap")
    min_steps: int = Field(1000, gt=0, description="verify steps of finished requests that either side needs at least")
    tau_loss: float = Field(0.05, ge=0, lt=1, description="relative loss of acceptance length that fails a candidate")
    speed_loss: float = Field(0.10, ge=0, lt=1, description="relative loss of tokens per second that fails a candidate")


class Comparison(Frozen):
    """A candidate beside the rest. `speed`: tokens per second over the rest's, None where no loads are alike."""

    outcome: Literal["good", "bad", "open"]
    why: str
    tau: FiniteFloat
    tau_rest: FiniteFloat
    speed: FiniteFloat | None


def load_class(requests: int) -> str:
    """The name of the load class of a step with so many requests."""
    return str(next((b for b in LOADS if requests <= b), LOADS[-1]))


def compare(canary: Counters, rest: Counters, policy: CanaryPolicy) -> Comparison:
    """Decides as soon as both sides have enough steps, earlier if the candidate is clearly worse."""
    speed = relative_speed(canary, rest)

    def verdict(outcome: Literal["good", "bad", "open"], why: str) -> Comparison:
        return Comparison(outcome=outcome, why=why, tau=canary.tau, tau_rest=rest.tau, speed=speed)

    least, fewest = rest.tau * (1 - policy.tau_loss), min(canary.steps, rest.steps)
    worse = f"acceptance length {canary.tau:.2f} on the canary, {rest.tau:.2f} on the rest"
    if clearly_below(canary, rest, least):
        return verdict("bad", worse)
    if min(canary.requests, rest.requests) < LEAST_REQUESTS:
        return verdict("open", f"{min(canary.requests, rest.requests):.0f} of {LEAST_REQUESTS} requests")
    sigma = math.sqrt(canary.variance + rest.variance * (1 - policy.tau_loss) ** 2)
    if fewest < policy.min_steps:
        return verdict("open", f"{fewest:.0f} of {policy.min_steps} steps")
    if sigma > policy.tau_loss * rest.tau / 2:
        return verdict("open", f"standard error {sigma:.3f}: the requests differ too much for a verdict")
    if canary.tau < least:
        return verdict("bad", worse)
    if speed is not None and speed < 1 - policy.speed_loss:
        return verdict("bad", f"{speed:.2f} times the tokens per second of the rest at the same load")
    return verdict("good", "as good as the rest on live traffic")


def clearly_below(canary: Counters, rest: Counters, least: float) -> bool:
    """True if a few requests of the canary are beyond doubt. Their own spread says little, so the rest's counts."""
    if canary.requests < EARLY_REQUESTS or rest.requests < LEAST_REQUESTS:
        return False
    spread = max(canary.variance, rest.variance * rest.requests / canary.requests)
    return canary.tau + EARLY_SIGMAS * math.sqrt(spread + rest.variance) < least


def relative_speed(canary: Counters, rest: Counters) -> float | None:
    """Tokens per second of the canary over the rest's, at the loads that both had; None if they had none."""
    mine = theirs = 0.0
    for name in canary.loads.keys() & rest.loads.keys():
        a, b = canary.loads[name], rest.loads[name]
        weight = min(a.laps, b.laps)
        if weight >= LEAST_LAPS and a.seconds and b.seconds:
            mine += weight * a.tokens / a.seconds
            theirs += weight * b.tokens / b.seconds
    return mine / theirs if theirs else None
