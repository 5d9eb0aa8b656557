"""One optimiser step: what is trained, on which places, with which labels, and what it must not depend on."""

import dataclasses

import pytest
import torch

from adaflash.anchors import accepted_slots, draw_anchors, step_starts
from adaflash.distill import FROZEN_CONTEXT, DistillConfig, Distiller, RestoreError, draw_blocks
from adaflash.drafter import Drafter
from adaflash.losses import RECIPES, LossSettings
from tests.reference_step import reference_loss
from tests.unit.test_drafter import CONFIG, EMBEDDING, features, make

HEAD = torch.randn(60, 32, generator=torch.Generator().manual_seed(9))


def distiller(drafter=None, **config):
    return Distiller(drafter or make(), EMBEDDING, HEAD, DistillConfig(**{"anchors": 12} | config), seed=0)


def packed_loss(drafter, batch, config, seed=0):
    """Loss of the packed step and its anchors, with gradients in the drafter."""
    blocks = draw_blocks(drafter, EMBEDDING, batch, config, torch.Generator().manual_seed(seed))
    hidden = drafter(drafter.encode([f.context for f in batch]), *blocks.place, blocks.embeddings)
    out = blocks.loss(hidden, HEAD, config, overlap=False)
    out.loss.backward()
    return out.loss, blocks


@pytest.mark.parametrize("name", [n for n in RECIPES if n != "draft_opd"])
def test_loss_and_gradients_of_a_step_equal_the_dense_reference(name):
    drafter, batch = make(), [features(40, 3), features(11, 4, seed=3), features(25, 9, seed=4)]
    got, blocks = packed_loss(drafter, batch, DistillConfig(anchors=18, loss=name, clip=1e9))
    mine = {n: p.grad.clone() for n, p in drafter.named_parameters()}
    drafter.zero_grad()
    want = reference_loss(drafter, EMBEDDING, HEAD, batch, *blocks.place, LossSettings(name, clip=1e9))
    want.backward()
    assert got.item() == pytest.approx(want.item(), rel=1e-5)
    for n, p in drafter.named_parameters():
        torch.testing.assert_close(mine[n], p.grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=n: f"{n}: {m}")


def test_each_sequence_gets_the_same_number_of_anchors_inside_its_response():
    batch = [features(40, 3), features(30, 20, seed=2)]
    rows, anchors = draw_anchors(batch, 12, "random", torch.Generator().manual_seed(0))
    assert rows.tolist().count(0) == rows.tolist().count(1) == 6
    for row, anchor in zip(rows.tolist(), anchors.tolist(), strict=True):
        assert batch[row].prompt <= anchor <= len(batch[row].ids) - 2


def logged(length, prompt, accepted, seed=0):
    return dataclasses.replace(features(length, prompt, seed=seed), accepted=accepted)


def test_rejection_anchors_are_where_logged_steps_began():
    f = logged(20, 4, (3, 1, 5, 6))
    assert step_starts(f) == [4, 7, 8, 13]
    _, anchors = draw_anchors([f], 3, "rejections", torch.Generator().manual_seed(0))
    assert set(anchors.tolist()) <= {4, 7, 8, 13} and len(anchors) == 3
    _, some = draw_anchors([f, features(30, 3)], 8, "rejections", torch.Generator().manual_seed(0))
    assert len(some) == 8, "a sequence without a log falls back to random places"


def test_a_log_longer_than_the_sequence_stops_at_its_end():
    assert step_starts(logged(9, 4, (3, 1, 5, 6))) == [4, 7]


def test_accepted_slots_follow_the_logged_steps():
    f = logged(20, 4, (3, 1, 5, 6))
    got = accepted_slots([f], torch.zeros(4, dtype=torch.long), torch.tensor([4, 5, 7, 8]), torch.arange(1, 6))
    assert got.tolist() == [
        [True, True, False, False, False],
        [True, False, False, False, False],
        [False] * 5,
        [True, True, True, True, False],
    ]


def test_a_response_without_a_token_to_draft_changes_nothing():
    d = distiller()
    before = [p.clone() for p in d.drafter.parameters()]
    assert d.step([features(4, 4), features(5, 4)]) is None
    assert all(torch.equal(a, b) for a, b in zip(before, d.drafter.parameters(), strict=True))


def test_a_response_shorter_than_a_block_is_trained_on():
    report = distiller().step([features(7, 4)])
    assert report is not None and 0 < report.slots < 12 * (CONFIG.block_size - 1)


def test_gradients_reach_every_drafter_parameter_and_nothing_else():
    drafter = make()
    packed_loss(drafter, [features(40, 3)], DistillConfig(anchors=12))
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in drafter.parameters())
    assert EMBEDDING.grad is None and HEAD.grad is None


def test_company_in_the_batch_does_not_change_a_sequences_gradient():
    """Loss of two sequences together = slot-weighted mean of each alone: nothing leaks between them."""
    a, b = features(40, 3), features(22, 4, seed=3)
    config = DistillConfig(anchors=200, loss="sft")  # all anchors of both, uniform weights
    losses, counts = [], []
    for batch in ([a], [b], [a, b]):
        loss, blocks = packed_loss(make(), batch, config)
        losses.append(loss.item())
        counts.append(int(blocks.inside.sum()))
    assert counts[0] + counts[1] == counts[2]
    together = (losses[0] * counts[0] + losses[1] * counts[1]) / counts[2]
    assert losses[2] == pytest.approx(together, rel=1e-5)


def test_a_later_token_does_not_change_an_earlier_block():
    """The block's own slots are mask tokens: neither ids nor context from the anchor on may matter, but the labels."""
    f = features(30, 3)
    late = dataclasses.replace(f, ids=f.ids.clone(), context=f.context.clone())
    late.ids[13:] = 1
    late.context[12:] += 5
    drafter = make()
    anchors = torch.tensor([5, 9, 12])
    outs = []
    for x in (f, late):
        block = drafter.block_embeddings(EMBEDDING, x.ids[anchors])
        outs.append(drafter(drafter.encode([x.context]), torch.zeros(3, dtype=torch.long), anchors, block))
    assert torch.equal(*outs)


def test_the_label_of_slot_k_is_the_targets_prediction_at_anchor_plus_k_minus_one():
    """A teacher whose states name their own position shows which position each slot is compared with."""
    f = features(12, 3)
    final = torch.arange(10.0)[:, None].expand(10, 32)  # row r: target position prompt - 1 + r
    f = dataclasses.replace(f, final=final)
    blocks = draw_blocks(make(), EMBEDDING, [features(9, 2), f], DistillConfig(anchors=40), torch.Generator())
    second = blocks.place[0][blocks.slots.block] == 1
    anchor = blocks.place[1][blocks.slots.block]
    position = blocks.teacher_states[blocks.rows][second, 0] + f.prompt - 1
    assert torch.equal(position.long(), (anchor + blocks.slots.slot - 1)[second])
    assert torch.equal(blocks.slots.token[second], f.ids[(anchor + blocks.slots.slot)[second]])


@pytest.mark.parametrize("config", [{}, {"loss": "draft_opd", "anchors_at": "mixed"}, {"optimizer": "adamw"}])
def test_training_lowers_the_loss_on_what_it_trains_on(config):
    rate = {"learning_rate": 3e-3} if config.get("optimizer") else {}
    d = distiller(anchors=32, **config, **rate)
    batch = [logged(40, 3, (2,) * 20), logged(36, 4, (3,) * 12, seed=3)]
    reports = [d.step(batch) for _ in range(40)]
    assert reports[-1].loss < 0.6 * reports[0].loss


def test_a_frozen_context_side_stays_bit_equal():
    d = distiller(freeze_context=True)
    before = {n: p.clone() for n, p in d.drafter.named_parameters()}
    for _ in range(3):
        d.step([features(40, 3)])
    for n, p in d.drafter.named_parameters():
        frozen = any(part in n for part in FROZEN_CONTEXT)
        assert torch.equal(before[n], p) == frozen, n
        assert torch.equal(before[n], dict(d.averaged.named_parameters())[n]) == frozen, n


def test_heads_learn_beside_the_drafter_without_moving_it():
    plain = distiller()
    config = CONFIG.with_heads(length_head=16, confidence_head=True)
    headed = Drafter(config)
    headed.load_state_dict(make().state_dict(), strict=False)
    start = {n: p.clone() for n, p in headed.named_parameters()}
    with_heads = distiller(headed)
    for _ in range(4):
        plain.step([features(40, 3)])
        with_heads.step([features(40, 3)])
    mine = dict(with_heads.drafter.named_parameters())
    for n, p in plain.drafter.named_parameters():
        assert torch.equal(p, mine[n]), n
    for n, p in mine.items():
        if n.startswith(("length_head.", "confidence_head.")):
            assert not torch.equal(p, start[n]), n
            assert torch.equal(p, dict(with_heads.averaged.named_parameters())[n]), n


def test_sampled_traffic_labels_the_length_by_the_expected_run(monkeypatch):
    """Under sampling the served token is a coin toss; 1 - TV per slot is what acceptance will be."""
    config = CONFIG.with_heads(length_head=16, confidence_head=False)
    seen = []
    monkeypatch.setattr("adaflash.distill.length_loss", lambda logit, run, block: seen.append(run) or logit.sum())
    for greedy in (True, False):
        drafter = Drafter(config)
        drafter.load_state_dict(make().state_dict(), strict=False)
        distiller(drafter).step([dataclasses.replace(features(40, 3), greedy=greedy)])
    assert torch.equal(seen[0], seen[0].round()) and not torch.equal(seen[1], seen[1].round())
    assert (seen[1] > 0).all() and (seen[1] < CONFIG.block_size).all()


def test_a_restored_distiller_keeps_the_rates_of_its_own_configuration():
    state = distiller().state()
    other = distiller(learning_rate=0.005, vector_learning_rate=1e-4)
    other.restore(state)
    assert [o.param_groups[0]["lr"] for o in other.optimizers.all] == [0.005, 1e-4]


@pytest.mark.parametrize(
    ("change", "key"), [({"optimizer": "adamw"}, "optimizer"), ({"freeze_context": True}, "freeze")]
)
def test_a_state_with_other_momenta_is_refused_by_the_settings_name(change, key):
    with pytest.raises(RestoreError, match=f"distill.{key}"):
        distiller(**change).restore(distiller().state())


def test_a_state_without_heads_is_refused_by_a_drafter_with_heads():
    with pytest.raises(RestoreError, match="length_head is 16"):
        distiller(Drafter(CONFIG.with_heads(length_head=16, confidence_head=False))).restore(distiller().state())


def test_a_compiled_step_computes_the_same():
    batch = [features(40, 3), features(36, 4, seed=3)]
    plain, compiled = distiller(), distiller(compile=True)
    for _ in range(2):
        assert plain.step(batch).loss == pytest.approx(compiled.step(batch).loss, rel=1e-4)
    assert compiled.averaged.state_dict().keys() == plain.averaged.state_dict().keys()


def test_a_restored_distiller_continues_exactly():
    first = distiller()
    batch = [features(40, 3), features(36, 4, seed=3)]
    for _ in range(3):
        first.step(batch)
    state = first.state()
    second = distiller(make(seed=5))
    second.restore(state)
    assert [first.step(batch) for _ in range(2)] == [second.step(batch) for _ in range(2)]
