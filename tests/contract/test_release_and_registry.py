"""Release state and worker registry against a real Redis."""

import time

import pytest

from adaflash.keys import Keys
from adaflash.registry import Registry, WorkerEntry
from adaflash.release import Fenced, ForeignState, Release, read_events
from serving.worker.turn import SwapLock

KEYS = Keys("m/x y")


@pytest.fixture
def client(redis_server):
    return redis_server.client()


def test_all_keys_of_a_model_share_one_hash_tag():
    names = [KEYS.rollouts, KEYS.release, KEYS.controller_lease, KEYS.trainer_lease, KEYS.events, KEYS.commands]
    names += [KEYS.workers, KEYS.worker("w"), KEYS.trainer, KEYS.swap_lock]
    assert all(n.startswith("adaflash:{m-x-y}:") for n in names)
    assert len(set(names)) == len(names)


def test_a_commit_replaces_the_state_and_leaves_events(client):
    r = Release(client, KEYS, "me")
    assert r.stored() is None
    fence = r.controller_lease.hold(10)
    first = r.state().but(active=3)
    assert r.commit(r.state(), first, [{"what": "promoted", "to": 3, "why": "first"}], fence)
    second = r.state()
    assert (second.active, second.revision) == (3, 1)
    assert r.commit(second, second.but(active=4), [{"what": "promoted", "to": 4}, {"what": "x"}], fence)
    events = read_events(client, KEYS)
    assert [(e["who"], e["what"], e.get("to")) for e in events] == [
        *(("me", "promoted", 3), ("me", "promoted", 4), ("me", "x", None))
    ]
    assert [e["what"] for e in read_events(client, KEYS, "(" + events[0]["id"])] == ["promoted", "x"]


def test_a_commit_from_an_old_reading_changes_nothing(client):
    r = Release(client, KEYS, "me")
    fence, old = r.controller_lease.hold(10), r.state()
    assert r.commit(old, old.but(active=1), [], fence)
    assert not r.commit(old, old.but(active=2), [{"what": "promoted"}], fence)
    assert r.state().active == 1
    assert read_events(client, KEYS) == []


def test_a_state_of_another_release_of_the_software_is_named_and_not_overwritten(client):
    client.hset(KEYS.release, "state", '{"shape": "new"}')
    with pytest.raises(ForeignState, match="written by another release"):
        Release(client, KEYS).state()


def test_a_second_holder_is_refused_while_the_lease_is_held(client):
    one, two = (Release(client, KEYS, name).trainer_lease for name in ("one", "two"))
    one.hold(10)
    with pytest.raises(Fenced):
        two.hold(10)
    Release(client, KEYS, "two").controller_lease.hold(10)  # another role


def test_the_owner_keeps_its_fencing_number_while_it_renews(client):
    lease = Release(client, KEYS, "one").trainer_lease
    assert lease.hold(10) == lease.hold(10)


def test_a_controller_that_lost_its_lease_cannot_commit(client):
    one, two = Release(client, KEYS, "one"), Release(client, KEYS, "two")
    old = one.controller_lease.hold(0.05)
    time.sleep(0.1)
    new = two.controller_lease.hold(10)
    assert new > old
    assert two.commit(two.state(), two.state().but(active=1), [], new)
    with pytest.raises(Fenced):
        one.commit(one.state(), one.state().but(active=2), [], old)
    assert two.state().active == 1


def test_a_trainer_that_lost_its_lease_cannot_propose(client):
    one, two = Release(client, KEYS, "one"), Release(client, KEYS, "two")
    old = one.trainer_lease.hold(0.05)
    time.sleep(0.1)
    two.propose(1, two.trainer_lease.hold(10), "mine")
    with pytest.raises(Fenced):
        one.propose(2, old, "late")
    (command,) = two.commands("0-0")
    assert (command.verb, command.version, command.who, command.why) == ("propose", 1, "two", "mine")


def test_commands_are_read_from_where_one_stopped(client):
    r = Release(client, KEYS, "me")
    first = r.ask("pin", 3, "why not")
    second = r.ask("resume")
    assert [c.id for c in r.commands("0-0")] == [first, second]
    assert [(c.verb, c.who) for c in r.commands(first)] == [("resume", "me")]
    assert r.commands(second) == []


def test_letting_go_frees_the_lease_only_for_its_owner(client):
    one, two = (Release(client, KEYS, name).trainer_lease for name in ("one", "two"))
    one.hold(10)
    two.let_go()
    with pytest.raises(Fenced):
        two.hold(10)
    one.let_go()
    two.hold(10)


def test_one_worker_at_a_time_may_stand_still(client):
    one, two = (SwapLock(client, KEYS.swap_lock, name) for name in ("one", "two"))
    assert one.take() and one.take() and not two.take()
    two.give_back()
    two.renew()
    assert not two.take()
    one.renew()
    one.give_back()
    assert two.take()


def entry(name, **change):
    fields = dict(id=name, url=f"http://{name}", model="m", target="t", state="ready", version="v1", checksum="c")
    return WorkerEntry(**(fields | change))


def test_workers_appear_change_and_vanish(client):
    registry = Registry(client, KEYS)
    assert registry.live() == []
    registry.announce(entry("a"))
    registry.announce(entry("b"))
    registry.announce(entry("b", state="draining"))
    assert [(e.id, e.state) for e in registry.live()] == [("a", "ready"), ("b", "draining")]
    client.delete(KEYS.worker("a"))  # it expires
    assert [e.id for e in registry.live()] == ["b"]


def test_an_expired_worker_is_forgotten(client):
    registry = Registry(client, KEYS)
    registry.announce(entry("a"))
    client.pexpire(KEYS.worker("a"), 1)
    time.sleep(0.05)
    assert registry.live() == []
    assert client.scard(KEYS.workers) == 0


def test_an_entry_of_a_newer_release_is_ignored(client):
    registry = Registry(client, KEYS)
    registry.announce(entry("a"))
    client.set(KEYS.worker("b"), '{"id": "b", "shape": "new"}')
    client.sadd(KEYS.workers, "b")
    assert [e.id for e in registry.live()] == ["a"]
