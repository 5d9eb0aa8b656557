"""A release on a real fleet: canary, rollout, rollback, and parts of it dying in the middle."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import RedisServer
from tests.e2e.trio import Traffic, Trio, Truth

WINDOW = 110  # seconds over which the fleet's acceptance is looked at


@pytest.fixture(scope="module")
def trio(
    target_dir: str, drafter_dir: Path, shared_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trio]:
    made = Trio(tmp_path_factory.mktemp("trio"), target_dir, drafter_dir, shared_redis)
    try:
        made.wait_ready()
        yield made
    finally:
        made.stop()


@pytest.fixture
def watched(trio: Trio) -> Iterator[Trio]:
    """What status says is compared with the engines as long as the test runs."""
    truth = Truth(trio)
    truth.start()
    yield trio
    truth.stopped.set()
    truth.join(30)
    assert not truth.lies
    assert truth.checked > 10


def test_a_better_version_is_tried_and_goes_to_all_while_every_answer_stays_the_same(watched: Trio) -> None:
    weak = watched.activate("weak")
    with Traffic(watched) as traffic:
        good = watched.propose("good")
        on_trial = watched.wait(lambda s: s.phase == "canary" and bool(s.moved) and not s.pending)
        assert len(on_trial.moved) == 1
        watched.wait(lambda s: s.active == good and s.phase == "idle")
        watched.converged(good)
    assert not traffic.failures
    said = [e for e in watched.events() if e.get("to") == good]
    assert [e["what"] for e in said if e["what"] != "swapped"] == ["propose", "canary", "rolling", "promoted"]
    judged = next(e for e in said if e["what"] == "rolling")
    assert judged["tau"] > judged["tau_rest"]
    print(f"v{weak} -> v{good}: tau {judged['tau_rest']:.2f} -> {judged['tau']:.2f}, {traffic.answered} answers")
    swaps = sorted((e["at"] - e["pause_seconds"], e["at"]) for e in said if e["what"] == "swapped")
    assert len(swaps) == 3
    assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(swaps)), "two stood still"


def test_a_bad_version_that_the_gate_let_through_comes_back_before_the_fleet_notices(watched: Trio) -> None:
    good = watched.activate("good")
    with Traffic(watched) as traffic:
        time.sleep(20)
        proposed = time.time()
        bad = watched.propose("random")
        watched.wait(lambda s: s.candidate == bad)
        watched.wait(lambda s: s.phase == "idle")
        back = time.time()
        watched.converged(good)
        time.sleep(max(0.0, proposed + WINDOW - time.time()))
    assert not traffic.failures
    assert bad in watched.state().rejected
    event = next(e for e in watched.events() if e["what"] == "rolled_back" and e["from"] == bad)
    assert "acceptance length" in event["why"]
    before, around = watched.tau(proposed - 20, proposed), watched.tau(proposed, proposed + WINDOW)
    during = watched.tau(proposed, back)
    print(
        f"tau before {before:.3f}, in {WINDOW} s from the proposal {around:.3f} ({around / before - 1:+.1%}), ", end=""
    )
    print(f"between proposal and return ({back - proposed:.0f} s) {during:.3f}; {event['why']}")
    assert around > 0.95 * before


def test_a_worker_that_cannot_take_it_sends_the_version_back_everywhere(watched: Trio) -> None:
    good = watched.activate("good")
    with Traffic(watched) as traffic:
        torn = watched.propose("good", torn=True)
        watched.wait(lambda s: torn in s.rejected and s.phase == "idle")
        watched.converged(good)
    assert not traffic.failures
    event = next(e for e in watched.events() if e["what"] == "rolled_back" and e["from"] == torn)
    assert "worker c could not take" in event["why"]


def test_a_canary_that_is_killed_ends_the_trial_and_comes_back_with_what_is_active(watched: Trio) -> None:
    good = watched.activate("good")
    candidate = watched.propose("good")
    (victim,) = watched.wait(lambda s: s.phase == "canary" and bool(s.moved) and not s.pending).moved
    watched.kill_worker(victim)
    watched.wait(lambda s: candidate in s.rejected and s.phase == "idle")
    assert victim not in watched.entries()
    watched.workers[victim] = watched.start_worker(victim)
    watched.workers[victim].wait()
    watched.converged(good)
    assert f"worker {victim} was lost" in next(
        e["why"] for e in watched.events() if e["what"] == "rolled_back" and e["from"] == candidate
    )


def test_a_worker_killed_in_the_rollout_and_restarted_at_once_is_noticed(watched: Trio) -> None:
    good = watched.activate("good")
    with Traffic(watched):
        candidate = watched.propose("good")
        found = watched.wait(lambda s: s.phase == "rolling" and len(s.moved) == 2)
        (victim,) = set(found.moved) - {found.pending}
        watched.kill_worker(victim)
        watched.workers[victim] = watched.start_worker(victim)
        watched.workers[victim].wait()
        watched.wait(lambda s: s.phase == "idle" and s.active in (good, candidate))
        watched.converged(watched.state().active or -1)
    assert watched.state().active == (good if candidate in watched.state().rejected else candidate)


def test_the_other_gateways_controller_takes_over_in_the_middle_of_a_trial(watched: Trio) -> None:
    watched.activate("weak")
    with Traffic(watched) as traffic:
        good = watched.propose("good")
        watched.wait(lambda s: s.phase == "canary" and bool(s.moved))
        owner = watched.client.get(watched.release.keys.controller_lease).decode().partition("|")[0]
        (acting,) = [g for g in watched.gateways if owner.endswith(f"-{g.url.rpartition(':')[2]}")]
        acting.kill()
        watched.wait(lambda s: s.active == good and s.phase == "idle")
        watched.converged(good)
    assert not traffic.failures
    watched.gateways.remove(acting)
    watched.gateways.append(watched.start_gateway())
    decided = {e["who"] for e in watched.events() if e.get("to") == good and e["what"] in ("canary", "promoted")}
    assert len(decided) == 2


def test_two_workers_are_enough_for_a_trial(watched: Trio) -> None:
    good = watched.activate("good")
    watched.workers["c"].stop()
    with Traffic(watched) as traffic:
        bad, better = watched.publish("random"), watched.publish("good")
        fence = watched.release.trainer_lease.hold(300)
        watched.release.propose(bad, fence, "test")
        watched.wait(lambda s: bad in s.rejected and s.phase == "idle")
        watched.converged(good, count=2)
        watched.release.propose(better, fence, "test")
        watched.wait(lambda s: s.active == better and s.phase == "idle")
        watched.converged(better, count=2)
    assert not traffic.failures
