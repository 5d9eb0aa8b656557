"""Replay against a walk in plain Python."""

import pytest
import torch

from adaflash.acceptance import Acceptance, Step, replay
from tests import reference
from tests.unit.test_drafter import CONFIG, EMBEDDING, features, make


def naive(drafter, f, head):
    """One block at a time through the reference forward."""
    weights, steps, anchor, ids = drafter.state_dict(), [], f.prompt, f.ids.tolist()
    while anchor < len(ids) - 1:
        block = drafter.block_embeddings(EMBEDDING, torch.tensor([ids[anchor]]))[0]
        hidden = reference.draft_hidden(CONFIG, weights, f.context[:anchor], block)
        proposed = (hidden[1:] @ head.T).argmax(-1).tolist()
        run = 0
        while run < len(proposed) and anchor + 1 + run < len(ids) and proposed[run] == ids[anchor + 1 + run]:
            run += 1
        steps.append(min(run + 1, len(ids) - 1 - anchor))
        anchor += steps[-1]
    return steps


def test_replay_walks_as_a_worker_does():
    drafter = make()
    head = torch.randn(60, 32, generator=torch.Generator().manual_seed(2))
    head[7] *= 6  # a favourite token, so that some drafts are right
    for seed in range(4):
        f = features(24, 5, seed=seed)
        f.ids[8:14] = 7
        assert replay(drafter, [f], EMBEDDING, head).steps[0] == naive(drafter, f, head)


def test_steps_cover_the_response_after_its_first_token_exactly():
    drafter, head = make(), torch.randn(60, 32)
    got = replay(drafter, [features(30, 4), features(6, 5), features(5, 5)], EMBEDDING, head)
    assert [sum(s) for s in got.steps] == [30 - 4 - 1, 0, 0]


def walks(*emitted):
    return Acceptance([[Step(0, e - 1, 6, e) for e in walk] for walk in emitted])


def test_tau_is_one_without_any_step():
    assert walks([], []).tau == 1.0
    assert walks([3, 1], [2]).tau == 2.0


def test_tau_by_domain_and_by_output_position():
    a = Acceptance([[Step(0, 2, 6, 3), Step(3, 0, 6, 1)], [Step(0, 4, 6, 5), Step(5, 1, 6, 2)]])
    assert a.by(["math", "code"]) == {"code": 3.5, "math": 2.0}
    assert a.by_position(4) == {0: 3.0, 4: 2.0}


def test_slot_acceptance_is_conditional_and_ignores_slots_after_the_end():
    # Runs of 2, 0 and 1; the last step is cut by the end of its sequence, so its slot 2 is unknown.
    a = Acceptance([[Step(0, 2, 6, 3), Step(3, 0, 6, 1), Step(4, 1, 6, 1)]])
    assert a.per_slot(4) == [pytest.approx(2 / 3), 1.0, 0.0]


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_a_verify_rule_limits_what_a_step_can_take(limit):
    drafter = make()
    head = torch.randn(60, 32, generator=torch.Generator().manual_seed(2))
    head[7] *= 6
    f = features(24, 5)
    f.ids[8:14] = 7
    free = replay(drafter, [f], EMBEDDING, head)
    held = replay(drafter, [f], EMBEDDING, head, lambda _, states: torch.full((len(states),), limit))
    assert max(max(s) for s in free.steps) > 2
    assert all(s.emitted <= limit and s.verified == limit for s in held.walks[0])
    assert held.verified == limit
    assert sum(held.steps[0]) == sum(free.steps[0])
