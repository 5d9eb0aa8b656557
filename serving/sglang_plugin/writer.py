"""The background thread that writes finished requests to the Redis stream.

Redis down, slow or frozen costs rollouts, which are counted, and never a response: the scheduler only appends to a
bounded queue that drops its oldest entry when it is full.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from adaflash.connect import connect
from adaflash.keys import Keys
from adaflash.rollouts import FIELD, Rollout, VersionSpan
from serving.sglang_plugin.telemetry import Telemetry

if TYPE_CHECKING:
    from serving.sglang_plugin.capture import Finished

logger = logging.getLogger(__name__)

QUEUE_LIMIT = 1024
STREAM_LIMIT = 50_000  # entries kept in Redis, about
_IDLE_SECONDS = 0.05
_BACKOFF_SECONDS = 1.0


class RolloutWriter(threading.Thread):
    """`offer` is called by the scheduler thread, everything else runs here."""

    def __init__(self, *, url: str, model: str, target: str, telemetry: Telemetry) -> None:
        super().__init__(name="adaflash-rollout-writer", daemon=True)
        self._queue: collections.deque[Finished] = collections.deque()
        self._redis = connect(url) if url else None
        self._keys = Keys(model)
        self._target = target
        self._telemetry = telemetry

    def offer(self, finished: Finished) -> None:
        """Takes one finished request without blocking."""
        if finished.tags.get("store") is False:
            self._telemetry.rollout("opted_out")
            return
        if self._redis is None:
            return
        if len(self._queue) >= QUEUE_LIMIT:
            self._queue.popleft()
            self._telemetry.rollout("dropped_queue")
        self._queue.append(finished)

    def run(self) -> None:
        """Writes what is queued, in batches, until the process ends."""
        while True:
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), 64))]
            records = self._pack(batch)
            if not batch:
                time.sleep(_IDLE_SECONDS)
            elif records and not self._write(records):
                self._telemetry.rollout("dropped_redis", len(records))
                time.sleep(_BACKOFF_SECONDS)
            else:
                self._telemetry.rollout("written", len(records))

    def _pack(self, batch: list[Finished]) -> list[bytes]:
        """The records of `batch`; one that contradicts itself costs only itself."""
        records = []
        for f in batch:
            try:
                records.append(self._record(f).pack())
            except Exception as error:
                # Type only: the message of a validation error would show token ids.
                logger.error("a rollout could not be recorded: %s", type(error).__name__)
                self._telemetry.rollout("invalid")
        return records

    def _write(self, records: list[bytes]) -> bool:
        assert self._redis is not None
        try:
            with self._redis.pipeline(transaction=False) as p:
                for record in records:
                    p.xadd(self._keys.rollouts, {FIELD: record}, maxlen=STREAM_LIMIT, approximate=True)
                p.execute()
        except RedisError as error:
            logger.warning("dropped %d rollouts: Redis: %s", len(records), error)
            return False
        return True

    def _record(self, f: Finished) -> Rollout:
        return Rollout(
            request_id=f.request_id,
            tenant=str(f.tags.get("tenant") or ""),
            domain=self._telemetry.domain(str(f.tags.get("domain") or "other")),
            target=self._target,
            versions=[VersionSpan(version=v, start=s, end=e) for v, s, e in f.versions],
            prompt_ids=f.prompt_ids,
            output_ids=f.output_ids,
            accepted=f.accepted,
            verified=f.verified,
            temperature=f.temperature,
            top_p=f.top_p,
            top_k=f.top_k,
            finish_reason=f.finish_reason,
            finished_at=f.finished_at,
        )
