"""Whatever the batch looks like, the packed step is the dense formula, and sequences do not see each other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaflash.anchors import draw_anchors
from adaflash.distill import DistillConfig
from adaflash.losses import LossSettings
from tests.reference_step import reference_loss
from tests.unit.test_distill import HEAD, packed_loss
from tests.unit.test_drafter import CONFIG, EMBEDDING, features, make

SHAPES = st.fixed_dictionaries(
    {
        "block_size": st.integers(2, 9),
        "num_key_value_heads": st.sampled_from([1, 2, 4]),
        "partial_rotary_factor": st.sampled_from([0.5, 1.0]),
    }
)
BATCHES = st.lists(st.tuples(st.integers(2, 40), st.integers(1, 30)), min_size=1, max_size=4)  # (response, prompt)


@settings(max_examples=25, deadline=None)
@given(SHAPES, BATCHES, st.integers(1, 40), st.sampled_from(["adaflash", "dpace", "tv"]), st.integers(0, 99))
def test_the_packed_step_is_the_dense_formula(shape, batch, anchors, name, seed):
    drafter = make(config=CONFIG.model_copy(update=shape))
    sequences = [features(response + prompt, prompt, seed=seed + i) for i, (response, prompt) in enumerate(batch)]
    got, blocks = packed_loss(drafter, sequences, DistillConfig(anchors=anchors, loss=name, clip=1e9), seed)
    mine = torch.cat([p.grad.flatten() for p in drafter.parameters()])
    drafter.zero_grad()
    want = reference_loss(drafter, EMBEDDING, HEAD, sequences, *blocks.place, LossSettings(name, clip=1e9))
    want.backward()
    theirs = torch.cat([p.grad.flatten() for p in drafter.parameters()])
    assert got.item() == pytest.approx(want.item(), rel=2e-5)
    assert (mine - theirs).norm() <= 1e-3 * theirs.norm() + 1e-6


@settings(max_examples=40, deadline=None)
@given(BATCHES, st.integers(1, 60), st.integers(0, 99))
def test_no_conversation_gets_more_anchors_than_another_that_has_room(batch, total, seed):
    sequences = [features(response + prompt, prompt) for response, prompt in batch]
    rows, anchors = draw_anchors(sequences, total, "random", torch.Generator().manual_seed(seed))
    share = max(1, total // len(batch))
    for i, (response, prompt) in enumerate(batch):
        mine = anchors[rows == i]
        assert len(mine) == min(share, response - 1)
        assert len(set(mine.tolist())) == len(mine)
        assert all(prompt <= a <= prompt + response - 2 for a in mine.tolist())


@settings(max_examples=20, deadline=None)
@given(st.integers(4, 30), st.integers(0, 99))
def test_nothing_at_or_after_an_anchor_reaches_its_block(anchor, seed):
    f, drafter = features(36, 3, seed=seed), make()
    block = drafter.block_embeddings(EMBEDDING, f.ids[anchor : anchor + 1])
    changed = f.context.clone()
    changed[anchor:] = torch.randn_like(changed[anchor:]) * 50
    place = (torch.zeros(1, dtype=torch.long), torch.tensor([anchor]))
    outs = [drafter(drafter.encode([c]), *place, block) for c in (f.context, changed)]
    assert torch.equal(*outs)
