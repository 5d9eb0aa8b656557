"""Which processes of an engine are its schedulers, and when one of them is gone."""

import subprocess
import sys
import time

import pytest

from serving.worker import launch

# An engine with a scheduler that forks once for each line it reads: a fork keeps the title of its parent, as every
# `subprocess.run` inside SGLang's scheduler does until it executes something.
SCHEDULER = """
import os, sys, time
for _ in sys.stdin:
    if os.fork() == 0:
        time.sleep(0.5)
        os._exit(0)
    print("forked", flush=True)
    os.wait()
    print("ended", flush=True)
"""
ENGINE = f"""
import subprocess, sys, time
subprocess.Popen(["sglang::scheduler", "-c", {SCHEDULER!r}], executable=sys.executable).wait()
time.sleep(60)
"""


@pytest.fixture
def engine():
    process = subprocess.Popen([sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    seen = set()
    deadline = time.monotonic() + 20
    while not seen:
        assert not launch.scheduler_lost(process, seen)
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield process, seen
    launch.end(process, 5)
    process.stdin.close()
    process.stdout.close()


def test_what_a_scheduler_forks_may_come_and_go(engine):
    process, seen = engine
    process.stdin.write(b"go\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"forked\n"
    assert not launch.scheduler_lost(process, seen)
    assert process.stdout.readline() == b"ended\n"
    assert not launch.scheduler_lost(process, seen)


def test_a_scheduler_that_ended_is_lost_although_its_engine_lives(engine):
    process, seen = engine
    assert len(seen) == 1
    process.stdin.close()
    deadline = time.monotonic() + 20
    while not launch.scheduler_lost(process, seen):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert process.poll() is None


def test_an_engine_that_ended_is_not_said_to_have_lost_its_scheduler(engine):
    process, seen = engine
    launch.end(process, 5)
    assert not launch.scheduler_lost(process, seen)
