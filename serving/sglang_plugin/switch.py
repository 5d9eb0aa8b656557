"""Switches speculation off where it costs more than it brings, and probes whether it pays again. No I/O, no torch.

What is compared: the seconds that plain steps would need for the same tokens per request, and the seconds of the
speculative steps that emitted them, both from the cost table; the tokens are measured, not predicted.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from adaflash.cost import CostTable

HORIZON = 128  # steps of single requests that the running comparison remembers: 8 steps of 16 requests
PROBE = 32  # of these in a probe
LEAST_STEPS = 4  # however many requests run at once
OFF_BELOW, ON_ABOVE = 1.0, 1.03  # hysteresis: a probe has to show a gain that is not noise
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0  # seconds between probes, doubled while they fail


class Switch:
    """One per engine; `decide` before each step, `observe` after its tokens are known."""

    def __init__(self, cost: CostTable, clock: Callable[[], float] = time.monotonic) -> None:
        self._cost, self._clock = cost, clock
        self.on, self.probing = True, False
        self._pause, self._next_probe = FIRST_PAUSE, 0.0
        self._off_at: tuple[int, str] = (0, "")  # requests and drafter when it went off
        self._latest: tuple[int, str] = (0, "")
        self._plain = self._spent = 0.0  # seconds, with forgetting
        self._steps, self._samples = 0, 0

    @property
    def gain(self) -> float:
        """Measured tokens per second over those of plain decoding, by the cost table; 1 while nothing is known."""
        return self._plain / self._spent if self._spent else 1.0

    def decide(self, requests: int, drafter: str) -> bool:
        """True if the coming step should draft. Half the load or another drafter is worth a probe at once."""
        self._latest = (requests, drafter)
        before, old = self._off_at
        if not self.on and (self._clock() >= self._next_probe or drafter != old or requests * 2 <= before):
            self.on = self.probing = True
            self._plain = self._spent = 0.0
            self._steps, self._samples = 0, 0
        return self.on

    def observe(self, requests: int, slots: int, tokens: int) -> None:
        """A speculative step of `requests` that verified `slots` drafted slots and emitted `tokens` in all."""
        if not self.on or not requests:
            return  # a step that was under way when the switch went off
        keep = max(1 - requests / HORIZON, 0.5)
        self._plain = self._plain * keep + self._cost.plain(requests) * tokens / requests
        self._spent = self._spent * keep + self._cost.seconds_of(requests, slots)
        self._steps += 1
        self._samples += requests
        if self._steps < LEAST_STEPS:
            return
        if self.probing and self._samples >= PROBE:
            self.probing = False
            if self.gain < ON_ABOVE:
                self._turn_off(min(self._pause * 2, LONGEST_PAUSE))
            else:
                self._pause = FIRST_PAUSE
        elif not self.probing and self._samples >= HORIZON and self.gain < OFF_BELOW:
            self._turn_off(FIRST_PAUSE)

    def _turn_off(self, pause: float) -> None:
        self.on, self._pause = False, pause
        self._next_probe = self._clock() + pause
        self._off_at = self._latest
