"""Switches speculation off where it costs more than it brings, and probes whether it pays again. No I/O, no torch.

What is compared: the seconds that plain steps would need for the same tokens per request, and the seconds of the
speculative steps that emitted them. The tokens are measured. The seconds are those of the cost table, corrected by what
steps of either kind really took since: a table that was made at a quiet hour is wrong by a factor at a busy one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from adaflash.cost import CostTable

HORIZON = 256  # steps of single requests that the running comparison remembers: 16 steps of 16 requests
PROBE = 64  # of these in a probe
LEAST_STEPS = 4  # however many requests run at once
OFF_BELOW, ON_ABOVE = 1.0, 1.03  # hysteresis: a probe has to show a gain that is not noise
DOUBTFUL = 1.25  # a gain up to this is checked against steps that really did not draft
CHECKED_SECONDS = 300.0  # for so long
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0  # seconds between probes, doubled while they fail
FARTHEST = 4.0  # a step that took more times its tabled seconds, or less, was disturbed


class Drift:
    """Measured over tabled seconds of one kind of step, with forgetting."""

    def __init__(self) -> None:
        self._measured = self._tabled = 0.0

    def add(self, measured: float, tabled: float, weight: float) -> None:
        if tabled / FARTHEST < measured < tabled * FARTHEST:
            self._measured = self._measured * (1 - weight) + measured
            self._tabled = self._tabled * (1 - weight) + tabled

    @property
    def ratio(self) -> float | None:
        """None while nothing was measured."""
        return self._measured / self._tabled if self._tabled else None


class Switch:
    """One per engine; `decide` before each step, `observe` after its tokens are known."""

    def __init__(self, cost: CostTable, clock: Callable[[], float] = time.monotonic) -> None:
        self._cost, self._clock = cost, clock
        self.on, self.probing = True, False
        self._pause, self._next_probe = FIRST_PAUSE, 0.0
        self._off_at: tuple[int, str] = (0, "")  # requests and drafter when it went off
        self._latest: tuple[int, str] = (0, "")
        self._plain = self._spent = 0.0  # tabled seconds, with forgetting
        self._steps, self._samples = 0, 0
        self._drift = {True: Drift(), False: Drift()}  # by whether the step drafted
        self._checked = -CHECKED_SECONDS  # when steps that do not draft were last measured
        self._before: tuple[bool, float] | None = None  # the step before: whether it drafted, its tabled seconds

    @property
    def gain(self) -> float:
        """Measured tokens per second over those of plain decoding; 1 while nothing is known."""
        if not self._spent:
            return 1.0
        drafting, plain = self._drift[True].ratio, self._drift[False].ratio
        return self._plain / self._spent * (plain / drafting if plain and drafting else 1.0)

    def decide(self, requests: int, drafter: str) -> bool:
        """True if the coming step should draft. Half the load or another drafter is worth a probe at once."""
        self._latest = (requests, drafter)
        before, old = self._off_at
        if not self.on and (self._clock() >= self._next_probe or drafter != old or requests * 2 <= before):
            self.on = self.probing = True
            self._plain = self._spent = 0.0
            self._steps, self._samples = 0, 0
        return self.on

    def observe(self, requests: int, slots: int, tokens: int, drafted: bool, before: float | None) -> None:
        """A step of `requests` that verified `slots` drafted slots and emitted `tokens` in all.

        `before`: seconds that the step before this one took, None if it had another batch.
        """
        if not requests:
            return
        forget = min(requests / HORIZON, 0.5)
        tabled = self._cost.seconds_of(requests, slots) if drafted else self._cost.plain(requests)
        if before is not None and self._before is not None:
            self._drift[self._before[0]].add(before, self._before[1], forget)
            if not self._before[0]:
                self._checked = self._clock()
        self._before = (drafted, tabled)
        if self.on and drafted:  # not a step that was under way when the switch went over
            self._plain = self._plain * (1 - forget) + self._cost.plain(requests) * tokens / requests
            self._spent = self._spent * (1 - forget) + tabled
            self._steps += 1
            self._samples += requests
            self._judge()

    def _judge(self) -> None:
        if self._steps < LEAST_STEPS:
            return
        if self.probing and self._samples >= PROBE:
            self.probing = False
            if self.gain < ON_ABOVE:
                self._turn_off(min(self._pause * 2, LONGEST_PAUSE))
            else:
                self._pause = FIRST_PAUSE
        elif not self.probing and self._samples >= HORIZON:
            unchecked = self._clock() - self._checked >= CHECKED_SECONDS
            if self.gain < OFF_BELOW or (unchecked and self.gain < DOUBTFUL):
                self._turn_off(FIRST_PAUSE)

    def _turn_off(self, pause: float) -> None:
        self.on, self._pause = False, pause
        self._next_probe = self._clock() + pause
        self._off_at = self._latest
