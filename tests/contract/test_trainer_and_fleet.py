"""What the trainer's driver writes and asks between rounds, on a real Redis and a real store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adaflash.fleet import State
from adaflash.keys import Keys
from adaflash.release import Release
from adaflash.store import VersionStore
from tests.unit.test_drafter import make
from trainer.config import TrainerConfig
from trainer.loop import follow_fleet

KEYS = Keys("m")


class Actors:
    """The learner, as far as it follows."""

    active = 0

    def follow(self, number: int) -> None:
        self.active = number


@pytest.fixture
def world(redis_server, tmp_path: Path):
    store = VersionStore(tmp_path / "store")
    for seed in range(3):
        store.publish(make(seed), torch.float32, target="t", parent=None)
    release = Release(redis_server.client(), KEYS, "trainer")
    config = TrainerConfig(model="m", name="m", versions=store.where, state=tmp_path, redis_url=redis_server.url)
    return store, release, config


def commit(release: Release, state: State, *events: dict) -> None:
    assert release.commit(release.state(), state, events, release.controller_lease.hold(10))


def proposals(release: Release) -> list[int | None]:
    return [c.version for c in release.commands("0-0") if c.verb == "propose"]


def test_what_the_fleet_rejected_is_kept_with_the_reason_and_not_proposed_again_after_redis_lost_everything(world):
    store, release, config = world
    events = [{"what": "reject", "to": 1, "who": "ann", "why": "odd"}]
    events += [{"what": "rolled_back", "from": 2, "to": 0, "why": w} for w in ("too slow", "acceptance length 1.20")]
    commit(release, State(active=0, known=2, rejected=(1, 2, 99)), *events)
    follow_fleet(config, Actors(), release)
    assert store.reported() == ["v1", "v2"]
    assert (store.read_report("v1")["who"], store.read_report("v1")["why"]) == ("ann", "odd")
    assert store.read_report("v2")["why"] == "acceptance length 1.20"
    release.redis.flushall()
    commit(release, State(active=0, known=0))  # what most workers run
    follow_fleet(config, Actors(), release)
    assert proposals(release) == []


def test_what_redis_lost_is_proposed_again_once(world):
    _, release, config = world
    commit(release, State(active=0, known=0))
    actors = Actors()
    follow_fleet(config, actors, release)
    follow_fleet(config, actors, release)
    assert proposals(release) == [2]
    commit(release, release.state().but(active=2, known=2))
    follow_fleet(config, actors, release)
    assert (actors.active, proposals(release)) == (2, [2])
