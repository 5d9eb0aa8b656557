"""The release controller's loop on a real Redis. The workers' entries are written by the test: they are what fails."""

from __future__ import annotations

import threading
import time

import pytest

from adaflash.fleet import ReleasePolicy, State
from adaflash.keys import Keys
from adaflash.live import Counters
from adaflash.registry import Registry, WorkerEntry
from adaflash.release import Fenced, Release, read_events
from serving.gateway import controller as loop
from serving.gateway.controller import Controller
from tests.contract.test_release_and_registry import entry
from tests.unit.test_controller import more as busy

KEYS = Keys("m")
POLICY = ReleasePolicy(skip_seconds=0, min_steps=100, canary_share=0.4, change_seconds=30)


class Fleet:
    """Entries of three workers that obey at once, and controllers that share the Redis."""

    def __init__(self, client) -> None:
        self.client, self.registry = client, Registry(client, KEYS)
        self.release = Release(client, KEYS, "operator")
        self.entries: dict[str, WorkerEntry] = {
            n: entry(n, version="initial", started=n, epoch=n) for n in ("a", "b", "c")
        }
        self.announce()

    def controller(self, name: str) -> Controller:
        return Controller(Release(self.client, KEYS, name), self.registry, POLICY)

    def announce(self) -> None:
        for e in self.entries.values():
            self.registry.announce(e)

    def obey(self, tau: float = 2.0) -> None:
        state = self.release.state()
        for n, e in self.entries.items():
            wanted = state.wanted(n)
            if wanted is not None and e.version != f"v{wanted}":
                e = e.model_copy(update={"version": f"v{wanted}", "epoch": f"{n}{wanted}", "counters": Counters()})
            more = busy(e.seen(), 60, tau).counters
            self.entries[n] = e.model_copy(update={"counters": more})
        self.announce()

    @property
    def running(self) -> set[str]:
        return {e.version for e in self.entries.values()}


@pytest.fixture
def fleet(redis_server, monkeypatch) -> Fleet:
    monkeypatch.setattr(loop, "TTL_SECONDS", 0.0)  # this Redis is younger than an entry lives
    return Fleet(redis_server.client())


def first(fleet: Fleet, c: Controller, number: int = 1) -> None:
    fleet.release.propose(number, fleet.release.trainer_lease.hold(30), "t")
    c.tick()
    fleet.obey()
    assert fleet.running == {f"v{number}"}


def test_a_proposal_goes_from_the_canary_to_the_fleet_and_each_step_is_an_event(fleet):
    c = fleet.controller("one")
    first(fleet, c)
    fleet.release.propose(2, fleet.release.trainer_lease.hold(30), "better")
    trials = set()
    for _ in range(60):
        c.tick()
        trials.add(c.trial()[0])
        fleet.obey()
    assert fleet.running == {"v2"}
    assert trials == {frozenset(), frozenset({"a"})}
    said = [(e["who"], e["what"], e.get("to")) for e in read_events(fleet.client, KEYS)]
    assert said == [
        *(("operator", "propose", 1), ("one", "promoted", 1), ("operator", "propose", 2)),
        *(("one", "canary", 2), ("one", "rolling", 2), ("one", "promoted", 2)),
    ]


@pytest.mark.parametrize("dies_after", range(8))
def test_a_controller_that_is_killed_at_any_moment_is_replaced(fleet, dies_after):
    c = fleet.controller("one")
    first(fleet, c)
    fleet.release.propose(2, fleet.release.trainer_lease.hold(30), "better")
    for _ in range(dies_after):
        c.tick()
        fleet.obey()
    two = fleet.controller("two")
    with pytest.raises(Fenced):
        two.tick()  # the lease of the dead one still holds
    assert two.state == fleet.release.state()
    fleet.client.delete(KEYS.controller_lease)  # it expires
    for _ in range(60):
        two.tick()
        fleet.obey()
    assert (fleet.running, fleet.release.state().phase) == ({"v2"}, "idle")
    promoted = [e["to"] for e in read_events(fleet.client, KEYS) if e["what"] == "promoted"]
    assert promoted == [1, 2]


def test_a_controller_that_wakes_up_late_does_nothing(fleet):
    one, two = fleet.controller("one"), fleet.controller("two")
    first(fleet, one)
    fleet.client.delete(KEYS.controller_lease)
    two.tick()
    with pytest.raises(Fenced):
        one.tick()


def test_while_the_registry_may_lack_workers_nothing_is_decided(fleet, monkeypatch):
    c = fleet.controller("one")
    first(fleet, c)
    monkeypatch.setattr(loop, "TTL_SECONDS", 3600.0)
    fleet.release.ask("promote", 2)
    before = fleet.release.state()
    c.tick()
    assert fleet.release.state() == before
    monkeypatch.setattr(loop, "TTL_SECONDS", 0.0)
    c.tick()
    assert fleet.release.state().candidate == 2


def test_a_controller_whose_lease_was_away_waits_as_long_as_an_entry_lives(fleet, monkeypatch):
    """Redis stood still: entries expired, although their workers live."""
    c = fleet.controller("one")
    first(fleet, c)
    fleet.release.propose(2, fleet.release.trainer_lease.hold(30), "better")
    c.tick()
    fleet.obey()
    c.tick()
    (canary,) = c.state.moved
    fleet.client.delete(KEYS.controller_lease, *(KEYS.worker(n) for n in fleet.entries))
    monkeypatch.setattr(loop, "TTL_SECONDS", 1.0)
    monkeypatch.setattr(c, "_uncertain", lambda: time.monotonic() < c._uncertain_until)  # this Redis is young
    c.tick()
    assert fleet.release.state().rejected == ()
    fleet.announce()
    time.sleep(1.0)
    for _ in range(60):
        c.tick()
        fleet.obey()
    assert (fleet.release.state().active, canary) == (2, "a")


def test_a_takeover_that_could_not_write_is_tried_again(fleet, monkeypatch):
    """Otherwise the limits of the time in which nobody looked would run."""
    c = fleet.controller("one")
    first(fleet, c)
    fleet.release.propose(2, fleet.release.trainer_lease.hold(30), "better")
    c.tick()
    s = fleet.release.state()
    two = fleet.controller("two")
    fleet.client.delete(KEYS.controller_lease)
    hours_ago = s.but(told_at=s.told_at - 1e4, entered_at=s.entered_at - 1e4, revision=s.revision)
    fleet.client.hset(KEYS.release, "state", hours_ago.model_dump_json())
    with monkeypatch.context() as m:
        m.setattr(two.release, "commit", lambda *_: False)
        two.tick()
    for _ in range(60):
        two.tick()
        fleet.obey()
    assert (fleet.release.state().active, fleet.release.state().rejected) == (2, ())


def test_what_was_obeyed_before_the_state_was_lost_is_not_obeyed_again(fleet):
    c = fleet.controller("one")
    first(fleet, c, 5)
    for verb, number in (("pin", 3), ("unpin", None), ("promote", 5)):
        fleet.release.ask(verb, number)
        c.tick()
    for _ in range(60):
        c.tick()
        fleet.obey()
    assert fleet.running == {"v5"}
    fleet.client.delete(KEYS.release)
    fleet.release.ask("pause")
    c.tick()
    s = fleet.release.state()
    assert (s.active, s.phase, s.forced, s.pinned, s.paused) == (5, "idle", None, None, True)


def test_a_redis_that_came_back_empty_is_told_what_the_fleet_runs(fleet):
    c = fleet.controller("one")
    first(fleet, c, 5)
    fleet.client.flushdb()
    fleet.announce()
    c.tick()
    fleet.release.propose(5, fleet.release.trainer_lease.hold(30), "again")
    c.tick()
    s = fleet.release.state()
    assert (s.active, s.known, s.phase) == (5, 5, "idle")
    assert read_events(fleet.client, KEYS)[-1]["because"] == "v5 was proposed already"


def test_what_the_fleet_runs_is_written_down_after_a_loss_although_nobody_asks_for_anything(fleet):
    c = fleet.controller("one")
    first(fleet, c, 5)
    fleet.client.flushdb()
    fleet.announce()
    c.tick()
    assert fleet.release.stored().active == 5
    assert [e["what"] for e in read_events(fleet.client, KEYS)] == ["adopted"]


def test_a_command_that_nobody_understands_does_not_keep_the_others_from_being_heard(fleet):
    c = fleet.controller("one")
    for body in ('{"verb": "teleport", "version": 3}', "{", "[1]", '{"verb": "pin", "version": 1, "colour": "red"}'):
        fleet.client.xadd(KEYS.commands, {"c": body})
    fleet.client.xadd(KEYS.commands, {"other": "field"})
    fleet.release.ask("pause")
    c.tick()
    assert fleet.release.state().paused
    assert [e["what"] for e in read_events(fleet.client, KEYS)] == ["ignored"] * 5 + ["pause"]


def test_a_controller_that_fails_makes_way_for_another(fleet, monkeypatch):
    monkeypatch.setattr(loop, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(loop, "GIVE_WAY_SECONDS", 0.5)
    broken, stop = fleet.controller("one"), threading.Event()
    monkeypatch.setattr(loop, "step", lambda *_: 1 / 0)
    thread = broken.start(stop)
    time.sleep(0.2)
    monkeypatch.undo()
    monkeypatch.setattr(loop, "TTL_SECONDS", 0.0)
    fleet.controller("two").tick()
    assert thread.is_alive()
    stop.set()
    thread.join(5)


def test_every_command_is_answered_once_although_controllers_change(fleet):
    asked = [fleet.release.ask(v, n) for v, n in (("pause", None), ("pin", 3), ("resume", None), ("rollback", None))]
    fleet.controller("one").tick()
    fleet.client.delete(KEYS.controller_lease)
    fleet.controller("two").tick()
    answers = [e["command"] for e in read_events(fleet.client, KEYS) if e.get("command")]
    assert answers == asked


def test_a_state_that_nothing_changes_is_not_written(fleet):
    c = fleet.controller("one")
    first(fleet, c)
    revision = fleet.release.state().revision
    for _ in range(3):
        c.tick()
    assert fleet.release.state().revision == revision
    assert fleet.release.state() != State()
