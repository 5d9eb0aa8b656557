"""Contract 4, the worker registry: each worker keeps one expiring entry in Redis; gateway and dashboards read them."""

from __future__ import annotations

import re
import time
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from redis import Redis

from adaflash.fleet import Refusal, Seen
from adaflash.keys import Keys
from adaflash.live import Counters

TTL_SECONDS = 15.0
State = Literal["starting", "ready", "swapping", "draining", "failed"]


class WorkerEntry(BaseModel):
    """What a worker says about itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    url: str
    model: str
    target: str
    state: State
    version: str
    checksum: str
    reason: str = ""
    at: float = 0.0
    capable: bool = Field(True, description="it has a drafter that can be exchanged")
    started: str = Field("", description="names the process")
    epoch: str = Field("", description="changes when the counters start again: with the process and with each version")
    refused: Refusal | None = None
    counters: Counters = Counters()

    def seen(self) -> Seen:
        """What the release controller needs of it."""
        match = re.fullmatch(r"v(\d+)", self.version)
        return Seen(
            version=int(match[1]) if match else None,
            ready=self.state == "ready",
            leaving=self.state == "draining",
            failed=self.state == "failed",
            capable=self.capable,
            started=self.started,
            epoch=self.epoch,
            refused=self.refused,
            counters=self.counters,
        )


class Registry:
    """Reads and writes the entries of one model."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self.redis, self.keys = redis, keys

    def announce(self, entry: WorkerEntry) -> None:
        """Writes `entry`; it vanishes by itself after TTL_SECONDS without another call."""
        body = entry.model_copy(update={"at": time.time()}).model_dump_json()
        with self.redis.pipeline(transaction=False) as p:
            p.set(self.keys.worker(entry.id), body, px=int(TTL_SECONDS * 1000))
            p.sadd(self.keys.workers, entry.id)
            p.execute()

    def live(self) -> list[WorkerEntry]:
        """All entries that have not expired, by id; forgets the ids of those that have."""
        members: Any = self.redis.smembers(self.keys.workers)
        ids = sorted(m.decode() if isinstance(m, bytes) else m for m in members)
        if not ids:
            return []
        bodies: Any = self.redis.mget([self.keys.worker(i) for i in ids])
        gone = [i for i, body in zip(ids, bodies, strict=True) if body is None]
        if gone:
            self.redis.srem(self.keys.workers, *gone)
        entries = []
        for body in bodies:
            if body is not None:
                try:
                    entries.append(WorkerEntry.model_validate_json(body))
                except ValidationError:
                    continue  # written by a newer release; not ours to route to
        return entries
