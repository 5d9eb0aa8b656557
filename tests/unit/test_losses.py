"""Every loss against its plain formula and autograd's gradient in float64, and what no loss may depend on."""

import dataclasses

import pytest
import torch

from adaflash import vocabulary
from adaflash.losses import RECIPES, LossSettings, Slots, decay_weights, distill
from adaflash.vocabulary import HiddenTeacher, TopKTeacher
from tests.reference_losses import event_log_probabilities, log_probabilities, plain_loss

V, H, WIDTH = 90, 16, 5


def batch(blocks=8, scale=1.0, seed=0):
    """Drafter states, teacher states at shared positions, head, each slot's teacher row, slots (one block is cut)."""
    g = torch.Generator().manual_seed(seed)
    block = torch.arange(blocks).repeat_interleave(WIDTH)[:-2]
    slot = torch.arange(1, WIDTH + 1).repeat(blocks)[:-2]
    n = len(block)
    hidden, states = torch.randn(n, H, generator=g) * scale, torch.randn(12, H, generator=g) * scale
    rows, token = torch.randint(0, 12, (n,), generator=g), torch.randint(0, V, (n,), generator=g)
    slots = Slots(block, slot, token, slot <= torch.randint(0, WIDTH, (blocks,), generator=g)[block])
    return hidden, states, torch.randn(V, H, generator=g), rows, slots


SETTINGS = [
    *(LossSettings(name) for name in RECIPES),
    LossSettings("adaflash", alpha=0.0),
    LossSettings("adaflash", alpha=1.0),
    LossSettings("adaflash", clip=6.0),
    LossSettings("adaflash", clip=0.4, clip_kind="entry"),
    LossSettings("draft_opd", rejected_weight=0.3, clip=6.0),
    LossSettings("dpace", dpace_floor=0.1),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s.name}-{s.alpha}-{s.clip}-{s.clip_kind}")
@pytest.mark.parametrize("rows_at_once", [(7, 200), (256, 1 << 19)])
def test_loss_and_gradient_equal_the_plain_formula(monkeypatch, settings, rows_at_once):
    monkeypatch.setattr(vocabulary, "_PRODUCT_ROWS", rows_at_once[0])
    monkeypatch.setattr(vocabulary, "_CACHE_ELEMENTS", rows_at_once[1])
    hidden, states, head, rows, slots = batch()
    h64 = hidden.double().requires_grad_()
    want = plain_loss(*log_probabilities(h64, states.double()[rows], head.double()), slots, settings)
    want.backward()
    mine = hidden.clone().requires_grad_()
    got = distill(mine, head, HiddenTeacher(states, head), rows, slots, settings)
    (got.loss * 3).backward()
    assert got.loss.item() == pytest.approx(want.item(), rel=1e-5)
    torch.testing.assert_close(mine.grad, 3 * h64.grad.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["adaflash", "tv", "draft_opd"])
def test_a_stored_top_k_teacher_gives_the_divergence_over_its_events(name):
    hidden, states, head, rows, slots = batch(scale=0.8)
    settings = LossSettings(name, alpha=0.3, clip=1e9)
    stored, ids = (states @ head.T).log_softmax(-1).topk(60)
    h64 = hidden.double().requires_grad_()
    log_p, log_q = log_probabilities(h64, states.double()[rows], head.double())
    events = event_log_probabilities(log_p, log_q, ids[rows], stored.double()[rows])
    assert (events[1].argmax(-1) == 0).all(), "the rest must not be the likeliest event"
    want = plain_loss(*events, slots, settings)
    want.backward()
    mine = hidden.clone().requires_grad_()
    got = distill(mine, head, TopKTeacher(ids, stored), rows, slots, settings)
    got.loss.backward()
    assert got.loss.item() == pytest.approx(want.item(), rel=1e-4)
    torch.testing.assert_close(mine.grad, h64.grad.float(), rtol=2e-3, atol=1e-5)


def test_a_top_k_teacher_with_the_whole_vocabulary_is_the_hidden_teacher():
    hidden, states, head, rows, slots = batch(scale=0.3)
    stored, ids = (states @ head.T).log_softmax(-1).topk(V - 1)
    exact = distill(hidden, head, HiddenTeacher(states, head), rows, slots, LossSettings())
    close = distill(hidden, head, TopKTeacher(ids, stored), rows, slots, LossSettings())
    assert close.loss.item() == pytest.approx(exact.loss.item(), rel=1e-3)


@pytest.mark.parametrize("kind", ["token", "entry"])
def test_a_duplicated_batch_has_the_same_loss_and_clipped_share(kind):
    hidden, states, head, rows, slots = batch()
    settings = LossSettings(clip=9.0 if kind == "token" else 0.3, clip_kind=kind, alpha=0.2)
    teacher = HiddenTeacher(states, head)
    once = distill(hidden, head, teacher, rows, slots, settings)
    double = {f.name: torch.cat([getattr(slots, f.name)] * 2) for f in dataclasses.fields(slots)}
    double["block"] = torch.cat([slots.block, slots.block + slots.block.max() + 1])
    twice = distill(torch.cat([hidden] * 2), head, teacher, torch.cat([rows] * 2), Slots(**double), settings)
    assert 0 < once.clipped_share < 1
    assert twice.clipped_share == pytest.approx(once.clipped_share)
    assert twice.loss.item() == pytest.approx(once.loss.item(), rel=1e-6)


@pytest.mark.parametrize("name", list(RECIPES))
@pytest.mark.parametrize("scale", [1e3, 1e-4])
def test_extreme_logits_stay_finite(name, scale):
    hidden, states, head, rows, slots = batch(scale=scale)
    hidden.requires_grad_()
    out = distill(hidden, head, HiddenTeacher(states, head), rows, slots, LossSettings(name))
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert torch.isfinite(hidden.grad).all()


def test_only_the_drafters_states_receive_a_gradient():
    hidden, states, head, rows, slots = batch()
    for t in (hidden, states, head):
        t.requires_grad_()
    distill(hidden, head, HiddenTeacher(states, head), rows, slots, LossSettings()).loss.backward()
    assert hidden.grad is not None
    assert states.grad is None and head.grad is None


def test_weights_decay_from_one_over_the_slots():
    w = decay_weights(torch.arange(1, 8), 7.0)
    assert w[0] == 1
    assert torch.allclose(w[1:] / w[:-1], torch.full((6,), float(torch.exp(torch.tensor(-1 / 7)))))


def test_agreement_argmax_and_overlap_are_reported_per_slot():
    hidden, states, head, rows, slots = batch()
    out = distill(hidden, head, HiddenTeacher(states, head), rows, slots, LossSettings(), overlap=True)
    log_p, log_q = log_probabilities(hidden, states[rows], head)
    assert torch.equal(out.argmax, log_p.argmax(-1))
    assert torch.equal(out.agreement, (log_p.argmax(-1) == log_q.argmax(-1)).float())
    want = 1 - (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    torch.testing.assert_close(out.overlap, want, rtol=1e-4, atol=1e-6)


def test_a_head_in_half_precision_costs_rounding_only():
    hidden, states, head, rows, slots = batch(scale=0.3)
    exact = distill(hidden, head, HiddenTeacher(states, head), rows, slots, LossSettings())
    half = head.bfloat16()
    rough = distill(hidden, half, HiddenTeacher(states, half), rows, slots, LossSettings())
    assert rough.loss.item() == pytest.approx(exact.loss.item(), rel=0.02)
