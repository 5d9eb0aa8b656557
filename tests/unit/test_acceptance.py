"""Replay against a walk in plain Python."""

import torch

from adaflash.acceptance import Acceptance, replay
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


def test_tau_is_one_without_any_step():
    assert Acceptance([[], []]).tau == 1.0
    assert Acceptance([[3, 1], [2]]).tau == 2.0
