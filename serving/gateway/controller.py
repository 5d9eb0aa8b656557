"""The release controller's loop: reads workers, commands and state in Redis, lets `adaflash.controller` decide, writes.

Runs as a thread in every gateway; a lease decides which one acts. All of them follow the state, since the gateway sends
a canary only its share of the requests.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Any

from prometheus_client import Counter, Gauge
from redis.exceptions import RedisError

from adaflash.controller import adopt, renewed, step
from adaflash.fleet import ReleasePolicy, State
from adaflash.registry import TTL_SECONDS, Registry
from adaflash.release import Fenced, ForeignState, Release

logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0
LEASE_SECONDS = 10.0
GIVE_WAY_SECONDS = 15.0  # after a fault: long enough for another gateway to take over

ACTING = Gauge("adaflash_release_controller", "1 in the gateway that decides about releases.")
PHASE = Gauge("adaflash_release_phase", "1 for the phase of the release.", ["phase"])
VERSIONS = Gauge("adaflash_release_version", "Drafter version by role, -1 for none.", ["role"])
EVENTS = Counter("adaflash_release_events_total", "Decisions of this controller.", ["what"])
PAUSED = Gauge("adaflash_release_paused", "1 while an operator holds releases back.")
_PHASES = ("idle", "canary", "rolling", "returning")
_COUNTED = ("canary", "rolling", "promoted", "rolled_back", "cooldown", "excused", "adopted", "ignored")
for _what in _COUNTED:
    EVENTS.labels(_what)


class Controller:
    """`state` is the last one seen, for whoever routes requests; `tick` is one round."""

    def __init__(self, release: Release, registry: Registry, policy: ReleasePolicy) -> None:
        self.release, self.registry, self.policy = release, registry, policy
        self.state = State()
        # Until then the registry may lack workers that live; a fresh controller knows nothing of the time before.
        self._uncertain_until = time.monotonic() + TTL_SECONDS
        self._acting, self._fence, self._looked_at = False, 0, -math.inf

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
                self._rest()  # another gateway's controller acts
            except RedisError as error:
                self._rest()
                self._uncertain_until = time.monotonic() + TTL_SECONDS
                logger.warning("release state not readable: %s", error)
            except ForeignState as error:
                self._give_way()
                logger.error("%s: no releases until it is deleted or the other one runs", error)
                stop.wait(GIVE_WAY_SECONDS)
            except Exception:
                # A fault must neither end the thread nor keep another gateway's controller, perhaps a newer one, out.
                logger.exception("release controller")
                self._give_way()
                stop.wait(GIVE_WAY_SECONDS)
        self._give_way()

    def _rest(self) -> None:
        self._acting = False
        ACTING.set(0)

    def _give_way(self) -> None:
        self._rest()
        try:
            self.release.controller_lease.let_go()
        except RedisError as error:
            logger.warning("controller lease not given back, it expires by itself: %s", error)

    def tick(self) -> None:
        """Follows the state and, holding the lease, changes it. Raises Fenced while another controller acts."""
        stored = self.release.stored()
        before = stored or State()
        self._show(before)
        fence = self.release.controller_lease.hold(LEASE_SECONDS)
        ACTING.set(1)
        if fence != self._fence:  # the lease was away meanwhile: Redis may have stood still, or this process
            self._fence, self._uncertain_until = fence, time.monotonic() + TTL_SECONDS
        if self._uncertain():
            self._acting = False  # and once it is over, as after any time in which nobody looked
            return
        workers = {e.id: e.seen() for e in self.registry.live()}
        now, adopted = self._now(), []
        state = before if self._acting else renewed(before, now, workers, now - self._looked_at)
        if stored is None:  # never released, or lost with Redis
            state = adopt(workers, self.release.answered())
            adopted = (
                [{"what": "adopted", "to": state.active, "why": "most workers run it"}]
                if state.active is not None
                else []
            )
        after, events = step(state, now, workers, self.release.commands(state.applied), self.policy)
        events = [*adopted, *events]
        if after != before and not self.release.commit(before, after, events, fence):
            return
        self._acting, self._looked_at = True, now
        for event in events:
            EVENTS.labels(event["what"] if event["what"] in _COUNTED else "command").inc()
            logger.info("release: %s", _words(event))
        self._show(after)

    def _now(self) -> float:
        """Redis' clock: controllers on several hosts share the state's time limits."""
        seconds, micros = self.release.redis.time()
        return float(seconds) + float(micros) / 1e6

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
