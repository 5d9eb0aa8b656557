"""The learner actor: teacher, drafter and optimiser in one process; trains a round, evaluates, publishes, saves itself.

The driver calls it; its state is durable after `save` and a restarted actor continues from there.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from adaflash.acceptance import replay
from adaflash.bootstrap import target_dtype
from adaflash.checkpoint import load_drafter
from adaflash.distill import Distiller, StepReport, mean_report
from adaflash.drafter import Drafter
from adaflash.errors import UserError
from adaflash.rollouts import Rollout, unpack
from adaflash.store import open_store
from adaflash.target import Target
from adaflash.versions import fsync_path, label, verify
from trainer.buffer import Buffer, FeatureCache
from trainer.config import TrainerConfig
from trainer.gate import Verdict, judge, tau

STATE = "state.pt"
_SCHEMA = 2


class StateError(UserError):
    """A durable state that cannot be continued from."""


class NonFinite(ArithmeticError):
    """A round that ruined the weights."""


class Learner:
    """Runs as a Ray actor; one per trainer."""

    def __init__(self, config: TrainerConfig, active: int | None, fingerprint: str, niceness: int) -> None:
        if niceness:
            os.nice(niceness)  # serving comes first where both share the processor
        if config.threads:
            torch.set_num_threads(config.threads)
        self.config, self.fingerprint = config, fingerprint
        self.store = open_store(config.versions)
        self.active_number = active
        self.active = self._load_active(active)
        self.dtype = target_dtype(config.model)
        self.target = Target(config.model, self.active.config.target_layer_ids, self.dtype)
        self.active.to(self.target.device)
        drafter = Drafter(self.active.config).to(self.target.device)
        drafter.load_state_dict(self.active.state_dict())
        self.distiller = Distiller(drafter, self.target.embedding, self.target.head, config.distill, config.seed)
        self.buffer = Buffer(config.buffer, config.round.new_share, config.seed)
        self.features = FeatureCache(self.target.features, config.buffer.feature_bytes, config.round.max_sequence)
        self.rounds = 0
        self.entries: list[str] = []
        self._active_steps: dict[str, list[int]] = {}
        self._restore()

    def _load_active(self, active: int | None) -> Drafter:
        if active is None:
            raise StateError("no drafter version to start from")
        directory = self.store.local(active)
        verify(directory, target=self.fingerprint)
        return load_drafter(directory)

    def progress(self) -> tuple[int, int, list[str]]:
        """Rounds and optimiser steps behind the current weights, and the stream entries of the last durable round."""
        return self.rounds, self.distiller.steps, self.entries

    def train(self, rollouts: list[Rollout]) -> dict[str, float]:
        """One round; returns the mean loss terms and the seconds it took."""
        started = time.monotonic()
        self.buffer.add_round(rollouts)
        r = self.config.round
        reports: list[StepReport] = []
        for _ in range(r.steps):
            batch = self.buffer.draw(r.sequences)
            report = self.distiller.step(self.features.get(batch)) if batch else None
            if report is not None:
                reports.append(report)
        if not self.distiller.finite():
            # Raising makes the driver start a learner from the last durable state, without this round.
            raise NonFinite("a parameter became infinite or NaN in this round; the state before it stays")
        self.rounds += 1
        return mean_report(reports) | {"seconds": time.monotonic() - started, "steps": float(len(reports))}

    def evaluate(self) -> Verdict:
        """Replays the held-out slice with the candidate and with the active drafter, and lets the gate judge."""
        held = [r for r in self.buffer.held_out if len(r.output_ids) >= 2]
        finite = self.distiller.finite()
        if not held or not finite:
            return judge(self.config.gate, [], [], [], finite)
        candidate = self._replay(self.distiller.averaged, held)
        unknown = [r for r in held if r.request_id not in self._active_steps]
        for r, steps in zip(unknown, self._replay(self.active, unknown) if unknown else [], strict=True):
            self._active_steps[r.request_id] = steps
        active = [self._active_steps[r.request_id] for r in held]
        return judge(self.config.gate, [r.domain for r in held], candidate, active, finite, self._served(held))

    def _served(self, held: list[Rollout]) -> tuple[float, float] | None:
        """Tau of the active version on held-out requests that it served alone: by the workers' counts, and replayed.

        Where the two differ the replay does not see what workers do, and its verdicts mean nothing.
        """
        mine = [r for r in held if self._comparable(r)]
        if len(mine) < self.config.gate.min_held_out:
            return None
        # A stop may cut a request's last step short.
        return tau([r.accepted[:-1] for r in mine]), tau([self._active_steps[r.request_id][:-1] for r in mine])

    def _comparable(self, r: Rollout) -> bool:
        """Greedy, in whole blocks, by one version, not cut: what the replay does."""
        whole = all(v == self.active.config.block_size for v in r.verified)
        short = len(r.prompt_ids) + len(r.output_ids) <= self.config.round.max_sequence
        alone = {s.version for s in r.versions} == {label(self.active_number or 0)}
        return r.greedy and whole and short and alone and len(r.accepted) > 1

    def _replay(self, drafter: Drafter, rollouts: list[Rollout]) -> list[list[int]]:
        return replay(drafter, self.features.get(rollouts), self.target.embedding, self.target.head).steps

    def follow(self, active: int) -> None:
        """Takes another version as the one that a candidate has to beat: the fleet's, whoever chose it."""
        if active != self.active_number:
            self.active = self._load_active(active).to(self.target.device)
            self.active_number = active
            self._active_steps.clear()

    def publish(self, verdict: Verdict, training: dict[str, Any], known: int) -> int:
        """Writes the candidate as the next version; returns its number. `known`: the highest the fleet has heard of."""
        manifest = self.store.publish(
            self.distiller.averaged,
            self.dtype,
            target=self.fingerprint,
            parent=self.active_number,
            training=training | {"rounds": self.rounds, "optimizer_steps": self.distiller.steps},
            gate=verdict.report(),
            # Where the store was emptied, its numbers must not be used for other contents.
            least=known + 1,
        )
        return manifest.number

    def save(self, entries: list[str]) -> None:
        """Makes everything that the rounds so far produced durable, atomically.

        `entries` are the stream entries that are used but not acknowledged yet: a restart acknowledges them instead of
        training on them again.
        """
        home = self.config.state
        home.mkdir(parents=True, exist_ok=True)
        state = {
            "schema": _SCHEMA,
            "fingerprint": self.fingerprint,
            "rounds": self.rounds,
            "entries": entries,
            "distiller": self.distiller.state(),
            "seen": self.buffer.seen(),
            "rollouts": [torch.frombuffer(bytearray(r.pack()), dtype=torch.uint8) for r in self.buffer.everything()],
        }
        scratch = home / (STATE + ".tmp")
        with scratch.open("wb") as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
        scratch.rename(home / STATE)
        fsync_path(home)

    def _restore(self) -> None:
        state = read_state(self.config.state, self.fingerprint)
        if state is None:
            return
        self.distiller.restore(state["distiller"])
        self.rounds, self.entries = state["rounds"], state["entries"]
        self.buffer.restore([unpack(bytes(t.numpy())) for t in state["rollouts"]], state["seen"])


def read_state(home: Path, fingerprint: str) -> dict[str, Any] | None:
    """The durable state in `home`, None if there is none; StateError if it cannot be continued from."""
    path = home / STATE
    if not path.is_file():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise StateError(f"{path} cannot be read ({type(error).__name__}); move it away to start afresh") from error
    if state.get("schema") != _SCHEMA or state.get("fingerprint") != fingerprint:
        raise StateError(f"{path} belongs to another target or release; move it away or give another --state")
    return state
