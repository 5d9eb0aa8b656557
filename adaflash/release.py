"""Contract 3, the release state: which drafter version each worker should run, kept in Redis.

Trainers and operators ask (a stream of commands), the controller decides (one state, written under a lease with a
fencing number), workers and dashboards read. Every change appends to the event stream who did what and why.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from redis import Redis

from adaflash.fleet import Command, Event, State, Verb
from adaflash.keys import Keys

EVENT_LIMIT = 10_000
COMMAND_LIMIT = 1_000

# KEYS: lease, fence. ARGV: owner, milliseconds. Returns the fencing number, or 0 when another owner holds it.
_ACQUIRE = """
local holder = redis.call('GET', KEYS[1])
if holder and string.match(holder, '^(.-)|') ~= ARGV[1] then return 0 end
local fence
if holder then fence = tonumber(string.match(holder, '|(%d+)$'))
else fence = redis.call('INCR', KEYS[2]) end
redis.call('SET', KEYS[1], ARGV[1] .. '|' .. fence, 'PX', ARGV[2])
return fence
"""

# KEYS: lease. ARGV: owner.
_LET_GO = """
local holder = redis.call('GET', KEYS[1])
if holder and string.match(holder, '^(.-)|') == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""

# KEYS: fence, release hash, event stream. ARGV: fence, revision it was made from, state, limit, events.
# Returns 1, 0 when the state has changed in between, -1 when fenced off.
_COMMIT = """
if tonumber(redis.call('GET', KEYS[1]) or '0') ~= tonumber(ARGV[1]) then return -1 end
if tonumber(redis.call('HGET', KEYS[2], 'revision') or '0') ~= tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[2], 'state', ARGV[3], 'revision', ARGV[2] + 1)
for i = 5, #ARGV do redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[4], '*', 'e', ARGV[i]) end
return 1
"""

# KEYS: fence, command stream. ARGV: fence, command, limit. Returns the id, or nothing when fenced off.
_ASK = """
if tonumber(redis.call('GET', KEYS[1]) or '0') ~= tonumber(ARGV[1]) then return false end
return redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'c', ARGV[2])
"""


class Fenced(RuntimeError):
    """Another holder of the lease took over; this one must stop."""


class ForeignState(RuntimeError):
    """The release state in Redis was written by another release of this software."""


class Lease:
    """One of several processes may do something; each new holder gets a higher fencing number."""

    def __init__(self, redis: Redis, key: str, owner: str) -> None:
        self._keys, self.owner = (key, f"{key}:fence"), owner
        self._acquire, self._let_go = redis.register_script(_ACQUIRE), redis.register_script(_LET_GO)

    @property
    def fence_key(self) -> str:
        """Where the latest fencing number is."""
        return self._keys[1]

    def hold(self, seconds: float) -> int:
        """Takes or renews the lease and returns its fencing number; raises Fenced while another owner holds it."""
        fence = int(self._acquire(keys=self._keys, args=[self.owner, int(seconds * 1000)]))
        if not fence:
            raise Fenced(f"another process holds {self._keys[0]}")
        return fence

    def let_go(self) -> None:
        """Gives the lease back, if it is ours."""
        self._let_go(keys=self._keys[:1], args=[self.owner])


class Release:
    """Reads the release state of one model, asks for changes and, for the controller, makes them."""

    def __init__(self, redis: Redis, keys: Keys, owner: str | None = None) -> None:
        self.redis, self.keys = redis, keys
        self.owner = owner or f"client-{uuid.uuid4().hex[:8]}"
        self.trainer_lease = Lease(redis, keys.trainer_lease, self.owner)
        self.controller_lease = Lease(redis, keys.controller_lease, self.owner)
        self._commit, self._ask = redis.register_script(_COMMIT), redis.register_script(_ASK)

    def state(self) -> State:
        """The current state, an empty one if nothing was ever released."""
        return self.stored() or State()

    def stored(self) -> State | None:
        """The current state, None if there is none: nothing was ever released, or Redis lost it."""
        raw: Any = self.redis.hget(self.keys.release, "state")
        if raw is None:
            return None
        try:
            return State.model_validate_json(raw)
        except ValidationError:
            raise ForeignState(f"{self.keys.release} was written by another release of this software") from None

    def commit(self, before: State, after: State, events: Sequence[Event], fence: int) -> bool:
        """Replaces the state that `before` was read as; False if it has changed since. Raises Fenced."""
        written = after.but(revision=before.revision + 1).model_dump_json()
        said = [self._event(e) for e in events]
        answer = self._commit(
            keys=[self.controller_lease.fence_key, self.keys.release, self.keys.events],
            args=[fence, before.revision, written, EVENT_LIMIT, *said],
        )
        if int(answer) < 0:
            raise Fenced(f"fencing number {fence} is no longer the latest")
        return bool(answer)

    def commands(self, after: str) -> list[Command]:
        """Commands that follow the one with id `after`, oldest first."""
        rows: Any = self.redis.xrange(self.keys.commands, f"({after}", "+", count=COMMAND_LIMIT)
        return [_command(_text(i), _field(f, "c")) for i, f in rows]

    def answered(self) -> str:
        """The id of the last command that left an event, by the event stream; what the state says counts first."""
        rows: Any = self.redis.xrevrange(self.keys.events, "+", "-")
        commands = (json.loads(_field(f, "e")).get("command") for _, f in rows)
        return next((c for c in commands if c), "0-0")

    def ask(self, verb: Verb, version: int | None = None, why: str = "") -> str:
        """Sends a command of an operator; returns its id. What becomes of it is on the event stream."""
        body = Command(verb=verb, version=version, who=self.owner, why=why).model_dump_json(exclude={"id"})
        sent: Any = self.redis.xadd(self.keys.commands, {"c": body}, maxlen=COMMAND_LIMIT, approximate=True)
        return _text(sent)

    def propose(self, number: int, fence: int, why: str) -> None:
        """Asks, as the trainer, for `number` to be tried; raises Fenced if `fence` is no longer the latest."""
        body = Command(verb="propose", version=number, who=self.owner, why=why).model_dump_json(exclude={"id"})
        keys = [self.trainer_lease.fence_key, self.keys.commands]
        if self._ask(keys=keys, args=[fence, body, COMMAND_LIMIT]) is None:
            raise Fenced(f"fencing number {fence} is no longer the latest: another trainer took over")

    def record(self, what: str, **details: Any) -> None:
        """Appends an event that changes no state."""
        event = self._event({"what": what, **details})
        self.redis.xadd(self.keys.events, {"e": event}, maxlen=EVENT_LIMIT, approximate=True)

    def _event(self, event: Event) -> str:
        return json.dumps({"at": time.time(), "who": self.owner, **event})


def read_events(redis: Redis, keys: Keys, after: str = "-") -> list[dict[str, Any]]:
    """Events from `after` (a stream id, exclusive with a leading parenthesis) on, each with its stream `id`."""
    rows: Any = redis.xrange(keys.events, after, "+")
    return [{"id": _text(i), **json.loads(_field(f, "e"))} for i, f in rows]


def _command(id_: str, body: str) -> Command:
    """A command of the stream; one that cannot be read must not keep those behind it from being heard."""
    try:
        return Command.model_validate({**json.loads(body), "id": id_})
    except (ValueError, TypeError):
        return Command(verb="unreadable", id=id_)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _field(fields: Any, name: str) -> str:
    return _text(fields.get(name.encode()) or fields.get(name) or "{}")
