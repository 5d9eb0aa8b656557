"""Which workers a version has failed, for the release controller: they end with it, cannot take it, or take too long.

Pure, as the controller is. The candidate is looked at while it moves, the active version for a while after that.
"""

from __future__ import annotations

from adaflash.fleet import Event, ReleasePolicy, Seen, State, Workers
from adaflash.verbs import reject, take_back
from adaflash.versions import label


def watch(s: State, now: float, workers: Workers, events: list[Event]) -> State:
    """A version that passed its trial and then ends workers goes back at once: they may never be ready with it."""
    if not s.watched or s.active is None:
        return s
    if s.previous is None or s.pinned == s.active or now > s.watch_until:
        return s.but(watched={})
    left = {i: p for i, p in s.watched.items() if i not in s.moved and not (_is(workers, i, p) and workers[i].leaving)}
    ended = sorted(i for i, p in left.items() if not _is(workers, i, p) or workers[i].failed)
    # An operator's choice that is under way ends first.
    chosen = s.candidate == s.previous or (s.phase in ("canary", "rolling") and s.origin != "trainer")
    if chosen or not ended or len(ended) < min(2, len(left)):
        return s if left == s.watched else s.but(watched=left)
    harmful, why = s.active, f"workers {', '.join(ended)} ended soon after they took it"
    if s.phase in ("canary", "rolling"):
        s = take_back(s, f"{label(harmful)} goes back first", now, again=True)
    events.append({"what": "rolled_back", "from": harmful, "to": s.previous, "why": why})
    return reject(s, harmful).but(active=s.previous, previous=None, watched={})


def check_moved(s: State, now: float, workers: Workers, policy: ReleasePolicy, events: list[Event]) -> State:
    """Workers that were told to run the candidate: whether they do, left on purpose, or failed."""
    for i, started in s.moved.items():
        w = workers.get(i)
        if w is not None and w.leaving:
            s = forget(s, i)
            continue
        if i == s.pending and w is not None:
            if _took_it(s, started, w):
                s = s.but(pending="")
            elif not w.ready and not s.changing:
                s = s.but(changing=True, told_at=now)
        if not (trouble := _trouble(s, i, started, w, now, policy)):
            continue
        why, harm, fault = trouble
        if s.origin == "trainer" and fault:
            return take_back(s, why, now, blame=True)
        # What only failed to reach one worker may suit the others, and an operator's choice is not vetoed by one: it
        # keeps trying. By all of them it is, or by two that it ended; a rollback by none.
        events.append({"what": "excused", "to": s.candidate, "worker": i, "why": why})
        s = forget(s, i).but(excused=(*s.excused, i), harmed=s.harmed + harm)
        if s.harmed > 1 and s.origin != "rollback":
            return take_back(s, f"{s.harmed} workers ended with {label(s.candidate or 0)}", now)
    return s


def _took_it(s: State, started: str, w: Seen) -> bool:
    return w.ready and not w.failed and w.started == started and w.version == s.candidate


def _trouble(
    s: State, i: str, started: str, w: Seen | None, now: float, policy: ReleasePolicy
) -> tuple[str, bool, bool] | None:
    """Why a worker counts as failed by the candidate, whether that ended it, whether the candidate is to blame."""
    name = label(s.candidate if s.candidate is not None else -1)
    if w is None:
        return f"worker {i} was lost with {name}", True, True
    if w.failed:
        return f"worker {i} failed with {name}", True, True
    if w.started != started:
        return f"worker {i} ended and started again with {name}", True, True
    if w.refused is not None and (w.refused.version, w.refused.attempt) == (s.candidate, s.attempt):
        return f"worker {i} could not take {name}: {w.refused.why}", False, w.refused.fault
    if i == s.pending and s.changing and now > s.told_at + policy.change_seconds:
        return f"worker {i} did not end its change to {name} within {policy.change_seconds:.0f} s", False, True
    if i == s.pending and now > s.told_at + policy.fetch_seconds:  # it may wait for its turn, too
        return f"worker {i} did not get {name} within {policy.fetch_seconds:.0f} s", False, False
    return None


def forget(s: State, i: str) -> State:
    """A moved worker that does not count any more; what was compared with it does not either."""
    moved = {k: v for k, v in s.moved.items() if k != i}
    return s.but(moved=moved, pending="" if s.pending == i else s.pending, settled_at=None, base={})


def _is(workers: Workers, i: str, started: str) -> bool:
    """True if worker `i` lives and is still that process."""
    return i in workers and workers[i].started == started
