"""Reads what the demo shows from the same places an operator would: rollouts, events and status in Redis."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from adaflash.keys import Keys
from adaflash.registry import Registry, WorkerEntry
from adaflash.release import read_events
from adaflash.rollouts import FIELD, Rollout, RolloutError, unpack


@dataclass(frozen=True)
class Served:
    """One finished request, as far as acceptance goes."""

    at: float
    domain: str
    tokens: int
    steps: int
    version: str

    @classmethod
    def of(cls, r: Rollout) -> Served:
        """The numbers of a rollout; `version` is the last span's."""
        return cls(
            r.finished_at, r.domain, sum(r.accepted), len(r.accepted), r.versions[-1].version if r.versions else ""
        )


def tau(rows: list[Served]) -> float:
    """Tokens per verify step, 1.0 without any."""
    steps = sum(r.steps for r in rows)
    return sum(r.tokens for r in rows) / steps if steps else 1.0


class Monitor:
    """Polled by the demo's main loop; a Redis that is away leaves the last known values."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._keys = redis, keys
        self.rollouts: list[Rollout] = []
        self.served: list[Served] = []
        self.events: list[dict[str, Any]] = []
        self.trainer: dict[str, Any] = {}
        self.workers: list[WorkerEntry] = []
        self._last_rollout, self._last_event = "-", "-"

    def poll(self) -> None:
        """Reads what is new."""
        try:
            rows: Any = self._redis.xrange(self._keys.rollouts, self._last_rollout, "+")
            for entry, fields in rows:
                self._last_rollout = "(" + entry.decode()
                try:
                    rollout = unpack(fields[FIELD])
                except RolloutError:
                    continue  # the trainer counts these
                self.rollouts.append(rollout)
                self.served.append(Served.of(rollout))
            for event in read_events(self._redis, self._keys, self._last_event):
                self._last_event = "(" + event["id"]
                self.events.append(event)
            raw: Any = self._redis.get(self._keys.trainer)
            self.trainer = json.loads(raw) if raw else self.trainer
            self.workers = Registry(self._redis, self._keys).live()
        except RedisError:
            return

    def swaps(self) -> list[dict[str, Any]]:
        """The swaps that workers reported, oldest first."""
        return [e for e in self.events if e["what"] == "swapped"]

    def recent(self, seconds: float, domain: str | None = None) -> list[Served]:
        """Requests finished in the last `seconds`."""
        since = time.time() - seconds
        return [s for s in self.served if s.at >= since and (domain is None or s.domain == domain)]
