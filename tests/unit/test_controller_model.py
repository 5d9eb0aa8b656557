"""The release controller against a world that tries to break it.

Controllers race on one store and die between reading and writing; writes are refused when another was faster, and
commands are seen again until a write took them. Workers swap one at a time, refuse, hang, crash, drain, come back and
run no drafter at all; some versions kill whoever runs them. Operators change their mind at any moment.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from adaflash.controller import renewed, step
from adaflash.fleet import Command, Refusal, ReleasePolicy, Seen, State
from adaflash.live import Counters
from tests.unit.test_controller import more

POLICY = ReleasePolicy(
    canary_share=0.4,
    skip_seconds=5,
    min_steps=300,
    failures=2,
    cooldown_seconds=200,
    fetch_seconds=90,
    change_seconds=60,
    canary_seconds=600,
)
BAD = {3, 6, 9, 12}  # acceptance too low
BROKEN = {4, 8}  # no worker can take them
DEADLY = {7, 11}  # whoever runs them ends
VERSIONS = 14
WORKERS = 8


class World(RuleBasedStateMachine):
    """Store, command stream, racing controllers, workers with a life of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.now, self.published, self.sent = State(), 0.0, 0, 0
        self.stream: list[Command] = []
        self.workers: dict[str, Seen] = {}
        self.swapping: tuple[str, int, int] | None = None  # the swap lock: worker, version, attempt
        self.stuck: set[str] = set()
        self.away = False  # the version store
        self.reads: dict[int, tuple[State, dict[str, Seen], list[Command]]] = {}
        self.chosen: set[int] = set()  # by an operator
        self.passed: set[int] = set()  # compared with the rest
        self.alone = False  # there was a single capable worker once
        self.events: list[dict] = []
        self.processes = 0

    @initialize(count=st.integers(1, WORKERS))
    def start(self, count: int) -> None:
        for k in range(count):
            self._join(f"w{k}", None)

    def _join(self, i: str, version: int | None, **more: object) -> None:
        self.processes += 1
        process = str(self.processes)
        self.workers[i] = Seen(version=version, started=process, epoch=process, **more)

    def _send(self, verb: str, version: int | None = None, who: str = "operator") -> None:
        self.sent += 1
        self.stream.append(Command(verb=verb, version=version, who=who, id=f"{self.sent:06d}"))

    @rule()
    def publish(self) -> None:
        if self.published < VERSIONS:
            self.published += 1
            self._send("propose", self.published, "trainer")

    @rule(verb=st.sampled_from(["reject", "rollback", "unpin", "pause", "resume"]))
    def operate(self, verb: str) -> None:
        self._send(verb)

    @rule(verb=st.sampled_from(["promote", "pin", "reject"]), version=st.integers(1, VERSIONS))
    def choose(self, verb: str, version: int) -> None:
        if version <= self.published:
            if verb != "reject":
                self.chosen.add(version)
            self._send(verb, version)

    @rule(controller=st.integers(0, 2))
    def read(self, controller: int) -> None:
        applied = "" if self.store.applied == "0-0" else self.store.applied
        self.reads[controller] = (self.store, dict(self.workers), [c for c in self.stream if c.id > applied])

    @rule(controller=st.integers(0, 2), dies=st.booleans())
    def write(self, controller: int, dies: bool) -> None:
        """Whoever read an older revision writes nothing; a controller may die before it writes."""
        seen = self.reads.pop(controller, None)
        if seen is None or dies:
            return
        state, workers, commands = seen
        after, events = step(state, self.now, workers, commands, POLICY)
        if state.revision == self.store.revision and after != state:
            self.store = after.but(revision=state.revision + 1)
            self.events += events

    @rule(controller=st.integers(0, 2))
    def work(self, controller: int) -> None:
        """A controller that nothing disturbs."""
        self.read(controller)
        self.write(controller, False)

    @rule(seconds=st.sampled_from([1.0, 6.0, 40.0]), steps=st.integers(0, 200))
    def serve(self, seconds: float, steps: int) -> None:
        self.now += seconds
        for i, w in list(self.workers.items()):
            if w.version in DEADLY and w.ready and steps:
                self._die(i)
            elif w.ready:
                self.workers[i] = more(w, steps, 1.1 if w.version in BAD else 2.0)

    @rule(pick=st.integers(0, WORKERS - 1))
    def swap(self, pick: int) -> None:
        """A worker takes the lock and begins to change, or ends what it began."""
        i = f"w{pick}"
        w = self.workers.get(i)
        if w is None or not w.capable or i in self.stuck:
            return
        if self.swapping is not None and self.swapping[0] == i:
            _, version, attempt = self.swapping
            self.swapping = None
            if self.away:
                change: dict[str, object] = {"refused": Refusal(version=version, attempt=attempt, fault=False)}
            elif version in BROKEN:
                change = {"refused": Refusal(version=version, attempt=attempt)}
            else:
                change = {"version": version, "refused": None, "epoch": f"{self.now} {version}", "counters": Counters()}
            self.workers[i] = w.model_copy(update={"ready": True, **change})
            return
        wanted, attempt = self.store.wanted(i), self.store.attempt
        known = w.refused is not None and (w.refused.version, w.refused.attempt) == (wanted, attempt)
        known = known and w.refused.fault
        if self.swapping is None and not known and wanted not in (None, w.version):
            self.swapping = (i, wanted, attempt)
            self.workers[i] = w.model_copy(update={"ready": False})

    @rule()
    def nobody_looks(self) -> None:
        """Every controller is away for a while; the next one knows that."""
        self.reads.clear()
        self.now += 500
        state = renewed(self.store, self.now, self.workers)
        self.store = state.but(revision=state.revision + 1)

    @rule(away=st.booleans())
    def the_store_comes_and_goes(self, away: bool) -> None:
        self.away = away

    @rule(pick=st.integers(0, WORKERS - 1))
    def get_stuck(self, pick: int) -> None:
        if f"w{pick}" in self.workers:
            self.stuck.add(f"w{pick}")

    @rule(pick=st.integers(0, WORKERS - 1))
    def drain(self, pick: int) -> None:
        i = f"w{pick}"
        if i in self.workers and self.swapping is None:
            self.workers[i] = self.workers[i].model_copy(update={"leaving": True, "ready": False})

    @rule(pick=st.integers(0, WORKERS - 1))
    def crash(self, pick: int) -> None:
        self._die(f"w{pick}")

    @precondition(lambda self: self.workers)
    @rule()
    def all_crash(self) -> None:
        for i in list(self.workers):
            self._die(i)

    def _die(self, i: str) -> None:
        self.workers.pop(i, None)
        self.stuck.discard(i)
        if self.swapping is not None and self.swapping[0] == i:
            self.swapping = None  # the lock expires

    @rule(pick=st.integers(0, WORKERS - 1), capable=st.sampled_from([True, True, True, False]))
    def restart(self, pick: int, capable: bool) -> None:
        """A worker comes back with what it should run, if that can be loaded."""
        i, wanted = f"w{pick}", self.store.wanted(f"w{pick}")
        if self.workers.get(i) is None or self.workers[i].leaving:
            self._die(i)
            self._join(i, None if wanted in BROKEN or not capable else wanted, capable=capable)

    @invariant()
    def at_most_one_worker_is_told_to_change(self) -> None:
        """Of the processes that were told; one that came back in another process is the controller's to notice."""
        s = self.store
        told = [i for i, process in s.moved.items() if i in self.workers and self.workers[i].started == process]
        assert sum(self.workers[i].version != s.candidate for i in told) <= 1, s

    @invariant()
    def _company(self) -> None:
        self.alone = self.alone or sum(w.capable for w in self.workers.values()) <= 1

    @invariant()
    def a_candidate_exists_exactly_while_something_moves(self) -> None:
        s = self.store
        assert (s.candidate is None) == (s.phase == "idle")
        assert not s.moved or s.phase in ("canary", "rolling")
        assert s.pending == "" or s.pending in s.moved
        assert s.active != s.candidate or s.active is None

    @invariant()
    def nothing_harmful_becomes_active_by_itself(self) -> None:
        """Beside an operator's choice, the first version, and what a single worker or none could not be compared on."""
        for e in self.events:
            if e["what"] == "promoted" and e.get("origin") == "trainer":
                assert e["to"] not in BROKEN | DEADLY or e["to"] in self.chosen, e
                assert e["to"] in self.chosen | self.passed or self.alone, e
            if e["what"] == "rolling" and "tau" in e:
                self.passed.add(e["to"])
                assert e["to"] not in BAD or e["tau_rest"] <= 1.1 / (1 - POLICY.tau_loss), e  # the rest is bad too

    @invariant()
    def every_command_is_answered_once(self) -> None:
        answered = [e["command"] for e in self.events if e.get("command")]
        assert len(answered) == len(set(answered))

    @invariant()
    def what_was_rejected_is_not_tried_again_by_itself(self) -> None:
        s = self.store
        assert s.waiting is None or s.waiting not in s.rejected
        if s.candidate in s.rejected and s.phase in ("canary", "rolling"):
            assert s.origin == "rollback", s

    def teardown(self) -> None:
        """Left alone with workers that live, the fleet converges, whatever happened before."""
        self.stuck.clear()
        self.away = False
        self._send("resume")
        self._send("unpin")
        for _ in range(300):
            self.work(0)
            for k in range(WORKERS):
                self.swap(k)
                self.swap(k)
            self.serve(6.0, 150)
            for k in range(WORKERS):
                if f"w{k}" not in self.workers or self.workers[f"w{k}"].leaving:
                    self.restart(k, True)
            self.at_most_one_worker_is_told_to_change()
            self.a_candidate_exists_exactly_while_something_moves()
            self.nothing_harmful_becomes_active_by_itself()
            self.every_command_is_answered_once()
            self.what_was_rejected_is_not_tried_again_by_itself()
        s = self.store
        answered = {e["command"] for e in self.events if e.get("command")}
        assert answered == {c.id for c in self.stream}
        if s.active in DEADLY:
            return  # an operator's choice, or the first version: workers come and go, and status says so
        assert (s.phase, s.candidate, s.forced) == ("idle", None, None), s
        assert s.waiting is None or self.now < s.cooldown_until or not any(w.capable for w in self.workers.values())
        for w in self.workers.values():
            assert not w.capable or w.version == s.active or s.active in BROKEN, (w, s)


World.TestCase.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
TestWorld = World.TestCase
