"""At most one worker of a fleet stands still at a time: a lock in Redis that a worker holds while it swaps."""

from __future__ import annotations

import threading

from redis import Redis

HELD_MS = 15_000  # without renewal; its holder renews it with every heartbeat

# KEYS: lock. ARGV: owner, milliseconds. Returns 1 if the lock is the owner's now.
_TAKE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

# KEYS: lock. ARGV: owner, milliseconds. Returns 1 if it was still the owner's.
_RENEW = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""

# KEYS: lock. ARGV: owner.
_GIVE_BACK = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""


class SwapLock:
    """`owner`: the worker's id; a worker that comes back after a crash finds its own lock. For several threads."""

    def __init__(self, redis: Redis, key: str, owner: str) -> None:
        self._keys, self._owner, self._held, self._mutex = [key], owner, False, threading.Lock()
        self._take, self._renew = redis.register_script(_TAKE), redis.register_script(_RENEW)
        self._give_back = redis.register_script(_GIVE_BACK)

    def take(self) -> bool:
        """True if it is this worker's turn."""
        with self._mutex:
            self._held = bool(self._take(keys=self._keys, args=[self._owner, HELD_MS]))
            return self._held

    def renew(self) -> bool:
        """Keeps the lock if it is held; False if it was lost meanwhile."""
        with self._mutex:
            return not self._held or bool(self._renew(keys=self._keys, args=[self._owner, HELD_MS]))

    def give_back(self) -> None:
        """Lets the next worker swap."""
        with self._mutex:
            if self._held:
                self._held = False
                self._give_back(keys=self._keys, args=[self._owner])
