"""The learner without Ray: what it keeps, and what it must never keep."""

import pytest
import torch

from adaflash.checkpoint import load_drafter
from adaflash.distill import DistillConfig, RestoreError
from adaflash.rollouts import VersionSpan
from adaflash.store import VersionStore
from adaflash.versions import target_fingerprint
from tests import tiny
from tests.unit.test_rollouts import record
from trainer.config import RoundConfig, TrainerConfig
from trainer.learner import STATE, Learner, NonFinite


@pytest.fixture
def make(target_dir, drafter_dir, tmp_path):
    """A learner on the tiny target, with the weak drafter as v0; call it again for a restarted one."""
    store, fingerprint = VersionStore(tmp_path / "store"), target_fingerprint(target_dir)
    store.publish(load_drafter(drafter_dir / "weak"), torch.float32, target=fingerprint, parent=None)

    def build(**distill):
        config = TrainerConfig(
            model=target_dir,
            versions=str(tmp_path / "store"),
            state=tmp_path / "state",
            round=RoundConfig(steps=2),
            distill=DistillConfig(**distill),
        )
        return Learner(config, 0, fingerprint, 0)

    return build


def walks(count):
    rows = tiny.walks(count, 24, torch.Generator().manual_seed(8)).tolist()
    steps = [1] * 15
    fields = dict(accepted=steps, verified=[8] * 15)
    return [record(request_id=str(i), prompt_ids=r[:8], output_ids=r[8:], **fields) for i, r in enumerate(rows)]


def test_a_restarted_learner_continues_from_what_was_saved(make):
    first = make()
    first.train(walks(20))
    first.save(["1-0"])
    second = make()
    assert second.progress() == (1, 2, ["1-0"])
    assert len(second.buffer.everything()) == len(first.buffer.everything()) == 20
    a, b = first.distiller.drafter.state_dict(), second.distiller.drafter.state_dict()
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_a_round_that_ruins_the_weights_raises_and_leaves_the_durable_state_alone(make, tmp_path):
    learner = make()
    learner.train(walks(20))
    learner.save([])
    before = (tmp_path / "state" / STATE).read_bytes()
    learner.distiller.drafter.fc.weight.data[0, 0] = float("nan")
    with pytest.raises(NonFinite):
        learner.train(walks(20))
    assert (tmp_path / "state" / STATE).read_bytes() == before
    assert make().distiller.finite()


def test_a_changed_optimiser_is_refused_by_name_instead_of_failing_later(make):
    learner = make()
    learner.train(walks(20))
    learner.save([])
    with pytest.raises(RestoreError, match=r"distill.optimizer is adamw"):
        make(optimizer="adamw")


def served(learner, count, factor=1):
    """Rollouts as workers would have logged them: the active drafter's own steps on what the target says."""
    rows = walks(count)
    for r in rows:
        learner.buffer.held_out.append(r)
    steps = learner._replay(learner.active, rows)
    learner.buffer.held_out.clear()
    out = []
    for r, mine in zip(rows, steps, strict=True):
        accepted = [1] * (len(r.output_ids) - 1) if factor != 1 else mine
        assert sum(accepted) == len(r.output_ids) - 1
        spans = [VersionSpan(version="v0", start=0, end=16)]
        change = dict(accepted=accepted, verified=[8] * len(accepted), versions=spans)
        out.append(record(**(r.model_dump(exclude={"versions"}) | change)))
    return out


def test_the_gate_compares_its_replay_with_what_workers_counted(make):
    learner = make()
    learner.buffer.held_out.extend(served(learner, 12))
    verdict = learner.evaluate()
    assert verdict.served is not None
    assert verdict.served[0] == pytest.approx(verdict.served[1])
    learner.buffer.held_out.clear()
    learner._active_steps.clear()
    learner.buffer.held_out.extend(served(learner, 12, factor=0))
    assert "this judge cannot be trusted" in learner.evaluate().why
    sampled = [r.model_copy(update={"temperature": 1.0, "top_k": -1}) for r in learner.buffer.held_out]
    learner.buffer.held_out.clear()
    learner.buffer.held_out.extend(sampled)
    assert learner.evaluate().served is None


def test_a_bad_drafter_does_not_pass_the_gate(make):
    learner = make()
    learner.buffer.held_out.extend(served(learner, 12))
    for p in learner.distiller.averaged.parameters():
        p.data.normal_(std=0.02)
    verdict = learner.evaluate()
    assert not verdict.promote
    assert verdict.tau_candidate < verdict.tau_active
    assert "would fall" in verdict.why or "does not beat" in verdict.why


def test_the_baseline_follows_the_fleet_and_publishing_does_not_move_it(make):
    learner = make()
    learner.train(walks(20))
    number = learner.publish(learner.evaluate(), {}, -1)
    assert (number, learner.active_number) == (1, 0)
    learner.follow(1)
    assert learner.active_number == 1
    assert learner.publish(learner.evaluate(), {}, 57) == 58, "the fleet has heard of numbers that this store has not"
    new = learner.store.local(1)
    assert torch.equal(next(learner.active.parameters()), next(load_drafter(new).parameters()))
