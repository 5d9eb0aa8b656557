"""What a worker's decode steps did while one drafter version ran, and whether a candidate's are as good as the rest's.

Workers put their counters into the registry; the release controller compares differences of them. Acceptance is
compared over all steps, speed only between steps of about the same load: how long a step takes is mostly how many
requests share it.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from adaflash.config import Section

LOADS = (1, 2, 4, 8, 16, 32, 64)  # upper bounds of the load classes, the last one open
EARLY_STEPS = 100  # steps of single requests on both sides before a clear failure ends a canary early
EARLY_SIGMAS = 4.0
LEAST_LAPS = 20  # engine steps of a load class that either side needs for a comparison of speed


Amount = Annotated[FiniteFloat, Field(ge=0)]  # counters come from processes that may be broken


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Load(Frozen):
    """Engine steps with about the same number of requests: how many, and the seconds they took."""

    laps: Amount = 0.0
    seconds: Amount = 0.0


class Counters(Frozen):
    """Sums over steps of single requests since a version began to run: tokens, their squares, steps; time by load."""

    tokens: Amount = 0.0
    squares: Amount = 0.0
    steps: Amount = 0.0
    loads: dict[str, Load] = Field(default={})

    def __add__(self, other: Counters) -> Counters:
        return self._with(other, 1)

    def __sub__(self, other: Counters) -> Counters:
        return self._with(other, -1)

    def _with(self, other: Counters, sign: int) -> Counters:
        def joined(name: str) -> Load:
            a, b = self.loads.get(name, Load()), other.loads.get(name, Load())
            return Load(laps=max(a.laps + sign * b.laps, 0.0), seconds=max(a.seconds + sign * b.seconds, 0.0))

        return Counters(
            tokens=max(self.tokens + sign * other.tokens, 0.0),
            squares=max(self.squares + sign * other.squares, 0.0),
            steps=max(self.steps + sign * other.steps, 0.0),
            loads={name: joined(name) for name in self.loads.keys() | other.loads.keys()},
        )

    @property
    def tau(self) -> float:
        """Tokens per verify step of a request."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def variance(self) -> float:
        """Of that mean."""
        return max(self.squares / self.steps - self.tau**2, 0.0) / self.steps if self.steps else math.inf


class CanaryPolicy(Section):
    """What a candidate has to show on live traffic."""

    skip_seconds: float = Field(10, ge=0, description="left out of the comparison after the canary's swap")
    min_steps: int = Field(2000, gt=0, description="verify steps of requests that either side needs")
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
    sigma = math.sqrt(canary.variance + rest.variance * (1 - policy.tau_loss) ** 2)
    worse = f"acceptance length {canary.tau:.2f} on the canary, {rest.tau:.2f} on the rest"
    if fewest >= min(EARLY_STEPS, policy.min_steps) and canary.tau + EARLY_SIGMAS * sigma < least:
        return verdict("bad", worse)
    if fewest < policy.min_steps:
        return verdict("open", f"{fewest:.0f} of {policy.min_steps} steps")
    if canary.tau < least:
        return verdict("bad", worse)
    if speed is not None and speed < 1 - policy.speed_loss:
        return verdict("bad", f"{speed:.2f} times the tokens per second of the rest at the same load")
    return verdict("good", "as good as the rest on live traffic")


def relative_speed(canary: Counters, rest: Counters) -> float | None:
    """Tokens per second of the canary over the rest's, at the loads that both had; None if they had none."""
    mine = theirs = 0.0
    for name in canary.loads.keys() & rest.loads.keys():
        a, b = canary.loads[name], rest.loads[name]
        weight = min(a.laps, b.laps)
        if weight >= LEAST_LAPS:
            mine += weight * a.seconds / a.laps
            theirs += weight * b.seconds / b.laps
    if not mine or not theirs or not rest.tau:
        return None
    return (canary.tau / rest.tau) / (mine / theirs)
