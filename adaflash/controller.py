"""How a drafter version gets to the fleet and back: the release controller's decisions, as a pure state machine.

proposed -> canary workers -> compared with the rest on live traffic -> everyone, one worker at a time -> active, or
everyone back to the active version. No I/O and no clock here: `step` takes what was seen and asked and returns the next
state. Two controllers that step from the same state do no harm: only one of them can write (`adaflash.release`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from adaflash.blame import check_moved, forget, watch
from adaflash.fleet import Command, Event, Mark, ReleasePolicy, Seen, State, Workers
from adaflash.live import Comparison, Counters, compare
from adaflash.verbs import obey, take_back
from adaflash.versions import label


def step(
    state: State, now: float, workers: Workers, commands: Sequence[Command], policy: ReleasePolicy
) -> tuple[State, list[Event]]:
    """The next state and what happened. `workers`: all live ones, by id; never call it with less than is known."""
    events: list[Event] = []
    s = state
    for command in commands:
        s = obey(s, command, now, events)
    usable = {i: w for i, w in workers.items() if w.capable and not w.leaving}
    s = watch(_note_company(s, now, workers), now, workers, events)
    if s.phase in ("canary", "rolling"):
        s = check_moved(s, now, workers, policy, events)
    match s.phase:
        case "idle":
            s = _idle(s, now, usable, policy, events)
        case "canary":
            s = _canary(s, now, usable, policy, events)
        case "rolling":
            s = _rolling(s, now, usable, policy, events)
        case "returning":
            s = _returning(s, now, usable, policy, events)
    return s, events


def adopt(workers: Workers, answered: str = "0-0") -> State:
    """A state for a fleet whose state was lost: what most workers run is active.

    `answered`: the last command that was answered; those up to it are not obeyed again.
    """
    running = [w.version for w in workers.values() if w.version is not None]
    if not running:
        return State(applied=answered)
    active = max(set(running), key=lambda v: (running.count(v), -v))
    return State(active=active, known=max(running), applied=answered)


def renewed(s: State, now: float, workers: Workers, unseen: float = math.inf) -> State:
    """The state for a controller that takes over after up to `unseen` seconds in which nobody looked.

    No time limit ran then, and workers that ended meanwhile may have been stopped by anybody: they say nothing.
    """
    for i in [i for i, started in s.moved.items() if i not in workers or workers[i].started != started]:
        s = forget(s, i)
    return s.but(
        entered_at=min(now, s.entered_at + unseen),
        told_at=min(now, s.told_at + unseen),
        alone_since=None if s.alone_since is None else now,
        watched={i: workers[i].started for i in s.watched if i in workers},
    )


def _note_company(s: State, now: float, workers: Workers) -> State:
    """Keeps since when there is a single worker; one that leaves or starts is company."""
    alone = sum(w.capable for w in workers.values()) <= 1
    if alone == (s.alone_since is not None):
        return s
    return s.but(alone_since=now if alone else None)


def _idle(s: State, now: float, usable: Workers, policy: ReleasePolicy, events: list[Event]) -> State:
    """Nothing moves; an operator's choice comes before a proposal."""
    if s.paused and not (s.forced is not None and s.forced_origin == "rollback"):
        return s
    alone_for = now - s.alone_since if s.alone_since is not None else 0.0
    lone = len(usable) == 1 and s.alone_since is not None
    if s.forced is not None:
        s, choice, origin = s.but(forced=None), s.forced, s.forced_origin
    elif s.waiting is not None and s.waiting in (s.active, *s.rejected):
        return s.but(waiting=None)
    elif s.waiting is None or s.pinned is not None or now < s.cooldown_until:
        return s
    elif s.active is None or len(usable) > 1 or (lone and alone_for >= policy.lone_seconds):
        s, choice, origin = s.but(waiting=None), s.waiting, "trainer"
    else:
        return s
    if choice == s.active:
        return s
    if s.active is None or not usable:  # nothing to compare with; workers take it when they see it
        events.append({"what": "promoted", "to": choice, "from": s.active, "why": _why_at_once(s)})
        return s.but(previous=_previous(s, origin), active=choice)
    compared = origin == "trainer" and not lone
    unseen = {"why": "a single worker has no rest to compare with: the gate decided"} if origin == "trainer" else {}
    events.append(
        {"what": "canary" if compared else "rolling", "to": choice, "from": s.active, "origin": origin}
        | ({} if compared else unseen)
    )
    return s.but(
        phase="canary" if compared else "rolling",
        candidate=choice,
        origin=origin,
        compared=compared or origin != "trainer",
        attempt=s.attempt + 1,
        entered_at=now,
        moved={},
        pending="",
        excused=(),
        harmed=0,
        settled_at=None,
        base={},
    )


def _canary(s: State, now: float, usable: Workers, policy: ReleasePolicy, events: list[Event]) -> State:
    """Some workers run the candidate; after enough steps their acceptance and speed decide."""
    if now > s.entered_at + policy.canary_seconds:
        return take_back(s, "too little traffic to judge it", now)
    if s.pending:
        return s
    able = len(usable.keys() - s.excused)
    if s.excused and not able:
        return take_back(s, f"no worker could take {label(s.candidate or 0)}", now, again=True)
    if len(s.moved) < min(max(1, int(policy.canary_share * len(usable))), len(usable) - 1, able):
        return _move_one(s, now, usable)
    if not s.moved:
        return s  # one worker is left: nothing to compare with, and nothing is rolled out unseen
    if s.settled_at is None:
        return s.but(settled_at=now)
    if now < s.settled_at + policy.skip_seconds:
        return s
    others = {i: w for i, w in usable.items() if i not in s.moved and w.ready}
    # A worker that is behind must not make the candidate look good; where nobody can run the active one, all count.
    rest = {i: w for i, w in others.items() if w.version == s.active} or others
    mine = {i: usable[i] for i in s.moved if i in usable}
    if any(not _same(s, i, w) for i, w in mine.items()) or not any(_same(s, i, w) for i, w in rest.items()):
        return s.but(base={i: Mark(epoch=w.epoch, counters=w.counters) for i, w in (mine | rest).items()})
    found = compare(_since(s, mine.items()), _since(s, rest.items()), policy)
    if found.outcome == "bad":
        return take_back(s, found.why, now, blame=True)
    if found.outcome == "good":
        events.append({"what": "rolling", "to": s.candidate, "from": s.active, "why": found.why} | _figures(found))
        return s.but(phase="rolling", entered_at=now, base={}, settled_at=None)
    return s


def _rolling(s: State, now: float, usable: Workers, policy: ReleasePolicy, events: list[Event]) -> State:
    """Every worker gets the candidate, the next one when the one before it runs it."""
    if not s.compared and len(usable) > 1:
        events.append({"what": "canary", "to": s.candidate, "from": s.active, "why": "the lone worker has company"})
        return s.but(phase="canary", compared=True, entered_at=now)
    if s.pending:
        return s
    left = [i for i in usable if i not in s.moved and i not in s.excused]
    if [i for i in left if usable[i].ready]:
        return _move_one(s, now, usable)
    patience = max(s.told_at, s.entered_at) + policy.change_seconds
    if not s.moved and s.origin != "rollback" and s.excused and (not left or now >= patience):
        return take_back(s, f"no worker could take {label(s.candidate or 0)}", now, again=True)
    if _held_back(s) or (left and now < patience) or (not s.moved and s.origin == "trainer"):
        return s
    # Where none is ready, the active version may be why: an operator's choice is what they are to start with.
    events.append(
        {"what": "promoted", "to": s.candidate, "from": s.active, "origin": s.origin}
        | ({} if s.moved else {"why": "no worker is ready, which the active version may be why"})
    )
    return s.but(
        phase="idle",
        previous=_previous(s, s.origin),
        active=s.candidate,
        watched={i: usable[i].started for i in s.moved if i in usable},
        watch_until=now + policy.watch_seconds,
        candidate=None,
        moved={},
        excused=(),
        harmed=0,
        failures=0,
    )


def _returning(s: State, now: float, usable: Workers, policy: ReleasePolicy, events: list[Event]) -> State:
    """Workers go back by themselves, one at a time; those that cannot are named and go on trying."""
    behind = sorted(i for i, w in usable.items() if not w.ready or (s.active is not None and w.version != s.active))
    if (behind or not usable) and now < s.entered_at + policy.change_seconds:
        return s
    failures = s.failures + s.blame
    cooling = s.blame and failures >= policy.failures
    again = s.waiting == s.candidate  # what kept it from its workers may be over in a while
    pause = policy.cooldown_seconds if cooling else policy.change_seconds if again else 0.0
    events.append(
        {"what": "rolled_back", "from": s.candidate, "to": s.active, "why": s.reason}
        | ({"behind": behind} if behind else {})
    )
    if cooling:
        events.append({"what": "cooldown", "seconds": policy.cooldown_seconds, "why": f"{failures} failures in a row"})
    return s.but(
        phase="idle",
        candidate=None,
        failures=0 if cooling else failures,
        cooldown_until=max(s.cooldown_until, now + pause),
    )


def _held_back(s: State) -> bool:
    """A pause lets nothing go forward; a rollback goes back."""
    return s.paused and s.origin != "rollback"


def _move_one(s: State, now: float, usable: Workers) -> State:
    """Tells one more worker to run the candidate; only called while none is pending."""
    ready = sorted(i for i, w in usable.items() if i not in s.moved and i not in s.excused and w.ready)
    if not ready or _held_back(s):
        return s
    changed = {**s.moved, ready[0]: usable[ready[0]].started}
    return s.but(moved=changed, pending=ready[0], changing=False, told_at=now, settled_at=None, base={})


def _since(s: State, workers: Iterable[tuple[str, Seen]]) -> Counters:
    """What workers did since the comparison began; those that changed or joined in between do not count."""
    return sum((w.counters - s.base[i].counters for i, w in workers if _same(s, i, w)), Counters())


def _same(s: State, i: str, w: Seen) -> bool:
    """True if the worker was there when the comparison began and has counted on since."""
    return i in s.base and s.base[i].epoch == w.epoch


def _previous(s: State, origin: str) -> int | None:
    """What a rollback would go to; after a rollback nothing, or the next one would undo it."""
    return None if origin == "rollback" else s.active


def _why_at_once(s: State) -> str:
    return "first version" if s.active is None else "no worker runs"


def _figures(c: Comparison) -> Event:
    speed = {} if c.speed is None else {"speed": round(c.speed, 3)}
    return {"tau": round(c.tau, 3), "tau_rest": round(c.tau_rest, 3)} | speed
