"""What the trainer tells the outside: Prometheus metrics, and a small expiring status entry for terminals."""

from __future__ import annotations

import json
import time
from typing import Any

from prometheus_client import Counter, Gauge
from redis import Redis

from adaflash.keys import Keys
from trainer.gate import Verdict
from trainer.reader import Round

ROUNDS = Counter("adaflash_trainer_rounds_total", "Training rounds by the gate's verdict.", ["verdict"])
ROLLOUTS = Counter("adaflash_trainer_rollouts_total", "Rollouts by what became of them.", ["result"])
ROUND_SECONDS = Gauge("adaflash_trainer_round_seconds", "Training time of the last round.")
LOSS = Gauge("adaflash_trainer_loss", "Mean of the last round.", ["term"])
REPLAY_TAU = Gauge("adaflash_trainer_replay_tau", "Replayed acceptance length on the held-out slice.", ["drafter"])
WAITING = Gauge("adaflash_trainer_waiting_rollouts", "Entries of the stream not read yet, -1 if unknown.")
PROPOSED = Gauge("adaflash_proposed_version", "Number of the last version this trainer proposed, -1 before.")
PROPOSED.set(-1)
_TTL_SECONDS = 600
_TERMS = ("loss", "cross_entropy", "divergence", "clipped_share", "agreement")


def collected(r: Round) -> None:
    """Counts what the reader delivered."""
    ROLLOUTS.labels("used").inc(len(r.rollouts))
    for reason, count in r.skipped.items():
        ROLLOUTS.labels(reason).inc(count)
    WAITING.set(r.waiting)


def trained(means: dict[str, float], verdict: Verdict) -> None:
    """Publishes a round's numbers."""
    ROUNDS.labels("proposed" if verdict.promote else "rejected").inc()
    ROUND_SECONDS.set(means["seconds"])
    for term in _TERMS:
        if term in means:
            LOSS.labels(term).set(means[term])
    REPLAY_TAU.labels("candidate").set(verdict.tau_candidate)
    REPLAY_TAU.labels("active").set(verdict.tau_active)


def announce(redis: Redis, keys: Keys, **status: Any) -> None:
    """Replaces the status entry."""
    redis.set(keys.trainer, json.dumps({"at": time.time(), **status}), ex=_TTL_SECONDS)
