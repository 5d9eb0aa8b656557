"""The trainer's main loop: collect a round, train, judge, save, acknowledge, propose. Everything else hangs off it."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import threading
import time
from dataclasses import asdict
from typing import Any

from redis.exceptions import RedisError

from adaflash.bootstrap import target_dtype
from adaflash.checkpoint import load_drafter
from adaflash.connect import connect, require
from adaflash.errors import UserError
from adaflash.fleet import State
from adaflash.keys import Keys
from adaflash.registry import Registry
from adaflash.release import Fenced, ForeignState, Release, read_events
from adaflash.store import VersionStore, open_store
from adaflash.target import target_shape
from adaflash.versions import VersionError, label, target_fingerprint
from serving.ops import serve_ops
from serving.ports import require_free
from trainer import cluster, status
from trainer.config import TrainerConfig
from trainer.learner import read_state

logger = logging.getLogger(__name__)

LEASE_SECONDS = 30.0
RETRY_SECONDS = 2.0
DISCARD_AFTER = 2  # rounds failed in a row: the rollouts may be what makes the learner fail
MAX_FAILURES = 5


class TrainerFailed(UserError):
    """Learning does not get on; a supervisor may start the trainer again."""


def run(config: TrainerConfig) -> None:
    """Runs until SIGTERM or Ctrl-C. Raises one clear error if it cannot start."""
    stop = threading.Event()
    require_free(config.host, config.ops_port, "--ops-port")
    require(config.redis_url)
    store = open_store(config.versions)
    config = config.model_copy(update={"versions": store.where, "state": config.state.absolute()})
    lock = lock_state(config)
    keys, fingerprint = Keys(config.served_name), target_fingerprint(config.model)
    redis = connect(config.redis_url)
    release = Release(redis, keys, owner(config))
    read_state(config.state, fingerprint)  # a state that cannot be continued from ends here, in one line
    first_version(config, store, release, fingerprint)
    ready = threading.Event()
    serve_ops(config.host, config.ops_port, ready.is_set)
    threading.Thread(target=keep_lease, args=(release, stop), name="lease", daemon=True).start()

    with cluster.started():
        # After Ray: it installs handlers of its own.
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        signal.signal(signal.SIGINT, lambda *_: stop.set())
        try:
            actors = cluster.Actors(config, latest(store, release), fingerprint)
        except (cluster.ActorLost, cluster.RoundFailed) as error:
            raise TrainerFailed(f"the learner did not start: {error}") from error
        ready.set()
        logger.info("waiting for rollouts of %s", config.served_name)
        failures = 0
        while not stop.is_set():
            try:
                if failures:
                    actors.recover()
                if failures == DISCARD_AFTER:
                    logger.error("giving up on the last round: %d rollouts discarded", actors.discard())
                one_round(config, actors, release, stop)
                failures = 0
            except (RedisError, VersionError, ForeignState) as error:
                logger.warning("%s: %s; trying again", type(error).__name__, error)
                stop.wait(RETRY_SECONDS)
            except (cluster.ActorLost, cluster.RoundFailed) as error:
                failures += 1
                logger.error("round failed (%d in a row): %s; continuing from the last durable state", failures, error)
                if failures >= MAX_FAILURES:
                    raise TrainerFailed(f"{failures} rounds failed in a row, the last one: {error}") from error
                stop.wait(RETRY_SECONDS * 2**failures)
            except Fenced as error:
                logger.error("%s: this trainer stops", error)
                stop.set()
    lock.close()


def one_round(config: TrainerConfig, actors: cluster.Actors, release: Release, stop: threading.Event) -> None:
    """Collect -> train -> judge -> save -> acknowledge -> publish and propose."""
    follow_fleet(config, actors, release)
    batch = actors.collect(stop)
    if batch is None:
        return
    status.collected(batch)
    if batch.skipped:
        logger.warning("unusable rollouts: %s", batch.skipped)
    if not batch.rollouts:
        actors.acknowledge(batch.entries)
        if batch.redis_error:
            raise RedisError(batch.redis_error)
        return
    means = actors.train(batch.rollouts)
    verdict = actors.evaluate()
    actors.save(batch.entries)
    actors.acknowledge(batch.entries)
    status.trained(means, verdict)
    logger.info(
        "round: %d rollouts, loss %.3f, agreement %.3f, %.1f s; %s",
        *(len(batch.rollouts), means.get("loss", float("nan")), means.get("agreement", 0.0), means["seconds"]),
        verdict.why,
    )
    if verdict.promote:
        number = actors.publish(verdict, means, release.state().known)
        release.propose(number, release.trainer_lease.hold(LEASE_SECONDS), verdict.why)
        status.PROPOSED.set(number)
        prune(config, release)
    else:
        release.record("rejected", why=verdict.why, gate=verdict.report())
        report = {"at": time.time(), "why": verdict.why, "gate": verdict.report()}
        open_store(config.versions).report(f"round-{int(time.time()):010d}", report)
    status.announce(release.redis, release.keys, active=actors.active, round=means, verdict=asdict(verdict))


def prune(config: TrainerConfig, release: Release) -> None:
    """Deletes old versions that no worker runs and none may return to."""
    state = release.state()
    running = {e.version for e in Registry(release.redis, release.keys).live()}
    store = open_store(config.versions)
    in_use = {n for n in store.numbers() if label(n) in running} | state.needed()
    gone = store.prune(config.keep_versions, in_use)
    if gone:
        logger.info("deleted versions %s", [label(n) for n in gone])


def follow_fleet(config: TrainerConfig, actors: cluster.Actors, release: Release) -> None:
    """A candidate has to beat what the fleet runs, whoever chose that. Proposes again what Redis lost."""
    store = open_store(config.versions)
    state, known = release.state(), store.numbers()
    keep_rejections(store, state, release)
    if state.active is not None and state.active in known and state.active != actors.active:
        actors.follow(state.active)
    queued = [c.version for c in release.commands(state.applied) if c.verb == "propose"]
    lost = known and known[-1] > state.known and known[-1] != state.active and known[-1] not in queued
    if lost and label(known[-1]) not in store.reported():
        release.propose(known[-1], release.trainer_lease.hold(LEASE_SECONDS), "published, but not known to the fleet")


def keep_rejections(store: VersionStore, state: State, release: Release) -> None:
    """Writes why the fleet rejected a version beside the versions, where it outlives Redis."""
    have = set(store.reported()) if state.rejected else set()
    new = [n for n in state.rejected if label(n) not in have and n in store.numbers()]
    if not new:
        return
    events = read_events(release.redis, release.keys)
    for number in new:
        said = [e for e in events if (e["what"], e.get("from")) == ("rolled_back", number)]
        said += [e for e in events if (e["what"], e.get("to")) == ("reject", number)]
        last = max(said, key=lambda e: float(e["at"]), default={"at": time.time()})
        store.report(label(number), {"why": "", **{k: last[k] for k in ("at", "who", "why") if k in last}})


def first_version(config: TrainerConfig, store: VersionStore, release: Release, fingerprint: str) -> None:
    """Takes the lease, and publishes `--drafter` as the first version if there is none."""
    try:
        fence = release.trainer_lease.hold(LEASE_SECONDS)
    except Fenced as error:
        raise VersionError(f"{error}: another trainer of {config.served_name} is running") from None
    store.discard_unfinished()
    if store.numbers():
        return
    if config.drafter is None:
        raise VersionError(
            f"no drafter version in {store.where}: give --drafter (make one with 'adaflash drafter init')"
        )
    drafter = load_drafter(config.drafter)
    drafter.config.check_target(target_shape(config.model))
    manifest = store.publish(drafter, target_dtype(config.model), target=fingerprint, parent=None)
    release.propose(manifest.number, fence, f"first version, from {config.drafter.name}")


def latest(store: VersionStore, release: Release) -> int:
    """The released version if the store has it, else the newest."""
    active, known = release.state().active, store.numbers()
    if active is not None and active not in known:
        logger.warning("%s is released but not in %s; continuing from %s", label(active), store.where, label(known[-1]))
    return active if active in known and active is not None else known[-1]


def owner(config: TrainerConfig) -> str:
    """The lease's owner: the same after a restart, so that a killed trainer need not wait for its own lease."""
    return f"trainer-{socket.gethostname()}-{os.path.abspath(config.state).replace('|', '_')}"


def lock_state(config: TrainerConfig) -> Any:
    """Excludes a second trainer on the same state folder; the kernel frees the lock when the process ends."""
    config.state.mkdir(parents=True, exist_ok=True)
    handle = (config.state / "lock").open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise VersionError(f"{config.state} is in use by another trainer; give another --state") from None
    return handle


def keep_lease(release: Release, stop: threading.Event) -> None:
    """Renews the lease until the trainer ends, and gives it back then."""
    while not stop.wait(LEASE_SECONDS / 3):
        try:
            release.trainer_lease.hold(LEASE_SECONDS)
        except RedisError as error:
            logger.warning("lease not renewed: %s", error)
        except Fenced as error:
            logger.error("%s: this trainer stops", error)
            stop.set()
            return
    try:
        release.trainer_lease.let_go()
    except RedisError as error:
        logger.warning("lease not given back, it expires by itself: %s", error)
