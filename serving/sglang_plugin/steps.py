"""Times decode steps as a scheduler really makes them: from one step's start to the next one's, batch unchanged."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_SECONDS = 5.0  # a longer gap was a pause, not a step


class Stopwatch:
    """One per scheduler. With overlapped scheduling a single step has no other honest duration."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since, self._requests = 0.0, 0

    def lap(self, requests: int) -> float | None:
        """At a decode step of `requests` (0: another kind of step). Seconds since the previous one if it was alike."""
        now = self._clock()
        elapsed = now - self._since
        alike = requests > 0 and requests == self._requests and elapsed < LONGEST_SECONDS
        self._since, self._requests = now, requests
        return elapsed if alike else None
