"""The agent's two threads beside its main one: what the worker says of itself in the registry, and what it counts.

Neither may end or wait for anything long: a worker whose entry expires is taken out of rotation.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable

from redis.exceptions import RedisError

from adaflash.live import Counters
from adaflash.registry import Registry, WorkerEntry
from serving.worker.client import Engine
from serving.worker.counting import counters
from serving.worker.turn import SwapLock

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 2.0
COUNT_SECONDS = 2.0


class Counting:
    """The engine's counters since the running version began, read by a thread of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._from: Counters | None = Counters()  # None: the next reading is where the version began
        self.shown = (uuid.uuid4().hex[:12], Counters())  # epoch and counters, exchanged together

    def afresh(self) -> None:
        """A new version has just begun to run."""
        self._from = None

    def read(self) -> None:
        """Reads once; an engine that does not answer leaves what was read last."""
        since = self._from
        total = counters(self._engine.metrics())
        if since is None and self._from is None:
            self._from = since = total
            self.shown = (uuid.uuid4().hex[:12], Counters())
        elif since is not None and since is self._from:
            self.shown = (self.shown[0], total - since)


class Pulse:
    """Starts both threads. `entry`: what the worker says now."""

    def __init__(
        self, registry: Registry, turn: SwapLock, counting: Counting, entry: Callable[[], WorkerEntry]
    ) -> None:
        self._registry, self._turn, self._counting, self._entry = registry, turn, counting, entry
        self._stopped, self._writing = threading.Event(), threading.Lock()
        self._threads = [
            threading.Thread(target=self._every, args=(HEARTBEAT_SECONDS, self._beat), name="heartbeat", daemon=True),
            threading.Thread(target=self._every, args=(COUNT_SECONDS, counting.read), name="counting", daemon=True),
        ]

    def start(self) -> None:
        for t in self._threads:
            t.start()

    def announce(self) -> None:
        """Writes the entry now."""
        with self._writing:
            try:
                self._registry.announce(self._entry())
            except RedisError as error:
                logger.warning("worker entry not written: %s", error)

    def stop(self) -> None:
        """Nothing is written any more once this returns, but by `announce`."""
        self._stopped.set()
        self._threads[0].join(10)

    def _beat(self) -> None:
        self.announce()
        try:
            if not self._turn.renew():
                logger.error("the swap lock was lost while this worker held it: another one may stand still too")
        except RedisError as error:
            logger.warning("swap lock not renewed: %s", error)

    def _every(self, seconds: float, work: Callable[[], None]) -> None:
        while True:
            try:
                work()
            except Exception as error:
                # Whatever an engine's page or a broken connection holds: serving goes on, and so does the thread.
                logger.warning("%s: %s: %s", threading.current_thread().name, type(error).__name__, error)
            if self._stopped.wait(seconds):
                return
