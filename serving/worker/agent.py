"""The agent around one engine: start and prove it, keep it registered, follow the released version, drain on SIGTERM.

The main loop reads from top to bottom in `Agent.run`.
"""

from __future__ import annotations

import logging
import shutil
import signal
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
from prometheus_client import Counter, Gauge, Histogram
from redis.exceptions import RedisError

from adaflash.connect import require
from adaflash.errors import UserError
from adaflash.fleet import Refusal
from adaflash.fleet import State as ReleaseState
from adaflash.keys import Keys
from adaflash.registry import Registry, State, WorkerEntry
from adaflash.release import ForeignState, Release
from adaflash.store import StoreUnavailable, open_store
from adaflash.versions import label, target_fingerprint
from serving.ops import serve_ops
from serving.ports import require_free
from serving.worker import launch, proof
from serving.worker.client import Engine, EngineError
from serving.worker.config import WorkerConfig
from serving.worker.pulse import HEARTBEAT_SECONDS, Counting, Pulse
from serving.worker.swap import EngineBroken, SwapError, SwapFailed, Swapper, stage, stage_beside
from serving.worker.turn import SwapLock

logger = logging.getLogger(__name__)

FAILED_SECONDS = 5.0  # for an engine that cannot finish anything any more
RETRY_SECONDS = 30.0  # before a version that failed to stage or swap is tried again
TURN_SECONDS = 0.2  # between two looks whether another worker still stands still

SWAPS = Counter("adaflash_swaps_total", "Drafter swaps by result.", ["result"])
SWAP_PAUSE = Histogram(
    "adaflash_swap_pause_seconds",
    "Time generation stood still.",
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10),
)
VERSION = Gauge("adaflash_drafter_version", "Number of the drafter version that runs, -1 without one.")
SAFE_MODE = Gauge("adaflash_safe_mode", "1 if the installed SGLang is not the known one and a safer route serves.")
SPECULATION = Gauge("adaflash_speculation_active", "1 if the start-up proof saw speculation.")


class WorkerFailed(UserError):
    """The engine did not start or did not prove itself."""


class Agent:
    """One worker process."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.keys = Keys(config.served_name)
        self.stop = threading.Event()
        self.state: State = "starting"
        self.reason = ""
        self.version, self.checksum = "", ""
        self._failed: dict[tuple[int, int], float] = {}  # version and the controller's attempt
        self.refused: Refusal | None = None
        self.started = uuid.uuid4().hex[:12]
        self._schedulers: set[psutil.Process] = set()

    def run(self) -> None:
        """Checks, start, proof, loop, drain. Raises one clear error if it cannot start."""
        self.config, fallback = launch.safest(self.config)
        c = self.config
        SAFE_MODE.set(bool(fallback))
        if fallback:
            logger.error("%s", fallback)
        require_free(c.host, c.port, "--port")
        require_free(c.host, c.ops_port, "--ops-port")
        redis = require(c.redis_url)
        self.registry, self.release = Registry(redis, self.keys), Release(redis, self.keys, c.worker_id)
        self.turn = SwapLock(redis, self.keys.swap_lock, c.worker_id)
        self.store = open_store(c.versions)
        self.target = target_fingerprint(c.model)
        launch.target_shape(c.model)
        signal.signal(signal.SIGTERM, lambda *_: self.stop.set())
        signal.signal(signal.SIGINT, lambda *_: self.stop.set())
        serve_ops(c.host, c.ops_port, lambda: self.state == "ready")
        with tempfile.TemporaryDirectory(prefix="adaflash-worker-") as run_dir:
            self.run_dir, self.stage_dir = Path(run_dir), Path(run_dir) / "stage"
            self.stage_dir.mkdir()
            self.drafter = self._first_drafter()
            launch.check_cost_table(c, self.drafter, self.target)
            launch.note_missing_head(c, self.drafter)
            self.engine = Engine(c.url, c.admin_key, c.swap_seconds)
            self.process = launch.start(c, self.drafter, self.target, self.run_dir, self.stage_dir)
            self.counting = Counting(self.engine)
            self.pulse = Pulse(self.registry, self.turn, self.counting, self._entry)
            self.pulse.start()
            try:
                self._wait_until_up()
                self.checksum = proof.prove(self.engine, self.run_dir, self.drafter)
                swapper = Swapper(self.engine, self.run_dir)
                SPECULATION.set(self.drafter is not None)
                self._become("ready", fallback)
                logger.info("ready at %s, drafter %s", c.url, self.version or "none")
                self._follow(swapper)
            except (proof.ProofFailed, EngineError) as error:
                raise WorkerFailed(str(error)) from error
            finally:
                self._drain()

    def _first_drafter(self) -> launch.Drafter | None:
        """The released version if there is one that proves itself, else `--drafter`, else none."""
        c = self.config
        VERSION.set(-1)
        if c.route == "none":
            return None
        try:
            state = self.release.state()
        except (RedisError, ForeignState) as error:
            logger.error("the release state cannot be read: %s", error)
            state = ReleaseState()
        wanted = state.wanted(c.worker_id)
        if wanted is not None:
            try:
                directory, manifest = stage(self.store, wanted, self.stage_dir, self.target, None)
                config = launch.check_drafter(c.model, directory)
            except (UserError, OSError) as error:
                logger.error("the released version cannot be served: %s", error)
                self._refuse(wanted, state.attempt, error)
            else:
                self.version = manifest.label
                VERSION.set(wanted)
                return launch.Drafter(directory, config, self.version)
        if c.drafter is not None:
            self.version = "initial"
            return launch.Drafter(c.drafter, launch.check_drafter(c.model, c.drafter), self.version)
        logger.warning("no drafter: nothing is released and --drafter is not given; serving without speculation")
        return None

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + self.config.start_seconds
        while not self.engine.up():
            if self.process.poll() is not None:
                raise WorkerFailed(
                    f"SGLang ended with exit code {self.process.returncode} while starting; its log is above"
                )
            self._require_scheduler()
            if time.monotonic() > deadline:
                raise WorkerFailed(f"SGLang did not answer within {self.config.start_seconds:.0f} s (--start-seconds)")
            if self.stop.wait(0.5):
                raise WorkerFailed("stopped while starting")

    def _require_engine(self) -> None:
        if self.process.poll() is not None:
            self._become("failed", "SGLang ended")  # not draining: nobody asked it to go
            raise WorkerFailed(f"SGLang ended with exit code {self.process.returncode}")
        self._require_scheduler()

    def _require_scheduler(self) -> None:
        if launch.scheduler_lost(self.process, self._schedulers):
            self._become("failed", "SGLang's scheduler ended")
            raise WorkerFailed("SGLang's scheduler ended without its server; the log above may say why")

    def _follow(self, swapper: Swapper) -> None:
        """Until SIGTERM: swap whenever the released version is not the one that runs."""
        while not self.stop.wait(1.0):
            self._require_engine()
            wanted = self._wanted()
            if wanted is None:
                continue
            if self.drafter is None:
                self._failed[wanted] = time.monotonic()
                logger.warning("%s is released, but this worker started without drafter: restart it", label(wanted[0]))
            else:
                self._swap(swapper, *wanted)

    def _wanted(self) -> tuple[int, int] | None:
        """The version that this worker should load now, and at which attempt; None if it need not do anything."""
        try:
            state = self.release.state()
        except (RedisError, ForeignState):
            return None  # without Redis the running version simply stays
        number = state.wanted(self.config.worker_id)
        if number is None or label(number) == self.version:
            return None
        wanted = number, state.attempt
        return wanted if time.monotonic() - self._failed.get(wanted, -RETRY_SECONDS) >= RETRY_SECONDS else None

    def _my_turn(self, wanted: tuple[int, int]) -> bool:
        """Waits until no other worker stands still; False if something else is wanted by then, or Redis is away."""
        while self._go_on(wanted):
            try:
                if self.turn.take():
                    return True
            except RedisError as error:
                logger.warning("no swap without Redis: %s", error)
                return False
            self.stop.wait(TURN_SECONDS)
        return False

    def _go_on(self, wanted: tuple[int, int]) -> bool:
        """False once the worker is to stop or something else is wanted; raises if its engine has ended."""
        self._require_engine()
        return not self.stop.is_set() and self._wanted() == wanted

    def _swap(self, swapper: Swapper, number: int, attempt: int) -> None:
        """Stages and proves the version while requests run; then, alone in the fleet, pauses and loads it."""
        assert self.drafter is not None
        before = self.version
        try:
            where = (self.store, number, self.stage_dir, self.target, self.drafter.config)
            wanted = number, attempt
            staged = stage_beside(lambda: stage(*where), lambda: self._go_on(wanted), self.config.stage_seconds)
            if staged is None or not self._my_turn(wanted):
                return
            self._become("swapping")
            done = swapper.swap(staged[0], staged[1].label)
        except WorkerFailed:
            raise  # the engine ended meanwhile: nothing was refused
        except (UserError, SwapError, OSError) as error:
            self._failed[number, attempt] = time.monotonic()
            SWAPS.labels("refused").inc()
            logger.error("swap to %s refused, %s stays: %s", label(number), before, error)
            self._refuse(number, attempt, error)
            self._become("ready", f"swap to {label(number)} refused: {error}")
            self._record("swap_refused", to=number, reason=str(error))
        except EngineBroken as error:
            SWAPS.labels("broken").inc()
            self._become("failed", str(error))
            self._record("swap_broken", to=number, reason=str(error))
            raise WorkerFailed(str(error)) from error
        else:
            self.version, self.checksum, self.refused = done.label, done.checksum, None
            self.counting.afresh()
            VERSION.set(number)
            SWAPS.labels("done").inc()
            SWAP_PAUSE.observe(done.pause_seconds)
            self._become("ready")
            logger.info("swapped %s -> %s, paused %.0f ms", before, self.version, done.pause_seconds * 1e3)
            self._record("swapped", to=number, before=before, pause_seconds=done.pause_seconds, checksum=done.checksum)
        finally:
            self._give_up_turn()
            self._forget_stages()

    def _give_up_turn(self) -> None:
        try:
            self.turn.give_back()
        except RedisError as error:
            logger.warning("swap lock not given back, it expires by itself: %s", error)

    def _refuse(self, number: int, attempt: int, error: Exception) -> None:
        fault = not isinstance(error, StoreUnavailable | OSError | SwapFailed)
        self.refused = Refusal(version=number, attempt=attempt, why=str(error)[:200], fault=fault)

    def _forget_stages(self) -> None:
        """The engine has read what it runs; a copy that is still being written fails and says nothing."""
        for old in self.stage_dir.iterdir():
            shutil.rmtree(old, ignore_errors=True)

    def _become(self, state: State, reason: str = "") -> None:
        self.state, self.reason = state, reason
        self.pulse.announce()

    def _entry(self) -> WorkerEntry:
        """What the registry says about this worker."""
        c, (epoch, counters) = self.config, self.counting.shown
        return WorkerEntry(
            id=c.worker_id,
            url=c.advertise_url or c.url,
            model=c.served_name,
            target=self.target,
            state=self.state,
            version=self.version,
            checksum=self.checksum,
            reason=self.reason,
            capable=self.drafter is not None,
            started=self.started,
            epoch=epoch,
            refused=self.refused,
            counters=counters,
        )

    def _record(self, what: str, **details: Any) -> None:
        try:
            self.release.record(what, **details)
        except RedisError as error:
            logger.warning("event %s not written: %s", what, error)

    def _drain(self) -> None:
        """Takes the worker out of rotation, lets running requests finish, ends the engine."""
        if self.state != "failed":
            asked = self.stop.is_set()
            self._become("draining" if asked else "failed", "" if asked else "it ended by an error; its log says which")
        if self.process.poll() is None:
            time.sleep(HEARTBEAT_SECONDS)  # gateways stop sending within this
            patience = self.config.drain_seconds if self.state != "failed" else FAILED_SECONDS
            if not launch.end(self.process, patience):
                logger.warning("the engine had not ended after %.0f s and was killed", patience)
        # The last entry expires by itself: who looks in the next seconds learns whether it left or failed.
        self.pulse.stop()
        self.pulse.announce()
