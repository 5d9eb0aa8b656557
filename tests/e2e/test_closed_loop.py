"""The whole loop with its parts dying: traffic goes on, and learning resumes when they are back."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from adaflash.keys import Keys
from adaflash.release import Release
from serving.ports import free_port
from tests.conftest import RedisServer
from tests.e2e.conftest import walk_prompts
from tests.e2e.servers import Process, Worker

NAME = "loop"


class Traffic(threading.Thread):
    """Two prompts at a time, without pause, until stopped; every failure is kept."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(daemon=True)
        self.worker, self.failures, self.answered, self.stopped = worker, [], 0, threading.Event()

    def run(self) -> None:
        prompts = walk_prompts(64, seed=41)
        for i in itertools.count():
            if self.stopped.is_set():
                return
            try:
                outs = self.worker.generate([prompts[(2 * i + k) % 64] for k in range(2)], 48)
                self.answered += len(outs)
            except (AssertionError, httpx.HTTPError) as error:
                self.failures.append(repr(error))
            time.sleep(0.1)

    def advance(self) -> None:
        """Returns when a few more requests have been answered; fails if they stop coming."""
        goal, deadline = self.answered + 4, time.monotonic() + 30
        while self.answered < goal:
            assert time.monotonic() < deadline, self.failures
            time.sleep(0.05)


@pytest.fixture
def loop(target_dir: str, drafter_dir: Path, redis_server: RedisServer, tmp_path: Path) -> Iterator[dict]:
    store = tmp_path / "store"
    random = ("--drafter", str(drafter_dir / "random"))
    worker = Worker(tmp_path / "worker.log", target_dir, NAME, redis_server.url, store, *random)
    started = []
    gateway = ("--name", NAME, "--port", str(free_port()), "--redis-url", redis_server.url)
    controller = Process("gateway", tmp_path / "gateway.log", *gateway, "--set", "release.lone_seconds=1")

    def trainer() -> Process:
        port = free_port()
        small = ("round.rollouts=12", "round.max_wait_seconds=10", "round.steps=12", "buffer.held_out_share=0.3")
        process = Process(
            *(
                "trainer",
                tmp_path / "trainer.log",
                "--model",
                target_dir,
                "--name",
                NAME,
                "--versions",
                str(store),
                *random,
            ),
            *("--redis-url", redis_server.url, "--state", str(tmp_path / "state"), "--ops-port", str(port)),
            *(x for s in (*small, "gate.min_held_out=3", "threads=1") for x in ("--set", s)),
        )
        started.append(process)
        process.wait_ready(f"http://127.0.0.1:{port}/readyz")
        return process

    try:
        yield {"worker": worker.wait(), "trainer": trainer, "redis": redis_server, "log": tmp_path / "trainer.log"}
    finally:
        for p in (*started, controller, worker):
            p.stop()


def active(redis: RedisServer) -> int:
    return Release(redis.client(), Keys(NAME)).state().active or 0


def wait_for_version(redis: RedisServer, above: int, log: Path) -> int:
    deadline = time.monotonic() + 180
    while (now := active(redis)) <= above:
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
        time.sleep(0.2)
    return now


def tau(worker: Worker) -> float:
    outs = worker.generate(walk_prompts(8, seed=99), 40)
    return sum(39 for _ in outs) / sum(o["meta_info"]["spec_verify_ct"] for o in outs)


def test_the_loop_learns_and_survives_the_death_of_trainer_and_redis(loop: dict) -> None:
    worker, redis, log = loop["worker"], loop["redis"], loop["log"]
    before = tau(worker)
    trainer = loop["trainer"]()
    traffic = Traffic(worker)
    traffic.start()
    try:
        version = wait_for_version(redis, 0, log)

        trainer.kill()
        traffic.advance()
        loop["trainer"]()
        version = wait_for_version(redis, version, log)
        assert "resumed after round" in log.read_text()

        redis.kill()
        traffic.advance()
        redis.start()
        version = wait_for_version(redis, version, log)
    finally:
        traffic.stopped.set()
        traffic.join()
    assert not traffic.failures
    deadline = time.monotonic() + 60
    while (
        httpx.get(f"http://127.0.0.1:{worker.ops_port}/metrics").text.count("adaflash_swaps_total")
        and tau(worker) <= before + 0.5
    ):
        assert time.monotonic() < deadline, f"tau {before:.2f} -> {tau(worker):.2f}"
        time.sleep(1)
    print(f"tau {before:.2f} -> {tau(worker):.2f}, version v{version}")
