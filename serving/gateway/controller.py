"""The release controller's loop: reads workers, commands and state in Redis, lets `adaflash.controller` decide, writes.

Runs as a thread in every gateway; a lease decides which one acts. All of them follow the state, since the gateway sends
a canary only its share of the requests.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from prometheus_client import Counter, Gauge
from redis.exceptions import RedisError

from adaflash.controller import adopt, step
from adaflash.fleet import ReleasePolicy, State
from adaflash.registry import TTL_SECONDS, Registry
from adaflash.release import Fenced, ForeignState, Release

logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0
LEASE_SECONDS = 10.0

ACTING = Gauge("adaflash_release_controller", "1 in the gateway that decides about releases.")
PHASE = Gauge("adaflash_release_phase", "1 for the phase of the release.", ["phase"])
VERSIONS = Gauge("adaflash_release_version", "Drafter version by role, -1 for none.", ["role"])
EVENTS = Counter("adaflash_release_events_total", "Decisions of this controller.", ["what"])
PAUSED = Gauge("adaflash_release_paused", "1 while an operator holds releases back.")
_PHASES = ("idle", "canary", "rolling", "returning")
_COUNTED = ("canary", "rolling", "promoted", "rolled_back", "cooldown", "excused", "ignored")
for _what in _COUNTED:
    EVENTS.labels(_what)


class Controller:
    """`state` is the last one seen, for whoever routes requests; `tick` is one round."""

    def __init__(self, release: Release, registry: Registry, policy: ReleasePolicy) -> None:
        self.release, self.registry, self.policy = release, registry, policy
        self.state = State()
        self._uncertain_until = 0.0  # monotonic; until then the registry may lack workers that live

    def start(self, stop: threading.Event) -> threading.Thread:
        """Runs until `stop`."""
        thread = threading.Thread(target=self._run, args=(stop,), name="release-controller", daemon=True)
        thread.start()
        return thread

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(TICK_SECONDS):
            try:
                self.tick()
            except Fenced:
                ACTING.set(0)  # another gateway's controller acts
            except RedisError as error:
                ACTING.set(0)
                self._uncertain_until = time.monotonic() + TTL_SECONDS
                logger.warning("release state not readable: %s", error)
            except ForeignState as error:
                ACTING.set(0)
                logger.error("%s: no releases until it is deleted or the other one runs", error)
                stop.wait(TTL_SECONDS)
            except Exception:
                # A fault in a decision must not end the gateway's thread: what runs stays, and the next tick sees anew.
                logger.exception("release controller")
        try:
            self.release.controller_lease.let_go()
        except RedisError as error:
            logger.warning("controller lease not given back, it expires by itself: %s", error)

    def tick(self) -> None:
        """Follows the state and, holding the lease, changes it. Raises Fenced while another controller acts."""
        before = self.release.stored()
        self._show(before or State())
        fence = self.release.controller_lease.hold(LEASE_SECONDS)
        ACTING.set(1)
        if self._uncertain():
            return
        workers = {e.id: e.seen() for e in self.registry.live()}
        if before is None:
            before = adopt(workers)  # never released, or lost with Redis
        commands = self.release.commands(before.applied)
        after, events = step(before, time.time(), workers, commands, self.policy)
        if after == before or not self.release.commit(before, after, events, fence):
            return
        for event in events:
            EVENTS.labels(event["what"] if event["what"] in _COUNTED else "command").inc()
            logger.info("release: %s", _words(event))
        self._show(after)

    def _uncertain(self) -> bool:
        """True while workers that live may be missing from the registry: Redis was away, or is new."""
        info: Any = self.release.redis.info("server")
        return float(info["uptime_in_seconds"]) < TTL_SECONDS or time.monotonic() < self._uncertain_until

    def _show(self, s: State) -> None:
        self.state = s
        for phase in _PHASES:
            PHASE.labels(phase).set(s.phase == phase)
        for role in ("active", "previous", "candidate", "waiting", "pinned"):
            number = getattr(s, role)
            VERSIONS.labels(role).set(-1 if number is None else number)
        PAUSED.set(s.paused)

    def trial(self) -> tuple[frozenset[str], float]:
        """Workers on trial, and the share of the requests that they may get."""
        s = self.state
        on_trial = frozenset(s.moved) if s.phase == "canary" else frozenset()
        return on_trial, self.policy.canary_traffic


def _words(event: dict[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in event.items() if v not in (None, ""))
