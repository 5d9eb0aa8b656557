"""Names of everything kept in Redis: one hash tag per model, so that each model's keys share a Redis Cluster slot."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Keys:
    """Key names of one served model."""

    model: str

    def _name(self, *parts: str) -> str:
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", self.model)
        return ":".join((f"adaflash:{{{slug}}}", *parts))

    @property
    def rollouts(self) -> str:
        """Stream of rollout records."""
        return self._name("rollouts")

    @property
    def release(self) -> str:
        """Hash: the release state as JSON, and its revision."""
        return self._name("release")

    @property
    def controller_lease(self) -> str:
        """String with expiry: who may change the release state."""
        return self._name("release", "lease")

    @property
    def trainer_lease(self) -> str:
        """String with expiry: who may propose versions."""
        return self._name("trainer", "lease")

    @property
    def swap_lock(self) -> str:
        """String with expiry: the worker that may stand still now."""
        return self._name("swap")

    @property
    def commands(self) -> str:
        """Stream of what trainer and operators ask the controller for."""
        return self._name("commands")

    @property
    def events(self) -> str:
        """Stream of everything that happened to versions and workers."""
        return self._name("events")

    @property
    def workers(self) -> str:
        """Set of worker ids that ever registered; the ids without a live entry are pruned on reading."""
        return self._name("workers")

    def worker(self, worker_id: str) -> str:
        """String with expiry: one worker's registration."""
        return self._name("worker", worker_id)

    @property
    def trainer(self) -> str:
        """String with expiry: the trainer's own status for dashboards and the demo."""
        return self._name("trainer")
