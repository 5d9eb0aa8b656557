"""What a trainer must not do: learn from noise, or share its work with a second one started by mistake."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from adaflash.keys import Keys
from adaflash.release import Release, read_events
from adaflash.rollouts import FIELD, Rollout, VersionSpan
from adaflash.store import VersionStore
from adaflash.versions import target_fingerprint, verify
from serving.ports import free_port
from tests.conftest import RedisServer
from tests.e2e.servers import Process

NAME = "guards"
KEYS = Keys(NAME)


class Trainers:
    """Starts trainers on one store and one Redis; `one` and `two` have states of their own."""

    def __init__(self, home: Path, target: str, drafters: Path, redis: RedisServer) -> None:
        self.home, self.target, self.drafters, self.redis = home, target, drafters, redis
        self.store = VersionStore(home / "store")
        self.started: list[Process] = []

    def start(self, state: str, drafter: str = "weak", ready: bool = True) -> Process:
        port = free_port()
        sets = ("round.rollouts=24", "round.max_wait_seconds=5", "round.steps=8", "threads=1", "gate.min_held_out=3")
        process = Process(
            *("trainer", self.home / f"{state}.log", "--model", self.target, "--name", NAME),
            *("--versions", str(self.store.root), "--drafter", str(self.drafters / drafter)),
            *("--redis-url", self.redis.url, "--state", str(self.home / state), "--ops-port", str(port)),
            *(x for s in (*sets, "buffer.held_out_share=0.3") for x in ("--set", s)),
        )
        self.started.append(process)
        if ready:
            process.wait_ready(f"http://127.0.0.1:{port}/readyz")
        return process

    def feed(self, count: int, seed: int) -> None:
        """Rollouts of random ids, as a broken or hostile worker could write them."""
        g = torch.Generator().manual_seed(seed)
        client, target = self.redis.client(), target_fingerprint(self.target)
        for k in range(count):
            ids = torch.randint(0, 256, (48,), generator=g).tolist()
            r = Rollout(
                request_id=f"{seed}-{k}",
                target=target,
                versions=[VersionSpan(version="v0", start=0, end=40)],
                prompt_ids=ids[:8],
                output_ids=ids[8:],
                accepted=[1] * 39,
                verified=[8] * 39,
                temperature=0.0,
                top_p=1.0,
                top_k=1,
                finish_reason="length",
                finished_at=time.time(),
            )
            client.xadd(KEYS.rollouts, {FIELD: r.pack()})

    def events(self, what: str) -> list[dict]:
        return [e for e in read_events(self.redis.client(), KEYS) if e["what"] == what]


@pytest.fixture
def trainers(target_dir: str, drafter_dir: Path, redis_server: RedisServer, tmp_path: Path) -> Iterator[Trainers]:
    made = Trainers(tmp_path, target_dir, drafter_dir, redis_server)
    yield made
    for p in made.started:
        if p.popen.poll() is None:
            p.popen.send_signal(signal.SIGCONT)
        p.stop()


def test_a_stream_of_random_ids_leads_to_no_proposal(trainers: Trainers) -> None:
    trainers.start("one", "good")
    deadline = time.monotonic() + 240
    fed = 0
    while len(rejected := trainers.events("rejected")) < 4:
        assert time.monotonic() < deadline, trainers.started[0].log.read_text(errors="replace")[-3000:]
        trainers.feed(24, seed=fed)
        fed += 1
        time.sleep(3)
    commands = Release(trainers.redis.client(), KEYS).commands("0-0")
    assert [c.version for c in commands] == [0], "the first version, and nothing after it"
    assert trainers.store.numbers() == [0]
    kept = [trainers.store.read_report(n) for n in trainers.store.reported()]
    assert {e["why"] for e in rejected[:3]} <= {r["why"] for r in kept}
    assert all(r["gate"]["why"] == r["why"] for r in kept)
    for e in rejected:
        print(f"{e['why']}: {e['gate']['tau_active']:.3f} -> {e['gate']['tau_candidate']:.3f}")


def test_a_second_trainer_ends_with_one_line_and_one_that_lost_its_lease_stops(trainers: Trainers) -> None:
    one = trainers.start("one")
    two = trainers.start("two", ready=False)
    assert two.popen.wait(120) == 1
    assert f"another trainer of {NAME} is running" in two.log.read_text()

    one.popen.send_signal(signal.SIGSTOP)  # as a machine that hangs
    client = trainers.redis.client()
    client.delete(KEYS.trainer_lease)  # it expires
    three = trainers.start("three")
    one.popen.send_signal(signal.SIGCONT)
    assert one.popen.wait(120) is not None
    assert "this trainer stops" in one.log.read_text()
    assert three.popen.poll() is None
    numbers = trainers.store.numbers()
    assert numbers == sorted(set(numbers))
    for n in numbers:
        assert verify(trainers.store.path(n)).number == n
