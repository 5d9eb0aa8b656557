"""Release state and worker registry against a real Redis."""

import time

import pytest

from adaflash.keys import Keys
from adaflash.registry import Registry, WorkerEntry
from adaflash.release import Fenced, Release, read_events

KEYS = Keys("m/x y")


@pytest.fixture
def client(redis_server):
    return redis_server.client()


def test_all_keys_of_a_model_share_one_hash_tag():
    names = [KEYS.rollouts, KEYS.release, KEYS.lease, KEYS.events, KEYS.workers, KEYS.worker("w"), KEYS.trainer]
    assert all(n.startswith("adaflash:{m-x-y}:") for n in names)
    assert len(set(names)) == len(names)


def test_promotion_moves_active_to_previous_and_leaves_an_event(client):
    r = Release(client, KEYS, "me")
    assert r.state().active is None
    fence = r.hold(10)
    r.promote(3, fence, "first")
    r.promote(4, fence, "better")
    assert (r.state().active, r.state().previous) == (4, 3)
    events = read_events(client, KEYS)
    assert [(e["who"], e["what"], e["to"], e["why"]) for e in events] == [
        ("me", "promoted", 3, "first"),
        ("me", "promoted", 4, "better"),
    ]
    assert [e["to"] for e in read_events(client, KEYS, "(" + events[0]["id"])] == [4]


def test_a_second_publisher_is_refused_while_the_lease_is_held(client):
    one, two = Release(client, KEYS, "one"), Release(client, KEYS, "two")
    one.hold(10)
    with pytest.raises(Fenced):
        two.hold(10)


def test_the_owner_keeps_its_fencing_number_while_it_renews(client):
    r = Release(client, KEYS, "one")
    assert r.hold(10) == r.hold(10)


def test_a_publisher_that_lost_its_lease_cannot_promote(client):
    one, two = Release(client, KEYS, "one"), Release(client, KEYS, "two")
    old = one.hold(0.05)
    time.sleep(0.1)
    new = two.hold(10)
    assert new > old
    two.promote(1, new, "mine")
    with pytest.raises(Fenced):
        one.promote(2, old, "late")
    assert two.state().active == 1


def test_letting_go_frees_the_lease_only_for_its_owner(client):
    one, two = Release(client, KEYS, "one"), Release(client, KEYS, "two")
    one.hold(10)
    two.let_go()
    with pytest.raises(Fenced):
        two.hold(10)
    one.let_go()
    two.hold(10)


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
    registry.withdraw("a")
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
