"""Staging beside the agent's main thread."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from adaflash.store import StoreUnavailable
from adaflash.versions import VersionError
from serving.worker.swap import MOST_STAGING, STAGE_THREAD, stage_beside

FOUND = (Path("v1"), None)


def test_the_result_and_the_error_are_those_of_the_work():
    assert stage_beside(lambda: FOUND, lambda: True, 10) == FOUND

    def torn():
        raise VersionError("v1: torn")

    with pytest.raises(VersionError, match="torn"):
        stage_beside(torn, lambda: True, 10)

    def slow_disk():
        raise TimeoutError("the disk")

    with pytest.raises(TimeoutError, match="the disk"):
        stage_beside(slow_disk, lambda: True, 10)


def test_a_store_that_hangs_ends_at_the_deadline_or_when_the_agent_is_asked_to_stop():
    hang = threading.Event()
    with pytest.raises(StoreUnavailable, match="not copied within"):
        stage_beside(hang.wait, lambda: True, 0.3)
    answers = iter([True, True, False])
    began = time.monotonic()
    assert stage_beside(hang.wait, lambda: next(answers), 60) is None
    assert time.monotonic() - began < 10
    hang.set()


def test_copies_that_hang_are_not_piled_up():
    hang = threading.Event()
    for _ in range(MOST_STAGING):
        with pytest.raises(StoreUnavailable, match="not copied within"):
            stage_beside(hang.wait, lambda: True, 0)
    with pytest.raises(StoreUnavailable, match="have not ended"):
        stage_beside(lambda: FOUND, lambda: True, 10)
    hang.set()
    deadline = time.monotonic() + 10
    while [t for t in threading.enumerate() if t.name == STAGE_THREAD] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stage_beside(lambda: FOUND, lambda: True, 10) == FOUND


def test_an_engine_that_ends_meanwhile_is_noticed():
    def ended():
        raise RuntimeError("the engine ended")

    with pytest.raises(RuntimeError, match="the engine ended"):
        stage_beside(lambda: time.sleep(1), ended, 60)
