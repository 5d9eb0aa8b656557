"""`adaflash status` and `adaflash events` on a real Redis."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from adaflash.cli import app
from adaflash.keys import Keys
from adaflash.registry import Registry
from adaflash.release import Release
from tests.contract.test_release_and_registry import entry
from tests.release import activate

KEYS = Keys("m")


@pytest.fixture
def release(redis_server):
    activate(redis_server.client(), KEYS, 3)
    return Release(redis_server.client(), KEYS, "me")


def run(*arguments, code=0):
    done = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "160"})
    assert done.exit_code == code, done.output
    return done.output


def test_status_is_green_only_when_every_worker_runs_the_released_version(redis_server, release):
    arguments = ("status", "--name", "m", "--redis-url", redis_server.url)
    registry = Registry(redis_server.client(), KEYS)
    registry.announce(entry("a", version="v3"))
    text = run(*arguments)
    assert "active v3, previous none, 1 live workers" in text
    registry.announce(entry("b", version="v2", reason="swap to v3 refused: torn"))
    assert "swap to v3 refused: torn" in run(*arguments, code=1)
    assert json.loads(run(*arguments, "--json", code=1))["behind"] == ["b"]
    registry.announce(entry("b", version="v3", state="swapping"))
    run(*arguments, code=1)


def test_status_without_a_release_or_workers_says_so(redis_server):
    assert "active none" in run("status", "--name", "m", "--redis-url", redis_server.url)


def test_events_tell_who_did_what_and_why_and_only_the_last_ones(redis_server, release):
    release.record("swapped", to=3, before="v2", pause_seconds=0.25)
    arguments = ("events", "--name", "m", "--redis-url", redis_server.url)
    first, second = run(*arguments).splitlines()
    assert "promoted v3  by test  test" in first
    assert "swapped v3  by me  before=v2 pause_seconds=0.250" in second
    assert run(*arguments, "--last", "1").splitlines() == [second]
    assert run(*arguments, "--last", "0") == ""
    assert [json.loads(line)["what"] for line in run(*arguments, "--json").splitlines()] == ["promoted", "swapped"]


def test_following_prints_what_happens_and_ends_on_ctrl_c(redis_server, release):
    # As a script starts it in the background: with SIGINT ignored.
    shell = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-m", "adaflash.cli"]
    command = ["events", "--name", "m", "--redis-url", redis_server.url, "-f"]
    process = subprocess.Popen([*shell, *command], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert "promoted v3" in process.stdout.readline()
        release.record("rejected", why="no gain")
        assert "rejected  by me  no gain" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
