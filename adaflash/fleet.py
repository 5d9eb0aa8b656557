"""The release controller's data: what it sees of workers, what it is asked, and the state that it keeps in Redis.

The state holds everything a restarted or competing controller needs; workers read from it which version to run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from adaflash.live import CanaryPolicy, Counters, Frozen

Phase = Literal["idle", "canary", "rolling", "returning"]
Verb = Literal["propose", "promote", "reject", "rollback", "pin", "unpin", "pause", "resume", "unreadable"]
Origin = Literal["trainer", "operator", "rollback"]
Event = dict[str, Any]
REMEMBERED = 64  # rejected versions


class Refusal(Frozen):
    """A version that a worker could not take, and at which attempt of the controller.

    `fault`: of the version; otherwise of what should have brought it, such as a store that does not answer.
    """

    version: int
    attempt: int
    why: str = ""
    fault: bool = True


class Seen(Frozen):
    """One live worker. `version` None: it runs none that has a number. `epoch`: changes when its counters restart."""

    version: int | None
    ready: bool = True
    leaving: bool = False
    failed: bool = False
    capable: bool = True  # it has a drafter that can be exchanged
    started: str = ""  # names the process
    epoch: str = ""
    refused: Refusal | None = None
    counters: Counters = Counters()


class Command(Frozen):
    """Something that a trainer or an operator asks for. `id`: its place in the stream of commands.

    The verb `unreadable` stands for an entry of the stream that no controller of this release understands.
    """

    verb: Verb
    id: str = ""
    version: int | None = None
    who: str = ""
    why: str = ""


class ReleasePolicy(CanaryPolicy):
    """How a candidate gets to the fleet."""

    canary_share: float = Field(0.2, gt=0, lt=1, description="share of the workers that try a candidate, at least one")
    canary_traffic: float = Field(
        0.2, gt=0, le=1, description="share of the requests that may go to workers that try a candidate"
    )
    canary_seconds: float = Field(3600, gt=0, description="a candidate that cannot be judged for so long is taken back")
    lone_seconds: float = Field(
        60, ge=0, description="a worker that was the only one for so long takes candidates without a canary"
    )
    fetch_seconds: float = Field(
        900, gt=0, description="a worker that has not begun to change after this is left out: its store is too slow"
    )
    change_seconds: float = Field(180, gt=0, description="a worker that has not ended its change after this has failed")
    watch_seconds: float = Field(
        600, ge=0, description="workers that end so soon after a version reached them all send it back"
    )
    failures: int = Field(3, gt=0, description="failed candidates in a row that start a cool-down")
    cooldown_seconds: float = Field(1800, ge=0, description="no candidate is tried for this long")


class Mark(Frozen):
    """A worker's counters when the comparison began."""

    epoch: str
    counters: Counters


class State(Frozen):
    """Everything about a model's release; `revision` grows with every write, `applied` is the last command's id."""

    revision: int = 0
    applied: str = "0-0"
    active: int | None = None
    previous: int | None = None
    known: int = -1  # highest proposal ever taken up
    waiting: int | None = None  # newest proposal that was not tried
    forced: int | None = None  # an operator's choice that waits for its turn
    forced_origin: Origin = "operator"
    pinned: int | None = None
    paused: bool = False
    rejected: tuple[int, ...] = ()
    failures: int = 0
    cooldown_until: float = 0.0
    watched: Mapping[str, str] = Field(default={})  # workers that took the active version, with their processes
    watch_until: float = 0.0

    phase: Phase = "idle"
    candidate: int | None = None
    origin: Origin = "trainer"
    compared: bool = True  # False: a lone worker takes it unseen
    alone_since: float | None = None  # since when there is one worker at most
    attempt: int = 0  # counts candidates, so that an old refusal does not speak about a new try
    entered_at: float = 0.0  # when the phase began
    moved: Mapping[str, str] = Field(
        default={}
    )  # workers that are to run the candidate, with the name of the process that was told
    pending: str = ""  # the one of them that has not been seen to run it
    changing: bool = False  # that one has begun to
    told_at: float = 0.0  # when it was told, or had begun
    excused: tuple[str, ...] = ()  # workers that cannot take an operator's choice
    harmed: int = 0  # those of them that ended or failed with it
    settled_at: float | None = None  # when the canaries ran the candidate
    base: Mapping[str, Mark] = Field(default={})
    reason: str = ""  # why the candidate is taken back
    blame: bool = False  # whether that is its fault

    def wanted(self, worker: str) -> int | None:
        """The version that `worker` should run; None: what it runs."""
        return self.candidate if worker in self.moved and self.candidate is not None else self.active

    def needed(self) -> set[int]:
        """Versions that must not be deleted."""
        found = (self.active, self.previous, self.candidate, self.waiting, self.forced, self.pinned)
        return {n for n in found if n is not None}

    def but(self, **changes: Any) -> State:
        """A copy with changes."""
        return self.model_copy(update=changes)


Workers = Mapping[str, Seen]
