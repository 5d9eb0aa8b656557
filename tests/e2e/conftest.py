"""Servers shared by the end-to-end tests; each start costs half a minute or more."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from adaflash.checkpoint import load_drafter
from adaflash.keys import Keys
from adaflash.registry import Registry, WorkerEntry
from adaflash.store import VersionStore
from adaflash.versions import target_fingerprint
from tests import tiny
from tests.conftest import RedisServer
from tests.e2e.servers import ROW_SECONDS, Process, Worker, cost_table
from tests.release import activate

NAME = "tiny"


@dataclass
class Fleet:
    """What a test needs to release versions to the shared worker and to see what it runs."""

    worker: Worker
    redis: RedisServer
    store: VersionStore
    drafters: Path
    fingerprint: str

    def publish(self, drafter: str) -> int:
        """A new version from one of the tiny drafters; not released yet."""
        loaded = load_drafter(self.drafters / drafter)
        return self.store.publish(loaded, torch.float32, target=self.fingerprint, parent=None).number

    def promote(self, number: int) -> None:
        activate(self.redis.client(), Keys(self.worker.name), number)

    def entry(self) -> WorkerEntry:
        (found,) = [e for e in Registry(self.redis.client(), Keys(self.worker.name)).live() if e.url == self.worker.url]
        return found

    def wait(self, condition: Callable[[WorkerEntry], bool], seconds: float = 60) -> WorkerEntry:
        deadline = time.monotonic() + seconds
        while not condition(e := self.entry()):
            assert time.monotonic() < deadline, e
            time.sleep(0.1)
        return e

    def run(self, drafter: str) -> int:
        """Releases a fresh version of `drafter` and waits until it serves."""
        number = self.publish(drafter)
        self.swap_to(number)
        return number

    def swap_to(self, number: int) -> None:
        """Releases a published version and waits until it serves."""
        self.promote(number)
        self.wait(lambda e: e.version == f"v{number}" and e.state == "ready")

    def serve_during_swaps(
        self, prompts: list[list[int]], want: list[list[int]], tokens: int, numbers: list[int]
    ) -> tuple[int, int]:
        """Four clients ask every prompt while versions change in turn; each answer has to be `want`.

        Returns the swaps and the requests that lived through one.
        """
        spanned, wrong = 0, []

        def client(part: int) -> None:
            nonlocal spanned
            for i in range(part, len(prompts), 4):
                (out,) = self.worker.generate([prompts[i]], tokens)
                spanned += len(out["meta_info"]["weight_versions"]) > 1
                if out["output_ids"] != want[i]:
                    wrong.append(i)

        threads = [threading.Thread(target=client, args=(k,)) for k in range(4)]
        for t in threads:
            t.start()
        swaps = 0
        while any(t.is_alive() for t in threads):
            self.swap_to(numbers[swaps % len(numbers)])
            swaps += 1
        assert not wrong
        return swaps, spanned


@pytest.fixture(scope="session")
def fleet(
    target_dir: str, drafter_dir: Path, shared_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """The shared speculative worker; starts on the weak drafter."""
    home = tmp_path_factory.mktemp("fleet")
    store = VersionStore(home / "store")
    log = home / "worker.log"
    weak = ("--drafter", str(drafter_dir / "weak"))
    worker = Worker(log, target_dir, NAME, shared_redis.url, store.root, *weak)
    try:
        yield Fleet(worker.wait(), shared_redis, store, drafter_dir, target_fingerprint(target_dir))
    finally:
        worker.stop()


@pytest.fixture(scope="session")
def plain(
    target_dir: str, shared_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory, fleet: Fleet
) -> Iterator[Worker]:
    """The same engine without speculation."""
    home = tmp_path_factory.mktemp("plain")
    worker = Worker(home / "worker.log", target_dir, "plain", shared_redis.url, home / "store", "--route", "none")
    try:
        yield worker.wait()
    finally:
        worker.stop()


@pytest.fixture(scope="session")
def start(
    target_dir: str, drafter_dir: Path, shared_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Callable:
    """Starts a worker of its own that verifies as its arguments say; a context manager that yields a `Fleet`."""

    @contextmanager
    def go(
        name: str, drafter: str, verify: str, *settings: str, row_seconds: float = ROW_SECONDS, **env: str
    ) -> Iterator[Fleet]:
        home = tmp_path_factory.mktemp(name)
        block = load_drafter(drafter_dir / drafter).config.block_size
        store = VersionStore(home / "store")
        arguments = ["--drafter", str(drafter_dir / drafter), "--verify", verify]
        arguments += ["--cost-table", str(cost_table(target_dir, block, home, row_seconds)), "--set", "speculation=on"]
        for pair in settings:
            arguments += ["--set", pair]
        worker = Worker(home / "worker.log", target_dir, name, shared_redis.url, store.root, *arguments, **env)
        try:
            yield Fleet(worker.wait(), shared_redis, store, drafter_dir, target_fingerprint(target_dir))
        finally:
            worker.stop()

    return go


@pytest.fixture(scope="session")
def model(target_dir: str) -> object:
    return AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()


def walk_prompts(count: int, seed: int = 11) -> list[list[int]]:
    """Prompts that the target continues as it was trained."""
    g = torch.Generator().manual_seed(seed)
    rows = tiny.walks(count, 24, g)
    lengths = torch.randint(4, 24, (count,), generator=g).tolist()
    return [row[:n].tolist() for row, n in zip(rows, lengths, strict=True)]


def text_prompts(count: int) -> list[list[int]]:
    """Prompts of bytes that the target never saw: its continuation is arbitrary but fixed."""
    t = tiny.tokenizer()
    return [t(f"def f{i}(x{i * 7}):\n    return {i}").input_ids for i in range(count)]


@pytest.fixture
def gateway(shared_redis: RedisServer, fleet: Fleet, tmp_path: Path) -> Iterator[str]:
    """The URL of a gateway in front of the shared worker, with API key `user-key`."""
    from serving.ports import free_port

    port = free_port()
    arguments = ("--name", NAME, "--port", str(port), "--redis-url", shared_redis.url)
    process = Process("gateway", tmp_path / "gateway.log", *arguments, ADAFLASH_GATEWAY_API_KEYS='["user-key"]')
    try:
        process.wait_ready(f"http://127.0.0.1:{port}/readyz")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stop()


def copy_drafter(source: Path, out: Path) -> Path:
    return Path(shutil.copytree(source, out))
