"""The agent's way to a swap on a real Redis. Engine and store are stood in for: they are what fails."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

from adaflash.fleet import State
from adaflash.registry import Registry
from adaflash.release import Release, read_events
from adaflash.store import VersionStore
from serving.worker import launch
from serving.worker.agent import Agent, WorkerFailed
from serving.worker.config import WorkerConfig
from serving.worker.pulse import Counting, Pulse
from serving.worker.turn import SwapLock
from tests.unit.test_drafter import make


class Hanging(VersionStore):
    """A store whose copies begin and do not end."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.begun, self.answer = threading.Event(), threading.Event()

    def copy(self, number: int, to: Path) -> None:
        self.begun.set()
        self.answer.wait(60)
        super().copy(number, to)


class Forbidden:
    """Nothing may be swapped."""

    def swap(self, *_: object) -> None:
        raise AssertionError("swapped")


@pytest.fixture
def agent(redis_server, tmp_path):
    config = WorkerConfig(model="m", redis_url=redis_server.url, worker_id="w", versions=str(tmp_path / "store"))
    a = Agent(config)
    redis = redis_server.client()
    a.registry, a.release = Registry(redis, a.keys), Release(redis, a.keys, "w")
    a.turn, a.store, a.target = SwapLock(redis, a.keys.swap_lock, "w"), Hanging(tmp_path / "store"), "t"
    number = a.store.publish(make(1), torch.float32, target="t", parent=None).number
    a.drafter = launch.Drafter(tmp_path, make(1).config, "initial")
    a.version, a.state = "initial", "ready"
    a.stage_dir = tmp_path / "stage"
    a.stage_dir.mkdir()
    a.process = subprocess.Popen(["sleep", "120"])
    a.counting = Counting(None)
    a.pulse = Pulse(a.registry, a.turn, a.counting, a._entry)
    release(a, State(active=number))
    yield a
    a.store.answer.set()
    a.process.kill()
    a.process.wait()


def release(a: Agent, state: State) -> None:
    a.release.commit(a.release.state(), state, [], a.release.controller_lease.hold(10))


def in_thread(work) -> tuple[threading.Thread, list[BaseException]]:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def test_an_engine_that_ends_while_a_version_is_fetched_is_no_refusal(agent):
    thread, raised = in_thread(lambda: agent._swap(Forbidden(), 0, 0))
    assert agent.store.begun.wait(10)
    agent.process.kill()
    thread.join(20)
    assert isinstance(raised[0], WorkerFailed)
    assert (agent.state, agent.refused) == ("failed", None)
    (entry,) = agent.registry.live()
    assert (entry.state, entry.reason) == ("failed", "SGLang ended")
    assert read_events(agent.release.redis, agent.keys) == []


def test_a_fetch_ends_as_soon_as_something_else_is_wanted(agent):
    thread, raised = in_thread(lambda: agent._swap(Forbidden(), 0, 0))
    assert agent.store.begun.wait(10)
    began = time.monotonic()
    release(agent, State(active=7, attempt=1))
    thread.join(20)
    assert (raised, agent.state, agent.refused) == ([], "ready", None)
    assert time.monotonic() - began < 10
    assert list(agent.stage_dir.iterdir()) == []


def test_an_earlier_copy_that_is_still_written_does_not_spoil_the_next(agent, tmp_path):
    thread, _ = in_thread(lambda: agent._swap(Forbidden(), 0, 0))
    assert agent.store.begun.wait(10)
    release(agent, State(active=0, attempt=1))  # the same version, another attempt
    thread.join(20)
    staged = []

    class Takes:
        def swap(self, directory: Path, label: str) -> None:
            staged.append(sorted(p.name for p in directory.iterdir()))
            raise OSError("that is enough")

    agent.store.answer.set()
    agent._swap(Takes(), 0, 1)
    assert staged == [["config.json", "manifest.json", "model.safetensors"]]


@pytest.mark.parametrize(("asked", "state"), [(True, "draining"), (False, "failed")])
def test_a_worker_that_ends_says_whether_it_was_asked_to(agent, asked, state):
    agent.process.kill()
    agent.process.wait()
    if asked:
        agent.stop.set()
    agent.pulse.start()
    agent._drain()
    (entry,) = agent.registry.live()
    assert entry.state == state
    assert bool(entry.reason) is not asked
