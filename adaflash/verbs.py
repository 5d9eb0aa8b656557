"""What a command of a trainer or an operator does to the release state. Pure; what makes no sense is an event."""

from __future__ import annotations

from adaflash.fleet import REMEMBERED, Command, Event, State
from adaflash.versions import label


class Ignored(Exception):
    """The command changes nothing; the message says why."""


def obey(s: State, c: Command, now: float, events: list[Event]) -> State:
    """The state after one command. Each command leaves one event: done, or ignored with the reason."""
    said: Event = {"what": c.verb, "who": c.who, "why": c.why, "command": c.id}
    if c.version is not None:
        said["to"] = c.version
    try:
        after = _verbs[c.verb](s, c, now)
    except Ignored as why:
        events.append(said | {"what": "ignored", "verb": c.verb, "because": str(why)})
        after = s
    else:
        events.append(said)
    return after.but(applied=c.id) if c.id else after


def take_back(s: State, why: str, now: float, *, blame: bool = False, again: bool = False) -> State:
    """Every worker is to run the active version again. `blame`: the candidate is never tried again; `again`: it is."""
    assert s.candidate is not None
    if blame:
        s = reject(s, s.candidate)
    elif again and s.origin == "trainer" and s.waiting is None:
        s = s.but(waiting=s.candidate)
    return s.but(
        phase="returning",
        entered_at=now,
        moved={},
        pending="",
        excused=(),
        harmed=0,
        base={},
        settled_at=None,
        reason=why,
        blame=blame,
        pinned=None if s.pinned == s.candidate else s.pinned,
    )


def reject(s: State, version: int) -> State:
    """`version` is not taken from a trainer again."""
    kept = tuple(n for n in s.rejected if n != version)
    waiting = None if s.waiting == version else s.waiting
    return s.but(rejected=(*kept, version)[-REMEMBERED:], waiting=waiting)


def _propose(s: State, c: Command, now: float) -> State:
    version = _version(c)
    if version <= s.known:
        raise Ignored(f"{label(s.known)} was proposed already")
    return s.but(known=version, waiting=version)


def _promote(s: State, c: Command, now: float) -> State:
    version = _version(c)
    if s.pinned not in (None, version):
        raise Ignored("another version is pinned; unpin first")
    return _choose(s, version, c, now)


def _choose(s: State, version: int, c: Command, now: float) -> State:
    """An operator wants `version` everywhere, without a canary."""
    s = s.but(rejected=tuple(n for n in s.rejected if n != version), waiting=_unless(s.waiting, version))
    running = s.candidate if s.phase in ("canary", "rolling") else None
    rollback = running is not None and s.origin == "rollback"
    if running == version:  # it is on its way: no more comparing
        return s.but(
            phase="rolling", origin=s.origin if rollback else "operator", settled_at=None, base={}, forced=None
        )
    if running is not None and not rollback:  # a rollback ends first: nobody goes back to what it leaves
        s = take_back(s, f"{c.who} chose {label(version)}", now, again=True)
    return s.but(forced=None if version == s.active and not rollback else version, forced_origin="operator")


def _pin(s: State, c: Command, now: float) -> State:
    version = c.version if c.version is not None else s.active
    if version is None:
        raise Ignored("nothing is active; name a version")
    return _choose(s, version, c, now).but(pinned=version)


def _unpin(s: State, c: Command, now: float) -> State:
    if s.pinned is None:
        raise Ignored("nothing is pinned")
    return s.but(pinned=None)


def _reject(s: State, c: Command, now: float) -> State:
    running = s.candidate if s.phase in ("canary", "rolling") else None
    version = c.version if c.version is not None else running if running is not None else s.waiting
    if version is None:
        raise Ignored("there is no candidate")
    if version == running:
        if s.origin == "rollback":
            raise Ignored("a rollback is under way")
        return take_back(s, f"rejected by {c.who}: {c.why}", now, blame=True)
    if version == s.active:
        raise Ignored(f"{label(version)} is active; roll back instead")
    return reject(s, version).but(forced=_unless(s.forced, version), pinned=_unless(s.pinned, version))


def _rollback(s: State, c: Command, now: float) -> State:
    under_way = s.origin == "rollback" and s.phase == "rolling"
    if under_way or s.phase == "returning" or (s.forced is not None and s.forced_origin == "rollback"):
        raise Ignored("a rollback is under way")
    if s.phase in ("canary", "rolling"):
        return take_back(s, f"rolled back by {c.who}: {c.why}", now, blame=True).but(forced=None)
    if s.active is None or s.previous is None:
        raise Ignored("there is no previous version")
    if s.pinned is not None:
        raise Ignored(f"{label(s.pinned)} is pinned; unpin first")
    return reject(s, s.active).but(forced=s.previous, forced_origin="rollback")


def _pause(s: State, c: Command, now: float) -> State:
    if s.paused:
        raise Ignored("releases are paused already")
    return s.but(paused=True)


def _resume(s: State, c: Command, now: float) -> State:
    if not s.paused:
        raise Ignored("releases are not paused")
    return s.but(paused=False)


def _version(c: Command) -> int:
    if c.version is None:
        raise Ignored("a version is needed")
    return c.version


def _unless(version: int | None, unwanted: int) -> int | None:
    return None if version == unwanted else version


def _unreadable(s: State, c: Command, now: float) -> State:
    raise Ignored("this release of the software does not know such a command")


_verbs = {
    "unreadable": _unreadable,
    "propose": _propose,
    "promote": _promote,
    "reject": _reject,
    "rollback": _rollback,
    "pin": _pin,
    "unpin": _unpin,
    "pause": _pause,
    "resume": _resume,
}
