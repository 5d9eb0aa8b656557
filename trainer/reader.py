"""The reader actor: owns the Redis consumer group, hands out rounds of rollouts, acknowledges them when told to.

An entry is acknowledged only after the learner's state that used it is durable. After a crash the same consumer first
gets back what it never acknowledged, so nothing is lost.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from adaflash.connect import connect
from adaflash.keys import Keys
from adaflash.rollouts import FIELD, Rollout, RolloutError, unpack, unusable

GROUP, CONSUMER = "trainer", "reader"
_READ_MILLISECONDS = 1000
_BURST = 4  # a round takes up to this many times the rollouts it waits for, so that training keeps up with traffic


@dataclass
class Round:
    """What the learner trains on next. `skipped` counts entries by the reason they were not used."""

    entries: list[str] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    waiting: int = 0
    redis_error: str = ""

    def skip(self, reason: str) -> None:
        """Counts one unusable entry."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


class Reader:
    """Runs as a Ray actor; one per trainer."""

    def __init__(self, redis_url: str, model: str, target: str, vocabulary: int, longest: int) -> None:
        self._redis: Redis = connect(redis_url, timeout=5)
        self._stream, self._target = Keys(model).rollouts, target
        self._vocabulary, self._longest = vocabulary, longest
        self._given: set[str] = set()  # read by this process, not yet acknowledged
        self._pending_after: str | None = "0"  # where to go on in what was never acknowledged; None: nothing left there

    def collect(self, wanted: int, max_wait_seconds: float) -> Round:
        """Waits for `wanted` usable rollouts, or for the time to pass; takes more where more are waiting already.

        Returns at once what there is if Redis fails.
        """
        r = Round()
        deadline = time.monotonic() + max_wait_seconds
        while len(r.rollouts) < wanted and time.monotonic() < deadline:
            try:
                for entry, fields in self._read(_BURST * wanted - len(r.rollouts)):
                    self._take(r, entry, fields)
            except RedisError as error:
                self._pending_after = "0"  # what was in flight when the connection broke
                r.redis_error = str(error)
                break
        r.waiting = self._lag()
        return r

    def acknowledge(self, entries: list[str]) -> None:
        """Marks entries as durably used. Raises RedisError; the caller tries again with its next round."""
        if entries:
            self._redis.xack(self._stream, GROUP, *entries)
        self._given -= set(entries)

    def rewind(self) -> None:
        """Hands out again what was not acknowledged: the learner that had it is gone."""
        self._given.clear()
        self._pending_after = "0"

    def _read(self, count: int) -> list[tuple[str, dict[bytes, bytes]]]:
        """New entries, or first those that an earlier life of this consumer never acknowledged."""
        after = self._pending_after or ">"
        try:
            answer: Any = self._redis.xreadgroup(
                GROUP, CONSUMER, {self._stream: after}, count=max(count, 1), block=_READ_MILLISECONDS
            )
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            self._make_group()
            return []
        rows = [(i.decode(), f) for _, entries in answer or [] for i, f in entries]
        if self._pending_after is not None:
            self._pending_after = rows[-1][0] if rows else None
        return [(i, f) for i, f in rows if i not in self._given]

    def _make_group(self) -> None:
        """Creates group and stream; also after Redis came back empty."""
        try:
            self._redis.xgroup_create(self._stream, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def _take(self, r: Round, entry: str, fields: dict[bytes, bytes]) -> None:
        self._given.add(entry)
        r.entries.append(entry)
        if not fields:
            r.skip("trimmed")  # older servers hand out pending entries that the stream no longer has
            return
        try:
            rollout = unpack(fields[FIELD])
        except (RolloutError, KeyError):
            r.skip("malformed")
            return
        if rollout.target != self._target:
            r.skip("other_target")
        elif why := unusable(rollout.prompt_ids, rollout.output_ids, self._vocabulary, self._longest):
            r.skip(why)
        else:
            r.rollouts.append(rollout)

    def _lag(self) -> int:
        """Entries not yet read, as far as the server tells."""
        try:
            groups: Any = self._redis.xinfo_groups(self._stream)
        except RedisError:
            return -1
        lag = next((g.get("lag") for g in groups if g["name"] in (GROUP, GROUP.encode())), None)
        return -1 if lag is None else int(lag)
