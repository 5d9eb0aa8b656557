"""Which workers there are and which gets the next request; fed from the registry by a background task.

Redis down or slow: the last known workers stay in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import Gauge
from redis.exceptions import RedisError

from adaflash.registry import TTL_SECONDS, Registry, WorkerEntry

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0
ROUTABLE = ("ready", "swapping")  # a swap pauses for milliseconds; its requests wait
WORKERS = Gauge("adaflash_gateway_workers", "Workers the gateway may route to.")


class Workers:
    """Least-outstanding choice over the routable workers. `trial`: see `Controller.trial`."""

    def __init__(self, registry: Registry, trial: Callable[[], tuple[frozenset[str], float]]) -> None:
        self._registry, self._trial = registry, trial
        self._known: dict[str, WorkerEntry] = {}
        self._outstanding: Counter[str] = Counter()
        self._outage = -TTL_SECONDS

    async def follow(self) -> None:
        """Refreshes until cancelled."""
        while True:
            try:
                self._take(await asyncio.to_thread(self._registry.live))
            except RedisError as error:
                self._outage = time.monotonic()
                logger.warning("registry not readable, keeping %d workers: %s", len(self._known), error)
            await asyncio.sleep(REFRESH_SECONDS)

    def _take(self, live: list[WorkerEntry]) -> None:
        """Replaces what is known; after an outage, when all entries have expired, keeps those not seen again yet."""
        settled = time.monotonic() - self._outage > TTL_SECONDS
        known = {} if settled else dict(self._known)
        for entry in live:
            known[entry.url] = entry
        self._known = {u: e for u, e in known.items() if e.state in ROUTABLE}
        WORKERS.set(len(self._known))

    def choose(self, tried: set[str]) -> str | None:
        """The URL with the fewest requests in flight that is not in `tried`; None if there is none.

        Workers that try a candidate get their share of the requests and no more.
        """
        on_trial, share = self._trial()
        urls = [u for u in self._known if u not in tried]
        trying = [u for u in urls if self._known[u].id in on_trial]
        if trying and len(trying) < len(urls):
            chosen = random.random() < min(share, len(trying) / len(urls))
            urls = trying if chosen else [u for u in urls if u not in trying]
        return min(urls, key=lambda u: (self._outstanding[u], u)) if urls else None

    @contextlib.contextmanager
    def busy(self, url: str) -> Iterator[None]:
        """Counts one request on `url` while it runs."""
        self._outstanding[url] += 1
        try:
            yield
        finally:
            self._outstanding[url] -= 1
