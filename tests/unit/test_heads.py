"""Length and confidence heads: rules, labels, calibration, and that fitting them leaves the drafter alone."""

import math
from types import SimpleNamespace

import pytest
import torch

from adaflash.acceptance import length_rule, replay, survival_rule
from adaflash.checkpoint import load_drafter
from adaflash.distill import heads_loss
from adaflash.fit_heads import FitError, fit_heads, with_heads
from adaflash.heads import (
    ConfidenceHead,
    LengthHead,
    confidence_loss,
    expected_calibration_error,
    fit_temperatures,
    length_label,
    survival,
    verify_length,
)
from adaflash.target import Target
from tests import tiny


def test_the_length_head_is_the_papers():
    """[mean ; last] -> Linear -> SiLU -> x + SiLU(Linear x) -> Linear, on all rows of the block."""
    head, block = LengthHead(8, 4), torch.randn(3, 5, 8)
    f = torch.cat([block.mean(1), block[:, -1]], -1)
    x = f @ head.down.weight.T + head.down.bias
    x = x * torch.sigmoid(x)
    y = x @ head.res[0].weight.T + head.res[0].bias
    want = (x + y * torch.sigmoid(y)) @ head.out.weight.T + head.out.bias
    torch.testing.assert_close(head(block), want[:, 0])


def test_heads_never_pull_on_the_block():
    block = torch.randn(3, 5, 8, requires_grad=True)
    (LengthHead(8, 4)(block).sum() + ConfidenceHead(8, 4)(block).sum()).backward()
    assert block.grad is None


@pytest.mark.parametrize(("ratio", "rows"), [(0.0, 1), (0.1, 2), (0.5, 10), (0.77, 16), (1.0, 16)])
def test_the_verify_length_is_rounded_and_clamped(ratio, rows):
    assert verify_length(torch.tensor([ratio]), 16, rate=1.3).tolist() == [rows]


def test_labels_count_the_anchor_and_stay_in_the_block():
    assert length_label(torch.tensor([0, 3, 15, 20]), 16).tolist() == [1 / 16, 4 / 16, 1.0, 1.0]


def test_survival_is_the_product_of_what_came_before():
    assert survival(torch.tensor([0.5, 0.5, 1.0])).tolist() == [0.5, 0.25, 0.25]


def test_slots_outside_the_sequence_do_not_count_for_the_confidence():
    logits, label = torch.zeros(1, 3), torch.tensor([[0.9, 0.1, 0.0]])
    one = confidence_loss(logits, label, torch.tensor([[True, False, False]]))
    other = confidence_loss(logits, torch.tensor([[0.9, 1.0, 1.0]]), torch.tensor([[True, False, False]]))
    assert one == other


def test_calibration_error_of_known_cases():
    p = torch.tensor([0.05] * 10 + [0.95] * 10)
    right = torch.tensor([0.0] * 10 + [1.0] * 10)
    assert expected_calibration_error(p, right) == pytest.approx(0.05)
    assert expected_calibration_error(p, 1 - right) == pytest.approx(0.95)
    assert expected_calibration_error(torch.empty(0), torch.empty(0)) == 0.0


def test_temperatures_undo_overconfidence_per_slot():
    g = torch.Generator().manual_seed(0)
    true = torch.randn(4000, 2, generator=g)
    outcome = (torch.rand(4000, 2, generator=g) < torch.sigmoid(true)).float()
    raw = true * torch.tensor([3.0, 0.5])
    t = fit_temperatures(raw, outcome, torch.ones_like(outcome, dtype=torch.bool))
    assert t.tolist() == pytest.approx([3.0, 0.5], rel=0.15)


def test_a_slot_that_was_never_reached_borrows_the_common_temperature():
    raw, inside = torch.randn(100, 2), torch.ones(100, 2, dtype=torch.bool)
    inside[:, 1] = False
    t = fit_temperatures(raw, (raw > 0).float() * inside, inside)
    assert torch.isfinite(t).all() and t[1] == pytest.approx(float(t[0]), rel=1e-6)
    assert fit_temperatures(raw, raw, torch.zeros_like(inside)).tolist() == [1.0, 1.0]


@pytest.fixture(scope="module")
def traffic(target_dir, drafter_dir):
    """The weak drafter with heads, its target, and features of the target's walks."""
    drafter = with_heads(load_drafter(drafter_dir / "weak"), 0)
    target = Target(target_dir, drafter.config.target_layer_ids, torch.float32)
    prompts = tiny.walks(24, 8, torch.Generator().manual_seed(5))
    mask = torch.ones_like(prompts)
    sequences = target.model.generate(prompts, attention_mask=mask, max_new_tokens=40, do_sample=False).tolist()
    target.forget()
    return target, target.features(sequences, [8] * 24)


def fit(drafter_dir, traffic, file, steps=60, **change):
    drafter = with_heads(load_drafter(drafter_dir / "weak"), 0)
    target, features = traffic
    options = dict(steps=steps, rate=3e-3, seed=0, progress=lambda *_: None) | change
    return drafter, fit_heads(drafter, target, features, file, **options)


def test_fitting_saves_verification_and_leaves_the_trunk_bit_equal(drafter_dir, traffic, tmp_path):
    drafter, r = fit(drafter_dir, traffic, tmp_path / "f")
    start = load_drafter(drafter_dir / "weak").state_dict()
    assert all(torch.equal(start[n], p) for n, p in drafter.trunk_parameters())
    assert r.error_after <= r.error_before
    assert r.by_survival.verified < r.static.verified == 8
    assert r.by_survival.tau / r.by_survival.verified > r.static.tau / r.static.verified
    assert r.by_survival.tau > 0.7 * r.static.tau
    target, features = traffic
    for rule in (length_rule(1.3), survival_rule(0.3)):
        a = replay(drafter, features, target.embedding, target.head, rule)
        assert all(1 <= s.verified <= 8 and s.emitted <= s.verified for walk in a.walks for s in walk)


def test_fitting_goes_on_where_it_was_interrupted(drafter_dir, traffic, tmp_path):
    whole, _ = fit(drafter_dir, traffic, tmp_path / "whole", steps=55)

    class Enough(Exception):
        pass

    def stop(what, done, total):
        if done == 52:
            raise Enough

    with pytest.raises(Enough):
        fit(drafter_dir, traffic, tmp_path / "parts", steps=55, progress=stop)
    seen = []
    again, _ = fit(drafter_dir, traffic, tmp_path / "parts", steps=55, progress=lambda w, n, t: seen.append(n))
    assert seen[0] == 51
    for n, p in whole.named_parameters():
        torch.testing.assert_close(p, dict(again.named_parameters())[n])


def test_what_an_interrupted_fit_left_is_not_taken_for_another_drafters(drafter_dir, traffic, tmp_path):
    fit(drafter_dir, traffic, tmp_path / "f", steps=50)
    with pytest.raises(FitError, match="another drafter, samples, seed or rate"):
        fit(drafter_dir, traffic, tmp_path / "f", steps=60, seed=1)


def test_three_samples_are_too_few_to_fit_on(drafter_dir, traffic, tmp_path):
    target, features = traffic
    with pytest.raises(FitError, match="at least four"):
        fit(drafter_dir, (target, features[:3]), tmp_path / "f")


def test_a_confidence_is_taught_what_was_accepted_where_the_slots_before_it_were():
    """Greedy blocks teach acceptance itself, sampled ones its expectation 1 - TV; unreached slots teach nothing."""
    logits = torch.tensor([[0.3, -0.2, 0.5], [0.1, 0.4, -0.6]])
    drafts, served = torch.tensor([[1, 2, 3], [1, 2, 3]]), torch.tensor([[1, 9, 3], [9, 9, 9]])
    overlap = torch.tensor([[0.1, 0.1, 0.1], [0.8, 0.5, 0.4]])
    blocks = SimpleNamespace(
        spread=lambda values: values.view(2, 3),
        token=served,
        inside=torch.ones(2, 3, dtype=torch.bool),
        greedy=torch.tensor([True, False]),
    )
    drafter = SimpleNamespace(length_head=None, confidence_head=SimpleNamespace(raw=lambda hidden: logits))
    loss = heads_loss(drafter, torch.zeros(2, 4, 8), blocks, drafts.flatten(), overlap.flatten())

    def cost(logit: float, label: float) -> float:
        p = 1 / (1 + math.exp(-logit))
        return -(label * math.log(p) + (1 - label) * math.log(1 - p))

    # First block: slot 1 accepted, slot 2 rejected, slot 3 never reached.
    terms = [(1.0, cost(0.3, 1.0)), (1.0, cost(-0.2, 0.0))]
    terms += [(1.0, cost(0.1, 0.8)), (0.8, cost(0.4, 0.5)), (0.4, cost(-0.6, 0.4))]
    assert float(loss) == pytest.approx(sum(w * c for w, c in terms) / sum(w for w, _ in terms), rel=1e-5)
