"""The release controller's state machine by example; `test_controller_model` tries to break it."""

from __future__ import annotations

import pytest

from adaflash.controller import adopt, renewed, step
from adaflash.fleet import Command, Refusal, ReleasePolicy, Seen, State
from adaflash.live import Counters, Load

POLICY = ReleasePolicy(
    canary_share=0.3,
    skip_seconds=5,
    min_steps=500,
    failures=2,
    cooldown_seconds=1000,
    fetch_seconds=50,
    change_seconds=30,
    lone_seconds=10,
)


def more(w: Seen, steps: int, tau: float, seconds: float = 0.1) -> Seen:
    """The worker after more requests of ten steps each; half of them a fifth better than `tau`, half a fifth worse."""
    n = steps / 10
    load = Load(laps=steps, seconds=steps * seconds, tokens=steps * tau)
    added = Counters(
        requests=n,
        tokens=steps * tau,
        steps=steps,
        tokens_squared=n * (10 * tau) ** 2 * 1.04,
        steps_squared=n * 100,
        tokens_steps=n * 100 * tau,
        loads={"4": load},
    )
    return w.model_copy(update={"counters": w.counters + added})


class Fleet:
    """Workers that obey at once, one after the other, and traffic whose acceptance depends on the version."""

    def __init__(self, count: int, tau: dict[int, float]) -> None:
        self.state, self.now, self.tau = State(), 0.0, tau
        self.workers = {f"w{i}": Seen(version=None, started=f"w{i}-0") for i in range(count)}
        self.refuses: set[int] = set()
        self.slow: set[int] = set()
        self.stuck: set[str] = set()
        self.unreached: set[str] = set()  # the store does not answer them
        self.events: list[dict] = []
        self.asked = 0

    def ask(self, verb: str, version: int | None = None) -> None:
        self.asked += 1
        self.tick(0, Command(verb=verb, version=version, who="me", why="test", id=f"{self.asked}-0"))

    def tick(self, seconds: float = 1.0, *commands: Command) -> None:
        self.now += seconds
        self.state, events = step(self.state, self.now, self.workers, commands, POLICY)
        self.events += events

    def change(self, worker: str, **changes: object) -> None:
        self.workers[worker] = self.workers[worker].model_copy(update=changes)

    def obey(self) -> None:
        for i, w in self.workers.items():
            wanted, attempt = self.state.wanted(i), self.state.attempt
            if wanted in (w.version, None) or i in self.stuck or not w.capable:
                continue
            if i in self.unreached:
                self.change(i, refused=Refusal(version=wanted, attempt=attempt, why="no answer", fault=False))
            elif wanted in self.refuses:
                self.change(i, refused=Refusal(version=wanted, attempt=attempt, why="torn"))
            else:
                self.change(i, version=wanted, refused=None, epoch=f"{i}-{self.now}", counters=Counters())

    def restart_unseen(self, seconds: float) -> None:
        """Workers and controllers end and come back."""
        self.now += seconds
        for i in self.workers:
            self.change(i, started=f"{i}-{self.now}", epoch=f"{i}-{self.now}", counters=Counters())
        self.state = renewed(self.state, self.now, self.workers)

    def run(self, ticks: int = 60, busy: bool = True) -> None:
        for _ in range(ticks):
            self.tick()
            self.obey()
            for i, w in self.workers.items() if busy else ():
                self.workers[i] = more(w, 50, self.tau.get(w.version or 0, 1.5), 0.3 if w.version in self.slow else 0.1)

    def happened(self, what: str) -> list[dict]:
        return [e for e in self.events if e["what"] == what]

    @property
    def running(self) -> set[int | None]:
        return {w.version for w in self.workers.values()}


@pytest.fixture
def fleet() -> Fleet:
    """Three workers on version 1; 2 is better, 3 is bad, 4 and 5 are better still."""
    f = Fleet(3, {1: 2.0, 2: 2.5, 3: 1.2, 4: 2.8, 5: 3.0})
    f.ask("propose", 1)
    f.run(5)
    assert f.running == {1}
    return f


def test_a_better_version_is_tried_on_one_worker_and_then_goes_to_all_one_by_one(fleet):
    fleet.ask("propose", 2)
    seen = []
    for _ in range(60):
        fleet.run(1)
        seen.append(sum(w.version == 2 for w in fleet.workers.values()))
    assert seen == sorted(seen)
    assert set(seen) == {1, 2, 3}
    assert seen.count(1) > POLICY.skip_seconds, "the canary was not given its time"
    assert (fleet.state.active, fleet.state.previous, fleet.state.phase) == (2, 1, "idle")
    decision = fleet.happened("rolling")[0]
    assert (decision["tau"], decision["tau_rest"]) == (2.5, 2.0)
    assert decision["speed"] == pytest.approx(1.25)


def test_a_bad_version_comes_back_from_the_canary_with_the_reason_and_is_not_tried_again(fleet):
    fleet.ask("propose", 3)
    fleet.run()
    (event,) = fleet.happened("rolled_back")
    assert (event["from"], event["to"]) == (3, 1)
    assert "acceptance length 1.20 on the canary, 2.00 on the rest" in event["why"]
    assert (fleet.running, fleet.state.rejected) == ({1}, (3,))
    fleet.ask("propose", 3)
    assert fleet.state.waiting is None
    fleet.ask("propose", 4)
    fleet.run()
    assert fleet.state.active == 4


def test_a_clearly_bad_version_is_stopped_before_the_minimum_of_steps():
    f = Fleet(3, {1: 3.0, 2: 1.0})
    f.ask("propose", 1)
    f.run(5)
    f.ask("propose", 2)
    steps = 0
    while not f.happened("rolled_back"):
        f.run(1)
        steps += 50
    assert steps < POLICY.min_steps + POLICY.skip_seconds * 50


def test_a_single_worker_takes_what_the_gate_let_through():
    f = Fleet(1, {1: 2.0, 2: 2.5})
    f.ask("propose", 1)
    f.run(20)
    f.ask("propose", 2)
    f.run(5)
    assert (f.state.active, f.running) == (2, {2})
    assert "the gate decided" in f.happened("rolling")[0]["why"]


def test_a_worker_that_is_alone_for_a_moment_takes_nothing_unseen():
    """The other one restarts: draining, away, back."""
    f = Fleet(2, {1: 2.0, 2: 1.0})
    f.ask("propose", 1)
    f.run(5)
    f.change("w1", leaving=True, ready=False)
    f.ask("propose", 2)
    f.run(5)
    gone = f.workers.pop("w1")
    f.run(int(POLICY.lone_seconds) - 3)
    f.workers["w1"] = gone.model_copy(update={"leaving": False, "ready": True, "started": "again"})
    f.run()
    assert (f.state.active, f.state.rejected) == (1, (2,))
    assert all("tau" in e for e in f.happened("rolling"))


def test_a_lone_worker_that_gets_company_in_the_middle_is_on_trial():
    f = Fleet(1, {1: 2.0, 2: 1.0})
    f.ask("propose", 1)
    f.run(20)
    f.ask("propose", 2)
    f.workers["w1"] = Seen(version=1, started="w1-0")
    f.run()
    assert (f.state.active, f.state.rejected) == (1, (2,))


def test_a_worker_that_is_behind_does_not_make_a_candidate_look_good(fleet):
    fleet.tau |= {0: 1.0, 6: 1.5}
    fleet.stuck = {"w2"}
    fleet.change("w2", version=0)  # it runs something old and bad
    fleet.ask("propose", 6)
    fleet.run()
    assert fleet.state.rejected == (6,)


def test_a_canary_whose_rest_is_gone_is_not_rolled_out_unseen(fleet):
    fleet.ask("propose", 2)
    fleet.run(4)
    (canary,) = fleet.state.moved
    fleet.workers = {canary: fleet.workers[canary]}
    fleet.run(100)
    assert (fleet.state.phase, fleet.state.active) == ("canary", 1)
    fleet.now += POLICY.canary_seconds
    fleet.run(5)
    assert (fleet.state.phase, fleet.state.active, fleet.running) == ("idle", 1, {1})


def test_a_slower_version_fails_although_more_is_accepted(fleet):
    fleet.slow = {2}
    fleet.ask("propose", 2)
    fleet.run()
    assert "tokens per second of the rest" in fleet.happened("rolled_back")[0]["why"]


def test_a_worker_that_cannot_take_it_ends_the_attempt(fleet):
    fleet.refuses.add(2)
    fleet.ask("propose", 2)
    fleet.run()
    assert "could not take v2: torn" in fleet.happened("rolled_back")[0]["why"]
    assert (fleet.state.active, fleet.state.rejected) == (1, (2,))


def test_an_old_refusal_does_not_speak_about_a_new_try(fleet):
    fleet.refuses.add(2)
    fleet.ask("propose", 2)
    fleet.run()
    fleet.refuses.clear()
    fleet.ask("promote", 2)
    fleet.run()
    assert (fleet.state.active, fleet.state.rejected, fleet.running) == (2, (), {2})


@pytest.mark.parametrize("how", ["lost", "restarted", "failed", "stuck"])
def test_a_candidate_that_harms_its_worker_is_taken_back(fleet, how):
    if how == "stuck":
        fleet.stuck = {"w0", "w1", "w2"}
    fleet.ask("propose", 2)
    fleet.run(4)
    (canary,) = fleet.state.moved
    if how == "stuck":
        fleet.change(canary, ready=False)  # in the middle of its swap
    elif how == "lost":
        del fleet.workers[canary]
    elif how == "failed":
        fleet.change(canary, failed=True, ready=False)
    elif how == "restarted":
        fleet.change(canary, started="another", version=1)
    fleet.run(100)
    assert fleet.state.rejected == (2,)
    assert canary in fleet.happened("rolled_back")[0]["why"]
    assert fleet.state.phase == "idle"


def test_a_swap_that_ended_while_nobody_looked_is_no_failure(fleet):
    fleet.ask("propose", 2)
    fleet.tick()
    fleet.obey()
    fleet.now += 10 * POLICY.change_seconds
    fleet.run()
    assert fleet.state.active == 2


def test_a_version_that_could_not_be_brought_to_one_worker_is_tried_on_another(fleet):
    fleet.unreached = {"w0"}
    fleet.ask("propose", 2)
    fleet.run()
    assert fleet.happened("excused")[0]["worker"] == "w0"
    assert (fleet.state.active, fleet.state.rejected, fleet.happened("rolled_back")) == (2, (), [])
    fleet.unreached.clear()
    fleet.run(2)
    assert fleet.running == {2}


def test_a_version_that_could_be_brought_to_nobody_is_tried_again_later(fleet):
    fleet.unreached = {"w0", "w1", "w2"}
    fleet.ask("propose", 2)
    fleet.run(8)
    s = fleet.state
    assert (s.phase, s.waiting, s.rejected, s.failures) == ("idle", 2, (), 0)
    fleet.unreached.clear()
    fleet.run(5)
    assert fleet.state.phase == "idle", "it has to wait"
    fleet.run(100)
    assert fleet.state.active == 2


def test_a_worker_that_fetches_slowly_says_nothing_against_a_version(fleet):
    fleet.stuck = {"w0"}
    fleet.ask("propose", 2)
    fleet.run(45)
    fleet.stuck.clear()
    fleet.run()
    assert (fleet.state.active, fleet.happened("excused")) == (2, [])


def test_a_worker_that_fetches_too_slowly_is_left_out(fleet):
    fleet.stuck = {"w0"}
    fleet.ask("propose", 2)
    fleet.run(150)
    assert fleet.happened("excused")[0]["worker"] == "w0"
    assert (fleet.state.active, fleet.state.rejected, fleet.state.failures) == (2, (), 0)


def test_what_ended_while_nobody_looked_is_nobodys_fault(fleet):
    """The whole stack was restarted: in a trial, and soon after a rollout."""
    fleet.ask("propose", 2)
    fleet.run(8)
    assert fleet.state.moved
    fleet.restart_unseen(5)
    fleet.run()
    assert (fleet.state.active, fleet.running, fleet.happened("rolled_back")) == (2, {2}, [])
    assert fleet.state.watched
    fleet.restart_unseen(5)
    fleet.run()
    assert (fleet.state.active, fleet.running, fleet.happened("rolled_back")) == (2, {2}, [])
    for i in fleet.workers:
        fleet.change(i, started="crashed")
    fleet.run(3)
    assert (fleet.state.active, fleet.state.rejected) == (1, (2,))


def test_short_gaps_do_not_give_a_trial_new_time(fleet):
    fleet.ask("propose", 2)
    for _ in range(int(POLICY.canary_seconds / 90) + 2):
        fleet.run(1, busy=False)
        fleet.now += 99
        fleet.state = renewed(fleet.state, fleet.now, fleet.workers, 10)
    fleet.run(3, busy=False)
    assert "too little traffic" in fleet.happened("rolled_back")[0]["why"]


@pytest.mark.parametrize("verb", ["promote", "rollback"])
def test_an_operators_choice_reaches_workers_that_the_active_version_keeps_from_being_ready(fleet, verb):
    fleet.ask("propose", 2)
    fleet.run()
    for i in fleet.workers:
        fleet.change(i, ready=False)
    fleet.ask(verb, 1 if verb == "promote" else None)
    fleet.run(3)
    assert fleet.state.phase == "rolling"
    fleet.run(int(POLICY.change_seconds))
    assert (fleet.state.active, fleet.state.phase) == (1, "idle")


def test_a_rollback_is_not_vetoed(fleet):
    """What it leaves is worse, whatever becomes of the workers meanwhile."""
    fleet.ask("propose", 2)
    fleet.run()
    fleet.unreached = {"w0"}
    fleet.ask("rollback")
    for k in (1, 2):
        fleet.run(2)
        fleet.change(f"w{k}", started="again")
    fleet.run(100)
    assert (fleet.state.active, fleet.state.phase) == (1, "idle")


@pytest.mark.parametrize("chosen", [2, 4])
def test_a_promotion_during_a_rollback_waits_for_its_end(fleet, chosen):
    fleet.ask("propose", 2)
    fleet.run()
    fleet.ask("rollback")
    fleet.run(2)
    fleet.ask("promote", chosen)
    fleet.run(20)
    assert [e["to"] for e in fleet.happened("promoted")] == [1, 2, 1, chosen]
    assert fleet.running == {chosen}
    assert fleet.happened("rolled_back") == []


def test_a_version_that_ends_workers_goes_back_although_the_next_is_on_trial(fleet):
    fleet.workers |= {f"w{k}": Seen(version=1, started=f"w{k}-0") for k in (3, 4)}
    fleet.ask("propose", 2)
    fleet.run()
    assert fleet.state.active == 2
    fleet.ask("propose", 4)
    fleet.run(3)
    (canary,) = fleet.state.moved
    for i in sorted(set(fleet.workers) - {canary})[:2]:
        fleet.change(i, started="again")
    fleet.run(5)
    assert (fleet.state.active, fleet.state.rejected, fleet.running) == (1, (2,), {1})
    fleet.run(100)
    assert fleet.state.active == 4, "the candidate had nothing to do with it"


def test_a_worker_that_ended_and_leaves_in_its_next_life_has_ended(fleet):
    fleet.ask("propose", 2)
    fleet.run()
    for k in range(2):
        fleet.change(f"w{k}", started="again", leaving=True)
    fleet.run(5)
    assert (fleet.state.active, fleet.state.rejected) == (1, (2,))


def test_an_operators_choice_that_ends_its_workers_is_taken_back_at_the_second(fleet):
    fleet.workers |= {f"w{k}": Seen(version=1, started=f"w{k}-0") for k in (3, 4)}
    fleet.ask("promote", 2)
    ended = []
    for _ in range(60):
        fleet.run(1)
        for i, w in list(fleet.workers.items()):
            if w.version == 2:
                ended.append(i)
                del fleet.workers[i]
    assert len(ended) == 2
    assert (fleet.state.active, fleet.running) == (1, {1})
    assert "2 workers ended with v2" in fleet.happened("rolled_back")[0]["why"]


@pytest.mark.parametrize("ended", [1, 2])
def test_a_version_that_ends_workers_after_it_reached_them_all_goes_back(fleet, ended):
    fleet.ask("propose", 2)
    fleet.run()
    assert fleet.state.active == 2
    for k in range(ended):
        fleet.change(f"w{k}", started="again")  # a supervisor has started it anew
    fleet.run(5)
    assert (fleet.state.active, fleet.running) == ((1, {1}) if ended == 2 else (2, {2}))
    if ended == 2:
        assert fleet.state.rejected == (2,)
        assert "workers w0, w1 ended soon after they took it" in fleet.happened("rolled_back")[0]["why"]


def test_workers_that_drain_or_end_much_later_say_nothing_about_a_version(fleet):
    fleet.ask("propose", 2)
    fleet.run()
    for k in range(2):
        fleet.change(f"w{k}", leaving=True)
        fleet.run(1)
        fleet.change(f"w{k}", leaving=False, started="again")
    fleet.run(3)
    assert fleet.state.active == 2
    fleet.now += POLICY.watch_seconds
    fleet.run(1)
    for k in range(3):
        fleet.change(f"w{k}", started="much later")
    fleet.run(3)
    assert (fleet.state.active, fleet.state.rejected) == (2, ())


def test_the_rollout_waits_for_workers_that_are_not_ready(fleet):
    fleet.change("w2", ready=False)
    fleet.ask("promote", 2)
    fleet.run(10)
    assert fleet.state.phase == "rolling"
    fleet.change("w2", ready=True)
    fleet.run(5)
    assert (fleet.state.active, fleet.running) == (2, {2})


def test_a_canary_that_drains_is_replaced_without_blame(fleet):
    fleet.ask("propose", 2)
    fleet.run(4)
    (canary,) = fleet.state.moved
    fleet.change(canary, leaving=True)
    fleet.run(2)
    del fleet.workers[canary]
    fleet.run()
    assert (fleet.state.active, fleet.happened("rolled_back")) == (2, [])


def test_workers_without_drafter_neither_take_nor_block_a_version(fleet):
    fleet.workers["plain"] = Seen(version=None, capable=False)
    fleet.ask("propose", 2)
    fleet.run()
    assert fleet.state.active == 2


def test_a_canary_without_traffic_waits_and_is_taken_back_without_blame(fleet):
    fleet.ask("propose", 2)
    fleet.run(100, busy=False)
    assert fleet.state.phase == "canary"
    fleet.now += POLICY.canary_seconds
    fleet.run(10, busy=False)
    s = fleet.state
    assert (s.phase, s.active, s.rejected, s.failures, s.waiting) == ("idle", 1, (), 0, None)


def test_failures_in_a_row_start_a_cooldown_that_ends(fleet):
    fleet.tau |= {6: 1.0, 7: 1.0, 8: 4.0}
    for n in (6, 7):
        fleet.ask("propose", n)
        fleet.run()
    assert fleet.happened("cooldown")
    fleet.ask("propose", 8)
    fleet.run()
    assert (fleet.state.phase, fleet.state.waiting) == ("idle", 8)
    fleet.now += POLICY.cooldown_seconds
    fleet.run(150)
    assert fleet.state.active == 8


def test_a_pin_holds_against_proposals_until_it_is_taken_out(fleet):
    fleet.ask("pin", 4)
    fleet.run()
    fleet.ask("propose", 5)
    fleet.run()
    assert (fleet.state.active, fleet.state.waiting) == (4, 5)
    fleet.ask("promote", 2)
    assert "pinned" in fleet.happened("ignored")[0]["because"]
    fleet.ask("unpin")
    fleet.run()
    assert fleet.state.active == 5


def test_a_pin_or_promotion_of_the_running_candidate_ends_its_trial_and_keeps_its_workers(fleet):
    for verb in ("pin", "promote"):
        f = Fleet(3, {1: 2.0, 2: 2.5})
        f.ask("propose", 1)
        f.run(5)
        f.ask("propose", 2)
        f.run(3)
        assert f.state.moved
        f.ask(verb, 2)
        f.ask(verb, 2)
        assert f.state.moved
        f.run(8, busy=False)
        assert (f.state.active, f.state.pinned) == (2, 2 if verb == "pin" else None)


def test_rollback_goes_to_the_previous_version_without_canary_and_twice_is_once(fleet):
    fleet.ask("propose", 2)
    fleet.run()
    fleet.ask("rollback")
    fleet.ask("rollback")
    fleet.run(10, busy=False)
    fleet.ask("rollback")
    fleet.run(10, busy=False)
    assert (fleet.state.active, fleet.state.previous, fleet.running) == (1, None, {1})
    assert fleet.state.rejected == (2,)
    assert len(fleet.happened("ignored")) == 2


def test_rollback_of_a_candidate_twice_leaves_the_active_version_alone(fleet):
    fleet.ask("propose", 2)
    fleet.run()
    fleet.ask("propose", 4)
    fleet.run(3)
    fleet.ask("rollback")
    fleet.ask("rollback")
    fleet.run(10)
    assert (fleet.state.active, fleet.state.rejected) == (2, (4,))


def test_an_operators_choice_is_not_vetoed_by_one_worker(fleet):
    fleet.stuck = {"w0"}
    fleet.ask("promote", 2)
    fleet.run()
    assert fleet.state.active == 2
    assert fleet.happened("excused")[0]["worker"] == "w0"
    fleet.stuck.clear()
    fleet.run(2)
    assert fleet.running == {2}


def test_an_operators_choice_that_nobody_can_take_goes_back_and_loses_its_pin(fleet):
    fleet.refuses = {4}
    fleet.ask("pin", 4)
    fleet.run()
    assert (fleet.state.phase, fleet.state.active, fleet.state.pinned) == ("idle", 1, None)


def test_an_operators_choice_that_no_ready_worker_can_take_goes_back_although_another_is_not_ready(fleet):
    fleet.refuses = {4}
    fleet.change("w2", ready=False)
    fleet.ask("promote", 4)
    fleet.run(120)
    assert (fleet.state.phase, fleet.state.active) == ("idle", 1)
    assert "no worker could take v4" in fleet.happened("rolled_back")[0]["why"]


def test_pause_stops_what_goes_forward_and_nothing_that_goes_back(fleet):
    fleet.ask("propose", 2)
    fleet.run(4)
    fleet.ask("pause")
    before = fleet.state.moved
    fleet.run(50)
    assert fleet.state.moved == before
    fleet.ask("resume")
    fleet.run()
    assert fleet.state.active == 2
    fleet.ask("propose", 3 + 3)
    fleet.tau[6] = 1.0
    fleet.run(4)
    fleet.ask("pause")
    fleet.run()
    assert fleet.running == {2}


def test_a_rollback_goes_on_while_releases_are_paused(fleet):
    fleet.ask("propose", 2)
    fleet.run()
    fleet.ask("pause")
    fleet.ask("rollback")
    fleet.run(10, busy=False)
    assert (fleet.state.active, fleet.running) == (1, {1})


def test_commands_that_make_no_sense_are_events_that_say_why(fleet):
    for verb in ("promote", "reject", "unpin", "resume", "rollback"):
        fleet.ask(verb)
    ignored = fleet.happened("ignored")
    assert [e["verb"] for e in ignored] == ["promote", "reject", "unpin", "resume", "rollback"]
    assert all(e["because"] and e["who"] == "me" for e in ignored)


def test_the_newest_proposal_waits_while_another_is_tried_and_old_ones_are_not_taken(fleet):
    fleet.ask("propose", 2)
    fleet.run(3)
    fleet.ask("propose", 4)
    fleet.ask("propose", 5)
    fleet.ask("propose", 4)
    fleet.run(200)
    assert [e["to"] for e in fleet.happened("promoted")] == [1, 2, 5]


def test_a_candidate_that_gave_way_to_an_operators_choice_waits_for_its_turn(fleet):
    fleet.ask("propose", 2)
    fleet.run(3)
    fleet.ask("promote", 4)
    assert fleet.state.waiting == 2
    fleet.run(8, busy=False)
    assert fleet.state.active == 4


def test_with_no_worker_up_an_operators_choice_is_what_they_start_with(fleet):
    fleet.workers.clear()
    fleet.ask("propose", 2)
    fleet.run(5)
    assert (fleet.state.active, fleet.state.waiting) == (1, 2)
    fleet.ask("promote", 4)
    fleet.run(2)
    assert fleet.state.active == 4


def test_a_lost_state_is_taken_from_what_most_workers_run():
    tied = adopt({"a": Seen(version=3), "b": Seen(version=4)})
    assert (tied.active, tied.known) == (3, 4), "the higher one may be an unjudged candidate"
    workers = {f"w{k}": Seen(version=v) for k, v in enumerate((3, 3, 4, None))}
    assert (adopt(workers).active, adopt(workers).known) == (3, 4)
    assert adopt({"w": Seen(version=None)}) == State()
