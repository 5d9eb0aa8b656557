"""Starts that cannot work end in one clear line and exit code 1, before anything slow begins."""

from __future__ import annotations

import json
import shutil
import socket
import time
from pathlib import Path

import pytest

from serving.ports import free_port
from tests.conftest import RedisServer
from tests.unit.test_config_and_cli import assert_one_line, cli


def worker(redis: RedisServer, model: str, *more: str):
    ports = ("--port", str(free_port()), "--ops-port", str(free_port()))
    started = time.monotonic()
    done = cli("worker", "--model", model, "--redis-url", redis.url, *ports, *more)
    assert time.monotonic() - started < 60
    return done


def test_a_wrong_model_path(redis_server: RedisServer, tmp_path: Path) -> None:
    assert_one_line(worker(redis_server, str(tmp_path / "nothing")), "config.json is missing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 1000}, "vocab_size is 1000"),
        ({"hidden_size": 32}, "hidden_size is 32"),
        ({"num_target_layers": 9}, "num_target_layers is 9"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 7]}}, "target_layer_ids [7]"),
        ({"dflash_config": {"mask_token_id": 9999, "target_layer_ids": [1]}}, "mask_token_id 9999"),
        ({"block_size": 1}, "block_size"),
        ({"num_hidden_layers": 3}, "tensor layers.2."),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
    ],
)
def test_a_drafter_that_does_not_fit_the_target(
    redis_server: RedisServer, target_dir: str, drafter_dir: Path, tmp_path: Path, change: dict, message: str
) -> None:
    bad = Path(shutil.copytree(drafter_dir / "weak", tmp_path / "bad"))
    config = json.loads((bad / "config.json").read_text()) | change
    (bad / "config.json").write_text(json.dumps(config))
    assert_one_line(worker(redis_server, target_dir, "--drafter", str(bad)), message)


def test_a_port_in_use(redis_server: RedisServer, target_dir: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = cli("worker", "--model", target_dir, "--redis-url", redis_server.url, "--port", str(port))
        assert_one_line(done, f"port {port} on 127.0.0.1 cannot be used")
        done = cli("gateway", "--name", "m", "--redis-url", redis_server.url, "--port", str(port))
        assert_one_line(done, f"port {port} on 127.0.0.1 cannot be used")


def test_refused_redis(target_dir: str, tmp_path: Path) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    for command in (
        ("worker", "--model", target_dir, "--port", str(free_port()), "--ops-port", str(free_port())),
        ("trainer", "--model", target_dir, "--ops-port", str(free_port()), "--state", str(tmp_path)),
        ("gateway", "--name", "m", "--port", str(free_port())),
    ):
        assert_one_line(cli(*command, "--redis-url", url), "does not answer")


def test_a_trainer_without_any_drafter(redis_server: RedisServer, target_dir: str, tmp_path: Path) -> None:
    paths = ("--state", str(tmp_path / "s"), "--versions", str(tmp_path / "v"), "--ops-port", str(free_port()))
    done = cli("trainer", "--model", target_dir, "--redis-url", redis_server.url, *paths)
    assert_one_line(done, "no drafter version")
