"""Contract 3, the release state: which drafter version the workers should run, kept in Redis.

The trainer's publisher writes it under a lease with a fencing number; workers and dashboards read it. Every change
appends to the event stream who did what and why.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from typing import Any

from redis import Redis

from adaflash.keys import Keys

EVENT_LIMIT = 10_000

# KEYS: lease, release hash. ARGV: owner, milliseconds. Returns the fencing number, or 0 when another owner holds it.
_ACQUIRE = """
local holder = redis.call('GET', KEYS[1])
if holder and string.match(holder, '^(.-)|') ~= ARGV[1] then return 0 end
local fence
if holder then fence = tonumber(string.match(holder, '|(%d+)$'))
else fence = redis.call('HINCRBY', KEYS[2], 'fence', 1) end
redis.call('SET', KEYS[1], ARGV[1] .. '|' .. fence, 'PX', ARGV[2])
return fence
"""

# KEYS: release hash, event stream. ARGV: fence, version, event json, limit. Returns 1, or 0 when fenced off.
_PROMOTE = """
if tonumber(redis.call('HGET', KEYS[1], 'fence') or '0') ~= tonumber(ARGV[1]) then return 0 end
local active = redis.call('HGET', KEYS[1], 'active')
if active then redis.call('HSET', KEYS[1], 'previous', active) end
redis.call('HSET', KEYS[1], 'active', ARGV[2])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'e', ARGV[3])
return 1
"""

# KEYS: lease. ARGV: owner.
_RELEASE = """
local holder = redis.call('GET', KEYS[1])
if holder and string.match(holder, '^(.-)|') == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""


class Fenced(RuntimeError):
    """Another publisher took over; this one must stop."""


@dataclass(frozen=True)
class ReleaseState:
    """What Redis says about versions; None where nothing was ever released."""

    active: int | None
    previous: int | None
    fence: int


class Release:
    """Reads and, holding the lease, changes the release state of one model."""

    def __init__(self, redis: Redis, keys: Keys, owner: str | None = None) -> None:
        self.redis, self.keys = redis, keys
        self.owner = owner or f"publisher-{uuid.uuid4().hex[:8]}"
        self._acquire = redis.register_script(_ACQUIRE)
        self._promote = redis.register_script(_PROMOTE)
        self._release = redis.register_script(_RELEASE)

    def state(self) -> ReleaseState:
        """The current state."""
        raw = {_text(k): _text(v) for k, v in self.redis.hgetall(self.keys.release).items()}
        number = {k: int(raw[k]) for k in ("active", "previous", "fence") if k in raw}
        return ReleaseState(number.get("active"), number.get("previous"), number.get("fence", 0))

    def hold(self, seconds: float) -> int:
        """Takes or renews the lease and returns its fencing number; raises Fenced while another owner holds it."""
        fence = int(self._acquire(keys=[self.keys.lease, self.keys.release], args=[self.owner, int(seconds * 1000)]))
        if not fence:
            raise Fenced(f"another publisher holds {self.keys.lease}")
        return fence

    def let_go(self) -> None:
        """Gives the lease back, if it is ours."""
        self._release(keys=[self.keys.lease], args=[self.owner])

    def promote(self, number: int, fence: int, why: str) -> None:
        """Makes `number` the version every worker should run; raises Fenced if `fence` is no longer the latest."""
        event = self._event("promoted", {"to": number, "why": why})
        keys = [self.keys.release, self.keys.events]
        if not self._promote(keys=keys, args=[fence, number, event, EVENT_LIMIT]):
            raise Fenced(f"fencing number {fence} is no longer the latest")

    def record(self, what: str, **details: Any) -> None:
        """Appends an event that changes no state."""
        self.redis.xadd(self.keys.events, {"e": self._event(what, details)}, maxlen=EVENT_LIMIT, approximate=True)

    def _event(self, what: str, details: dict[str, Any]) -> str:
        return json.dumps({"at": time.time(), "who": self.owner, "what": what, **details})


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def read_events(redis: Redis, keys: Keys, after: str = "-") -> list[dict[str, Any]]:
    """Events from `after` (a stream id, exclusive with a leading parenthesis) on, each with its stream `id`."""
    rows: Any = redis.xrange(keys.events, after, "+")
    return [{"id": _text(i), **json.loads(_text(f.get(b"e") or f.get("e") or "{}"))} for i, f in rows]
