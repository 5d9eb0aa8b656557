"""Ray: a lean local cluster or the one that `RAY_ADDRESS` names, and the trainer's two actors behind plain calls."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import RayActorError

from trainer.config import TrainerConfig
from trainer.gate import Verdict
from trainer.learner import Learner
from trainer.reader import Reader, Round

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 150 << 20
_NICENESS = 10
_POLL_SECONDS = 0.5


class ActorLost(RuntimeError):
    """An actor died in the middle of a call; Ray restarts it."""


@contextlib.contextmanager
def started() -> Iterator[None]:
    """Connects to `RAY_ADDRESS`, or runs a cluster of this one process tree without dashboard."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if os.environ.get("RAY_ADDRESS"):
        ray.init(logging_level=logging.ERROR)
    else:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            logging_level=logging.ERROR,
        )
    try:
        yield
    finally:
        ray.shutdown()


class Actors:
    """Reader and learner. A dead actor raises ActorLost from the call; `recover` makes both consistent again."""

    def __init__(self, config: TrainerConfig, active: int, fingerprint: str) -> None:
        self.active = active
        self._config, self._fingerprint = config, fingerprint
        # Spinning OpenMP threads would starve whatever shares the machine.
        env = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
        options = {"runtime_env": {"env_vars": env}, "max_restarts": -1}
        self._reader = (
            ray.remote(Reader).options(num_cpus=0, **options).remote(config.redis_url, config.served_name, fingerprint)
        )
        self._options = options
        self._learner = self._start_learner()

    def _start_learner(self) -> Any:
        options = self._options | {"max_restarts": 0}  # a restart has to learn the active version anew: see recover
        niceness = 0 if os.environ.get("RAY_ADDRESS") else _NICENESS
        learner = (
            ray.remote(Learner)
            .options(num_cpus=1, **options)
            .remote(self._config, self.active, self._fingerprint, niceness)
        )
        rounds, steps = self._call(learner.progress)
        if rounds:
            logger.info("resumed after round %d, step %d", rounds, steps)
        return learner

    def recover(self) -> None:
        """A new learner from the durable state; the reader hands out again what was not acknowledged."""
        ray.kill(self._learner)
        self._learner = self._start_learner()
        self._call(self._reader.rewind)

    def _call(self, method: Any, *args: Any) -> Any:
        try:
            return ray.get(method.remote(*args))
        except RayActorError as error:
            raise ActorLost(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error

    def collect(self, stop: threading.Event) -> Round | None:
        """The next round, None when `stop` was set first."""
        r = self._config.round
        call = self._reader.collect.remote(r.rollouts, r.max_wait_seconds)
        while not stop.is_set():
            done, _ = ray.wait([call], timeout=_POLL_SECONDS)
            if done:
                try:
                    found: Round = ray.get(call)
                    return found
                except RayActorError as error:
                    raise ActorLost(str(error).splitlines()[0]) from error
        return None

    def acknowledge(self, entries: list[str]) -> None:
        """See Reader.acknowledge."""
        self._call(self._reader.acknowledge, entries)

    def train(self, rollouts: list[Any]) -> dict[str, float]:
        """See Learner.train."""
        return self._call(self._learner.train, rollouts)

    def evaluate(self) -> Verdict:
        """See Learner.evaluate."""
        return self._call(self._learner.evaluate)

    def save(self) -> None:
        """See Learner.save."""
        self._call(self._learner.save)

    def publish(self, verdict: Verdict, training: dict[str, float]) -> int:
        """See Learner.publish; remembers the number for a learner that has to be started again."""
        self.active = int(self._call(self._learner.publish, verdict, training))
        return self.active
