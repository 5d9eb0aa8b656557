"""Ray: a lean local cluster or the one that `RAY_ADDRESS` names, and the trainer's two actors behind plain calls."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from redis.exceptions import RedisError

from adaflash.target import target_shape
from adaflash.versions import VersionError
from trainer.config import TrainerConfig
from trainer.gate import Verdict
from trainer.learner import Learner
from trainer.reader import Reader, Round

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 150 << 20
_NICENESS = 10
_POLL_SECONDS = 0.5


class ActorLost(RuntimeError):
    """An actor died in the middle of a call; `Actors.recover` starts a new one."""


class RoundFailed(RuntimeError):
    """The learner raised; its rollouts are suspect and its weights may be half updated."""


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
    """Reader and learner behind plain calls. After ActorLost or RoundFailed the caller has to `recover`."""

    def __init__(self, config: TrainerConfig, active: int, fingerprint: str) -> None:
        self.active = active
        self._config, self._fingerprint = config, fingerprint
        self._unacknowledged: list[str] = []
        self._in_hand: list[str] = []
        # Spinning OpenMP threads would starve whatever shares the machine.
        env = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
        self._options: dict[str, Any] = {"runtime_env": {"env_vars": env}}
        vocabulary = target_shape(config.model).vocab_size
        where = (config.redis_url, config.served_name, fingerprint, vocabulary, config.round.max_sequence)
        self._reader = ray.remote(Reader).options(num_cpus=0, max_restarts=-1, **self._options).remote(*where)
        self._learner = self._start_learner()

    def _start_learner(self) -> Any:
        # No restarts by Ray: a new learner has to learn the active version anew.
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        niceness = 0 if os.environ.get("RAY_ADDRESS") else _NICENESS
        learner = (
            ray.remote(Learner)
            .options(num_cpus=1, num_gpus=gpus, **self._options)
            .remote(self._config, self.active, self._fingerprint, niceness)
        )
        rounds, steps, entries = self._call(learner.progress)
        if rounds:
            logger.info("resumed after round %d, step %d", rounds, steps)
        self._unacknowledged = list(entries)
        return learner

    def recover(self) -> None:
        """A new learner from the durable state; the reader hands out again what that state does not contain."""
        ray.kill(self._learner)
        self._learner = self._start_learner()
        self._call(self._reader.rewind)

    def _call(self, method: Any, *args: Any) -> Any:
        return self._get(method.remote(*args))

    def _get(self, call: Any) -> Any:
        try:
            return ray.get(call)
        except RayTaskError as error:
            if isinstance(error.cause, RedisError | VersionError):  # what it used may come back; the learner is sound
                raise error.cause from error
            raise RoundFailed(f"{type(error.cause).__name__}: {error.cause}") from error
        except RayError as error:
            raise ActorLost(f"{type(error).__name__}: {str(error).strip()[-500:]}") from error

    def collect(self, stop: threading.Event) -> Round | None:
        """The next round, None when `stop` was set first; acknowledges first what an earlier try could not."""
        self.acknowledge([])
        r = self._config.round
        call = self._reader.collect.remote(r.rollouts, r.max_wait_seconds)
        while not stop.is_set():
            done, _ = ray.wait([call], timeout=_POLL_SECONDS)
            if done:
                found: Round = self._get(call)
                self._in_hand = found.entries
                return found
        return None

    def acknowledge(self, entries: list[str]) -> None:
        """Marks entries as used, with those of earlier calls that Redis did not take."""
        self._unacknowledged += entries
        self._call(self._reader.acknowledge, self._unacknowledged)
        self._unacknowledged = []

    def discard(self) -> int:
        """Acknowledges the last round without having learned from it; returns how many entries that costs."""
        count, entries = len(self._in_hand), self._in_hand
        self._in_hand = []
        self.acknowledge(entries)
        return count

    def train(self, rollouts: list[Any]) -> dict[str, float]:
        """See Learner.train."""
        means: dict[str, float] = self._call(self._learner.train, rollouts)
        return means

    def evaluate(self) -> Verdict:
        """See Learner.evaluate."""
        verdict: Verdict = self._call(self._learner.evaluate)
        return verdict

    def save(self, entries: list[str]) -> None:
        """See Learner.save."""
        self._call(self._learner.save, [*self._unacknowledged, *entries])

    def follow(self, active: int) -> None:
        """See Learner.follow; remembers the number for a learner that has to be started again."""
        self._call(self._learner.follow, active)
        self.active = active

    def publish(self, verdict: Verdict, training: dict[str, float], known: int) -> int:
        """See Learner.publish."""
        return int(self._call(self._learner.publish, verdict, training, known))
