"""How a drafter version gets to the fleet and back: the release controller's decisions, as a pure state machine.

proposed -> canary worker(s) -> compared with the rest on live traffic -> everyone, one worker at a time -> active, or
back to the active version, one worker at a time. No I/O and no clock here: `step` takes what was seen and asked and
returns the next state; the state in Redis is all that a restarted or competing controller needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from adaflash.config import Section

Phase = Literal["idle", "canary", "rolling", "returning"]
Verb = Literal["propose", "promote", "reject", "rollback", "pin", "unpin", "pause", "resume"]
Event = dict[str, Any]
REMEMBERED = 64  # rejected versions


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Counters(Frozen):
    """A worker's verify steps since it started: tokens they emitted, their number, and the seconds they took."""

    tokens: float = 0.0
    steps: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Counters) -> Counters:
        return Counters(
            tokens=self.tokens + other.tokens, steps=self.steps + other.steps, seconds=self.seconds + other.seconds
        )

    def since(self, start: Counters | None) -> Counters:
        """What was added; everything, if the worker restarted in between."""
        if start is None or start.steps > self.steps:
            return self
        return Counters(
            tokens=self.tokens - start.tokens, steps=self.steps - start.steps, seconds=self.seconds - start.seconds
        )

    @property
    def tau(self) -> float:
        """Tokens per verify step."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def speed(self) -> float:
        """Tokens per second of verify steps."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Worker(Frozen):
    """What the registry says about one worker. `version` None: none that has a number. `refused`: failed to take."""

    version: int | None
    ready: bool
    refused: int | None = None
    counters: Counters = Counters()


class Command(Frozen):
    """Something that a trainer or an operator asks for."""

    verb: Verb
    version: int | None = None
    who: str = ""
    why: str = ""


class ReleasePolicy(Section):
    """When a candidate is good enough."""

    canary_share: float = Field(0.2, gt=0, le=1, description="share of the workers that try a candidate, at least one")
    skip_seconds: float = Field(10, ge=0, description="left out of the comparison after the canary's swap")
    min_steps: int = Field(300, gt=0, description="verify steps that either side needs for a comparison")
    tau_loss: float = Field(0.05, ge=0, description="relative loss of acceptance length that fails a canary")
    speed_loss: float = Field(0.10, ge=0, description="relative loss of tokens per second that fails a canary")
    canary_seconds: float = Field(3600, gt=0, description="a canary without enough traffic for this long is taken back")
    failures: int = Field(3, gt=0, description="failed candidates in a row that start a cool-down")
    cooldown_seconds: float = Field(1800, ge=0, description="no candidate is tried for this long")


class State(Frozen):
    """Everything about a model's release; `revision` grows with every write."""

    revision: int = 0
    active: int | None = None
    previous: int | None = None
    candidate: int | None = None
    waiting: int | None = None  # newest proposal that has not been tried
    forced: int | None = None  # an operator's choice: goes to everyone without canary
    pinned: int | None = None
    paused: bool = False
    phase: Phase = "idle"
    moved: tuple[str, ...] = ()  # workers that are told to run the candidate
    canary: bool = False  # whether the candidate has to prove itself
    reason: str = ""  # why the candidate is taken back
    counts: bool = False  # whether taking it back is a failure of the candidate
    settled_at: float | None = None  # when the canaries ran the candidate
    base: dict[str, Counters] = {}  # every worker's counters when the comparison began
    before: Counters = Counters()  # the fleet's, over the quiet time before the candidate
    quiet: dict[str, Counters] = {}  # every worker's counters when the quiet time began
    failures: int = 0
    cooldown_until: float = 0.0
    rejected: tuple[int, ...] = ()

    def wanted(self, worker: str) -> int | None:
        """The version that `worker` should run."""
        return self.candidate if worker in self.moved and self.candidate is not None else self.active


def step(
    state: State, now: float, workers: Mapping[str, Worker], commands: Sequence[Command], policy: ReleasePolicy
) -> tuple[State, list[Event]]:
    """The next state and what happened. `workers`: the live ones, by id."""
    events: list[Event] = []
    for command in commands:
        state = _obey(state, command, events)
    if not state.paused:
        advance = {"idle": _idle, "canary": _canary, "rolling": _rolling, "returning": _returning}[state.phase]
        state = advance(state, now, workers, policy, events)
    return state, events


def _obey(s: State, c: Command, events: list[Event]) -> State:
    """One command; what cannot be done is an event, not an error."""
    said = {"what": c.verb, "who": c.who, "why": c.why, "version": c.version}
    running = s.candidate is not None
    match c.verb:
        case "propose" if c.version is None or c.version in s.rejected or c.version == s.active:
            return _refuse(s, said, "it is active or was rejected", events)
        case "propose":
            new = s.model_copy(update={"waiting": c.version})
        case "promote" | "pin" if c.version is None:
            return _refuse(s, said, "a version is needed", events)
        case "promote":
            new = _abandon(s, "an operator chose another version").model_copy(update={"forced": c.version})
        case "pin":
            new = _abandon(s, "an operator pinned a version").model_copy(update={"pinned": c.version, "forced": None})
        case "unpin":
            new = s.model_copy(update={"pinned": None})
        case "pause" | "resume":
            new = s.model_copy(update={"paused": c.verb == "pause"})
        case "reject" if not running:
            return _refuse(s, said, "there is no candidate", events)
        case "reject":
            new = _reject(s, f"rejected by {c.who}: {c.why}", counts=True)
        case "rollback" if running:
            new = _reject(s, f"rolled back by {c.who}: {c.why}", counts=True)
        case "rollback" if s.previous is None or s.active is None:
            return _refuse(s, said, "there is no previous version", events)
        case "rollback":
            new = _remember(s, s.active).model_copy(update={"forced": s.previous, "waiting": None})
        case _:
            return _refuse(s, said, "unknown", events)
    events.append(said)
    return new


def _idle(s: State, now: float, workers: Mapping[str, Worker], policy: ReleasePolicy, events: list[Event]) -> State:
    """Nothing moves; the next candidate is chosen: a pin before an operator's choice before a proposal."""
    if s.pinned is not None:
        choice, canary, left = s.pinned, False, {"forced": None}
    elif s.forced is not None:
        choice, canary, left = s.forced, False, {"forced": None}
    elif s.waiting is not None and now >= s.cooldown_until:
        choice, canary, left = s.waiting, True, {"waiting": None}
    else:
        return s if s.quiet else s.model_copy(update={"quiet": _counters(workers)})
    s = s.model_copy(update=left)
    if choice == s.active:
        return s
    if s.active is None:  # nothing to compare with and nothing to go back to
        events.append({"what": "promoted", "version": choice, "why": "first version"})
        return s.model_copy(update={"active": choice, "quiet": {}})
    events.append({"what": "canary" if canary else "rolling", "version": choice, "from": s.active})
    return s.model_copy(
        update={
            "candidate": choice,
            "canary": canary,
            "phase": "canary" if canary else "rolling",
            "before": _sum(w.counters.since(s.quiet.get(i)) for i, w in workers.items()),
            "settled_at": None,
            "base": {},
        }
    )


def _canary(s: State, now: float, workers: Mapping[str, Worker], policy: ReleasePolicy, events: list[Event]) -> State:
    """Some workers run the candidate; after enough steps their acceptance and speed decide."""
    if refused := _refused(s, workers):
        return _reject(s, f"worker {refused} could not take it", counts=True)
    mine = [i for i in s.moved if i in workers]
    if len(mine) < max(1, round(policy.canary_share * len(workers))):
        return _move_one(s.model_copy(update={"settled_at": None, "base": {}}), workers)
    if not _settled(s, workers):
        return s
    if s.settled_at is None:
        return s.model_copy(update={"settled_at": now})
    if now < s.settled_at + policy.skip_seconds:
        return s
    if not s.base:
        return s.model_copy(update={"base": _counters(workers)})
    canary = _sum(workers[i].counters.since(s.base.get(i)) for i in mine)
    others = [w.counters.since(s.base.get(i)) for i, w in workers.items() if i not in s.moved]
    rest = _sum(others) if others else s.before
    comparable = rest.steps >= policy.min_steps
    if canary.steps < policy.min_steps or (others and not comparable):
        if now > s.settled_at + policy.canary_seconds:
            return _reject(s, "too little traffic to judge it", counts=False)
        return s
    verdict = {"tau": [rest.tau, canary.tau], "tokens_per_second": [rest.speed, canary.speed]}
    if comparable and (bad := _worse(canary, rest, policy)):
        return _reject(s, bad, counts=True)
    why = "as good as the rest on live traffic" if comparable else "nothing to compare with"
    events.append({"what": "rolling", "version": s.candidate, "why": why, **verdict})
    return s.model_copy(update={"phase": "rolling"})


def _rolling(s: State, now: float, workers: Mapping[str, Worker], policy: ReleasePolicy, events: list[Event]) -> State:
    """Every worker gets the candidate, the next one when all before it run it."""
    if refused := _refused(s, workers):
        return _reject(s, f"worker {refused} could not take it", counts=s.canary)
    if not _settled(s, workers):
        return s
    if any(i not in s.moved for i in workers):
        return _move_one(s, workers)
    events.append({"what": "promoted", "version": s.candidate, "from": s.active})
    return s.model_copy(
        update={
            "previous": s.active,
            "active": s.candidate,
            "candidate": None,
            "moved": (),
            "phase": "idle",
            "failures": 0,
            "quiet": {},
        }
    )


def _returning(
    s: State, now: float, workers: Mapping[str, Worker], policy: ReleasePolicy, events: list[Event]
) -> State:
    """Workers go back to the active version, the next one when the one before it is back."""
    away = [i for i in s.moved if i in workers]
    back = [i for i, w in workers.items() if i not in s.moved and w.version != s.active and w.refused != s.active]
    if away and not back and all(w.ready for i, w in workers.items() if i not in s.moved):
        return s.model_copy(update={"moved": tuple(i for i in s.moved if i != away[0])})
    if away or back:
        return s
    failures = s.failures + s.counts
    cooling = s.counts and failures >= policy.failures
    events.append({"what": "rolled_back", "version": s.candidate, "to": s.active, "why": s.reason})
    if cooling:
        events.append({"what": "cooldown", "seconds": policy.cooldown_seconds, "why": f"{failures} failures in a row"})
    pinned = s.pinned if s.pinned != s.candidate else None  # a pin that nobody can follow
    return s.model_copy(
        update={
            "candidate": None,
            "moved": (),
            "phase": "idle",
            "failures": 0 if cooling else failures,
            "cooldown_until": now + policy.cooldown_seconds if cooling else s.cooldown_until,
            "pinned": pinned,
            "quiet": {},
        }
    )


def _worse(canary: Counters, rest: Counters, policy: ReleasePolicy) -> str:
    """Why the canary is worse than the rest, empty if it is not."""
    if canary.tau < rest.tau * (1 - policy.tau_loss):
        return f"acceptance length {canary.tau:.2f} on the canary, {rest.tau:.2f} on the rest"
    if canary.speed < rest.speed * (1 - policy.speed_loss):
        return f"{canary.speed:.1f} tokens/s on the canary, {rest.speed:.1f} on the rest"
    return ""


def _reject(s: State, reason: str, *, counts: bool) -> State:
    assert s.candidate is not None
    s = _remember(s, s.candidate) if counts else s
    return s.model_copy(update={"phase": "returning", "reason": reason, "counts": counts})


def _abandon(s: State, reason: str) -> State:
    """Takes a candidate back because something else is wanted; no fault of its own."""
    if s.candidate is None or s.phase == "returning":
        return s
    return s.model_copy(update={"phase": "returning", "reason": reason, "counts": False})


def _remember(s: State, version: int) -> State:
    kept = tuple(n for n in s.rejected if n != version)
    waiting = None if s.waiting == version else s.waiting
    return s.model_copy(update={"rejected": (*kept, version)[-REMEMBERED:], "waiting": waiting})


def _refuse(s: State, said: Event, why: str, events: list[Event]) -> State:
    events.append({**said, "what": "ignored", "verb": said["what"], "because": why})
    return s


def _refused(s: State, workers: Mapping[str, Worker]) -> str:
    """A worker that was told to run the candidate and could not."""
    return next((i for i in s.moved if i in workers and workers[i].refused == s.candidate), "")


def _settled(s: State, workers: Mapping[str, Worker]) -> bool:
    """True if every live worker that was told to run the candidate does."""
    told = [workers[i] for i in s.moved if i in workers]
    return all(w.ready and w.version == s.candidate for w in told)


def _move_one(s: State, workers: Mapping[str, Worker]) -> State:
    """Tells one more ready worker to run the candidate, if all told before run it."""
    if not _settled(s, workers):
        return s
    following = sorted(i for i, w in workers.items() if i not in s.moved and w.ready)
    return s.model_copy(update={"moved": (*s.moved, following[0])}) if following else s


def _counters(workers: Mapping[str, Worker]) -> dict[str, Counters]:
    return {i: w.counters for i, w in workers.items()}


def _sum(counters: Any) -> Counters:
    return sum(counters, Counters())
