"""One optimiser step: what is trained, on which places, with which labels."""

import pytest
import torch

from adaflash.distill import DistillConfig, Distiller
from tests.unit.test_drafter import CONFIG, EMBEDDING, features, make


def distiller(anchors=12):
    head = torch.randn(60, 32, generator=torch.Generator().manual_seed(9))
    return Distiller(make(), EMBEDDING, head, DistillConfig(anchors=anchors), seed=0)


def test_each_sequence_gets_the_same_number_of_anchors_inside_its_response():
    d = distiller(anchors=12)
    batch = [features(40, 3), features(30, 20, seed=2)]
    rows, anchors = d._draw_anchors(batch)
    assert rows.tolist().count(0) == rows.tolist().count(1) == 6
    for row, anchor in zip(rows.tolist(), anchors.tolist(), strict=True):
        assert batch[row].prompt <= anchor <= len(batch[row].ids) - 2


def test_a_response_without_a_token_to_draft_changes_nothing():
    d = distiller()
    before = [p.clone() for p in d.drafter.parameters()]
    assert d.step([features(4, 4), features(5, 4)]) is None
    assert all(torch.equal(a, b) for a, b in zip(before, d.drafter.parameters(), strict=True))


def test_gradients_reach_every_drafter_parameter_and_nothing_else():
    d = distiller()
    d.step([features(40, 3)])
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in d.drafter.parameters())
    assert d.embedding.grad is None and d.head.grad is None


def test_the_label_of_slot_k_is_the_targets_prediction_at_anchor_plus_k_minus_one(monkeypatch):
    """A teacher that encodes its own position in its argmax shows which position each slot was compared with."""
    seen = {}

    def spy(hidden, teacher, head, weight, **_):
        seen["teacher"] = teacher.argmax(-1)
        raise RuntimeError("seen")

    monkeypatch.setattr("adaflash.distill.distill", spy)
    d = distiller(anchors=1)
    f = features(12, 3)
    final = torch.zeros(10, 32)
    final[torch.arange(10), torch.arange(10)] = 1.0  # row r: target position prompt - 1 + r
    f = type(f)(f.ids, f.prompt, f.context, final)
    monkeypatch.setattr(d, "_draw_anchors", lambda _: (torch.tensor([0]), torch.tensor([5])))
    with pytest.raises(RuntimeError, match="seen"):
        d.step([f])
    positions = [f.prompt - 1 + r for r in seen["teacher"].tolist()]
    assert positions == [5 + k - 1 for k in range(1, CONFIG.block_size)]


def test_training_lowers_the_loss_on_what_it_trains_on():
    d, batch = distiller(anchors=32), [features(40, 3), features(36, 4, seed=3)]
    reports = [d.step(batch) for _ in range(40)]
    assert reports[-1].loss < 0.5 * reports[0].loss
