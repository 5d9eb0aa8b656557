"""Shortcuts for tests that need a release state without waiting for a controller."""

from __future__ import annotations

from redis import Redis

from adaflash.keys import Keys
from adaflash.release import Fenced, Lease, Release


def activate(client: Redis, keys: Keys, number: int) -> None:
    """Makes `number` the version that every worker should run, as the controller does when it promotes.

    Takes the lease from a controller that has it, which is fenced until the lease is free again.
    """
    release = Release(client, keys, "test")
    fence = _take(client, release.controller_lease, keys.controller_lease)
    state = release.state()
    after = state.but(active=number, previous=state.active, attempt=state.attempt + 1, known=max(state.known, number))
    assert release.commit(state, after, [{"what": "promoted", "to": number, "why": "test"}], fence)
    release.controller_lease.let_go()


def _take(client: Redis, lease: Lease, key: str) -> int:
    while True:
        client.delete(key)
        try:
            return lease.hold(5)
        except Fenced:  # the controller was quicker
            continue
