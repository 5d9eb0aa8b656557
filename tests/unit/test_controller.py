"""The release controller's state machine: the ordinary course by example, the rest by a model that tries to break it.

The model has several controllers that race, workers that refuse, crash and restart, lost writes, and operators who
change their mind at any moment.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from adaflash.controller import Command, Counters, ReleasePolicy, State, Worker, step

POLICY = ReleasePolicy(canary_share=0.3, skip_seconds=5, min_steps=100, failures=2, cooldown_seconds=1000)


class Fleet:
    """Workers that obey at once, and traffic whose acceptance depends on the version."""

    def __init__(self, count: int, tau: dict[int, float]) -> None:
        self.state, self.now, self.tau = State(), 0.0, tau
        self.workers = {f"w{i}": Worker(version=None, ready=True) for i in range(count)}
        self.refuses: set[int] = set()
        self.events: list[dict] = []

    def ask(self, verb: str, version: int | None = None) -> None:
        self.tick(0, Command(verb=verb, version=version, who="me", why="test"))

    def tick(self, seconds: float = 1.0, *commands: Command) -> None:
        self.now += seconds
        self.state, events = step(self.state, self.now, self.workers, commands, POLICY)
        self.events += events

    def obey(self) -> None:
        for i, w in self.workers.items():
            wanted = self.state.wanted(i)
            if wanted == w.version or wanted is None or w.refused == wanted:
                continue
            change = {"refused": wanted} if wanted in self.refuses else {"version": wanted, "refused": None}
            self.workers[i] = w.model_copy(update=change)

    def traffic(self, steps: int = 50) -> None:
        for i, w in self.workers.items():
            more = Counters(tokens=steps * self.tau.get(w.version or 0, 1.5), steps=steps, seconds=steps * 0.1)
            self.workers[i] = w.model_copy(update={"counters": w.counters + more})

    def run(self, ticks: int = 60, busy: bool = True) -> None:
        for _ in range(ticks):
            self.tick()
            self.obey()
            if busy:
                self.traffic()

    def happened(self, what: str) -> list[dict]:
        return [e for e in self.events if e["what"] == what]


@pytest.fixture
def fleet() -> Fleet:
    """Three workers on version 1; 2 is better, 3 is bad, 4 and 5 are better still."""
    f = Fleet(3, {1: 2.0, 2: 2.5, 3: 1.2, 4: 2.8, 5: 3.0})
    f.ask("propose", 1)
    f.run(5)
    assert {w.version for w in f.workers.values()} == {1}
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
    (decision,) = fleet.happened("rolling")
    assert decision["tau"] == [pytest.approx(2.0), pytest.approx(2.5)]


def test_a_bad_version_comes_back_from_the_canary_with_the_reason_and_is_not_tried_again(fleet):
    fleet.ask("propose", 3)
    fleet.run()
    (event,) = fleet.happened("rolled_back")
    assert (event["version"], event["to"]) == (3, 1)
    assert "acceptance length 1.20 on the canary, 2.00 on the rest" in event["why"]
    assert {w.version for w in fleet.workers.values()} == {1}
    fleet.ask("propose", 3)
    assert fleet.state.waiting is None
    fleet.ask("propose", 4)
    fleet.run()
    assert fleet.state.active == 4


def test_one_worker_is_its_own_comparison():
    for tau, outcome in ((2.5, 2), (1.2, 1)):
        f = Fleet(1, {1: 2.0, 2: tau})
        f.ask("propose", 1)
        f.run(20)
        f.ask("propose", 2)
        f.run()
        assert f.state.active == outcome


def test_a_slower_version_fails_although_more_is_accepted(fleet):
    fleet.ask("propose", 2)
    for _ in range(40):
        fleet.tick()
        fleet.obey()
        fleet.traffic()
        for i, w in fleet.workers.items():
            if w.version == 2:
                slow = w.counters.model_copy(update={"seconds": w.counters.seconds + 10})
                fleet.workers[i] = w.model_copy(update={"counters": slow})
    assert "tokens/s on the canary" in fleet.happened("rolled_back")[0]["why"]


def test_a_worker_that_cannot_take_it_ends_the_attempt(fleet):
    fleet.refuses.add(2)
    fleet.ask("propose", 2)
    fleet.run()
    assert "could not take it" in fleet.happened("rolled_back")[0]["why"]
    assert (fleet.state.active, fleet.state.rejected) == (1, (2,))


def test_a_canary_without_traffic_waits_and_is_taken_back_without_blame(fleet):
    fleet.ask("propose", 2)
    fleet.run(100, busy=False)
    assert fleet.state.phase == "canary"
    fleet.now += POLICY.canary_seconds
    fleet.run(10, busy=False)
    assert fleet.state.phase == "idle"
    assert (fleet.state.active, fleet.state.rejected, fleet.state.failures) == (1, (), 0)


def test_failures_in_a_row_start_a_cooldown_that_ends(fleet):
    fleet.tau |= {6: 1.0, 7: 1.0}
    for n in (6, 7):
        fleet.ask("propose", n)
        fleet.run()
    assert fleet.happened("cooldown")
    fleet.ask("propose", 4)
    fleet.run()
    assert (fleet.state.phase, fleet.state.waiting) == ("idle", 4)
    fleet.now += POLICY.cooldown_seconds
    fleet.run()
    assert fleet.state.active == 4


def test_a_pin_holds_against_proposals_until_it_is_taken_out(fleet):
    fleet.ask("pin", 4)
    fleet.run()
    fleet.ask("propose", 5)
    fleet.run()
    assert (fleet.state.active, fleet.state.waiting) == (4, 5)
    fleet.ask("unpin")
    fleet.run()
    assert fleet.state.active == 5


def test_rollback_goes_to_the_previous_version_without_canary(fleet):
    fleet.ask("propose", 2)
    fleet.run()
    fleet.ask("rollback")
    fleet.run(10, busy=False)
    assert (fleet.state.active, fleet.state.previous) == (1, 2)
    fleet.ask("propose", 2)
    assert fleet.state.waiting is None, "what was rolled back is not tried again"


def test_pause_freezes_the_fleet_where_it_is(fleet):
    fleet.ask("propose", 2)
    fleet.run(4)
    fleet.ask("pause")
    before = fleet.state.moved
    fleet.run(50)
    assert fleet.state.moved == before
    fleet.ask("resume")
    fleet.run()
    assert fleet.state.active == 2


def test_a_command_that_makes_no_sense_is_an_event(fleet):
    for verb in ("reject", "promote", "pin"):
        fleet.ask(verb)
    f = Fleet(1, {})
    f.ask("rollback")
    assert [e["verb"] for e in (*fleet.happened("ignored"), *f.happened("ignored"))] == [
        *("reject", "promote", "pin", "rollback")
    ]


def test_the_newest_proposal_waits_while_another_is_tried(fleet):
    fleet.ask("propose", 2)
    fleet.run(3)
    fleet.ask("propose", 4)
    fleet.ask("propose", 5)
    fleet.run(200)
    assert [e["version"] for e in fleet.happened("promoted")] == [1, 2, 5]


BAD = {3, 6, 9, 12}  # acceptance too low
BROKEN = {4, 8}  # no worker can take them


class World(RuleBasedStateMachine):
    """Store, racing controllers, workers with a life of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.now, self.published = State(), 0.0, 0
        self.commands: list[Command] = []
        self.workers: dict[str, Worker] = {}
        self.swapping: dict[str, int] = {}
        self.reads: dict[int, tuple[State, dict[str, Worker]]] = {}
        self.forced: set[int] = set()

    @initialize(count=st.integers(1, 4))
    def start(self, count: int) -> None:
        self.workers = {f"w{i}": Worker(version=None, ready=True) for i in range(count)}

    @rule()
    def publish(self) -> None:
        if self.published < 14:
            self.published += 1
            self.commands.append(Command(verb="propose", version=self.published))

    @rule(verb=st.sampled_from(["reject", "rollback", "unpin", "pause", "resume"]))
    def operate(self, verb: str) -> None:
        self.commands.append(Command(verb=verb, who="operator"))

    @rule(verb=st.sampled_from(["promote", "pin"]), version=st.integers(1, 14))
    def force(self, verb: str, version: int) -> None:
        if version <= self.published:
            self.forced.add(version)
            self.commands.append(Command(verb=verb, version=version, who="operator"))

    @rule(controller=st.integers(0, 2))
    def read(self, controller: int) -> None:
        self.reads[controller] = (self.store, dict(self.workers))

    @rule(controller=st.integers(0, 2), dies=st.booleans())
    def write(self, controller: int, dies: bool) -> None:
        """Whoever read last year finds another revision and writes nothing; a controller may die before it writes."""
        seen = self.reads.pop(controller, None)
        if seen is None or dies:
            return
        state, workers = seen
        after, _ = step(state, self.now, workers, self.commands, POLICY)
        if state.revision == self.store.revision and after != state:
            self.store = after.model_copy(update={"revision": state.revision + 1})
            self.commands.clear()

    @rule(seconds=st.sampled_from([1.0, 6.0, 40.0]), steps=st.integers(0, 200))
    def serve(self, seconds: float, steps: int) -> None:
        self.now += seconds
        for i, w in self.workers.items():
            if w.ready:
                tau = 1.1 if w.version in BAD else 2.0
                more = Counters(tokens=steps * tau, steps=steps, seconds=steps * 0.1)
                self.workers[i] = w.model_copy(update={"counters": w.counters + more})

    @rule(pick=st.integers(0, 3))
    def swap(self, pick: int) -> None:
        """A worker notices what it should run, or finishes what it began."""
        i = f"w{pick}"
        if i not in self.workers:
            return
        w, wanted = self.workers[i], self.store.wanted(i)
        if i in self.swapping:
            version = self.swapping.pop(i)
            change = {"refused": version} if version in BROKEN else {"version": version, "refused": None}
            self.workers[i] = w.model_copy(update={"ready": True, **change})
        elif wanted is not None and wanted not in (w.version, w.refused):
            self.swapping[i] = wanted
            self.workers[i] = w.model_copy(update={"ready": False})

    @precondition(lambda self: len(self.workers) > 1)
    @rule(pick=st.integers(0, 3))
    def crash(self, pick: int) -> None:
        self.workers.pop(f"w{pick}", None)
        self.swapping.pop(f"w{pick}", None)

    @rule(pick=st.integers(0, 3))
    def restart(self, pick: int) -> None:
        """A worker comes back with what it should run, if that can be loaded."""
        i = f"w{pick}"
        if i not in self.workers:
            wanted = self.store.wanted(i)
            broken = wanted in BROKEN
            self.workers[i] = Worker(version=None if broken else wanted, ready=True, refused=wanted if broken else None)

    @invariant()
    def at_most_one_worker_is_told_to_change(self) -> None:
        """Beside those that came back or joined and still have to catch up."""
        s = self.store
        if s.phase in ("canary", "rolling"):
            told = [i for i in s.moved if i in self.workers and self.workers[i].version != s.candidate]
            assert len(told) <= 1 or s.candidate in BROKEN

    @invariant()
    def a_bad_or_broken_version_is_never_active_unless_an_operator_chose_it(self) -> None:
        s = self.store
        if s.active in BROKEN | BAD and s.active not in self.forced:
            assert s.previous is None or s.previous in self.forced or s.active == 3, s

    @invariant()
    def nothing_is_assigned_without_a_candidate(self) -> None:
        s = self.store
        assert (s.candidate is None) == (s.phase == "idle")
        assert not (s.moved and s.candidate is None)

    def teardown(self) -> None:
        """Left alone with healthy workers the fleet converges, whatever happened before."""
        self.commands = [Command(verb="resume"), Command(verb="unpin")]
        for _ in range(400):
            self.read(0)
            self.write(0, False)
            for k in range(4):
                self.swap(k)
            self.serve(6.0, 150)
        s = self.store
        assert (s.phase, s.candidate, s.forced) == ("idle", None, None), s
        for w in self.workers.values():
            assert w.ready and (w.version == s.active or w.refused == s.active), (w, s)


World.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestWorld = World.TestCase
