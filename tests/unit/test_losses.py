"""The distillation loss against the plain formula and its autograd gradient in float64."""

import pytest
import torch
import torch.nn.functional as F

from adaflash import losses
from adaflash.losses import decay_weights, distill


def plain(hidden, teacher, head, weight, alpha, clip):
    """The formula of the paper, in float64, differentiable."""
    s, t = (hidden @ head.T).log_softmax(-1), (teacher @ head.T).log_softmax(-1)
    ce = -s.gather(-1, t.argmax(-1, keepdim=True))[:, 0]
    rkl = (s.exp() * (s - t)).sum(-1)
    return (weight * (alpha * ce + (1 - alpha) * rkl.clamp_max(clip))).sum() / weight.sum()


def tensors(n=40, h=16, v=90, scale=1.0):
    g = torch.Generator().manual_seed(0)
    hidden, teacher = (torch.randn(n, h, generator=g) * scale for _ in range(2))
    return hidden, teacher, torch.randn(v, h, generator=g), torch.rand(n, generator=g) + 0.1


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("clip", [1.5, 1e9])
@pytest.mark.parametrize("chunk", [90, 700, 1 << 24])
def test_loss_and_gradient_equal_the_plain_formula(monkeypatch, alpha, clip, chunk):
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", chunk)
    hidden, teacher, head, weight = tensors()
    h64 = hidden.double().requires_grad_()
    want = plain(h64, teacher.double(), head.double(), weight.double(), alpha, clip)
    want.backward()
    mine = hidden.clone().requires_grad_()
    got = distill(mine, teacher, head, weight, alpha=alpha, clip=clip)
    (got.loss * 3).backward()
    assert got.loss.item() == pytest.approx(want.item(), rel=1e-5)
    torch.testing.assert_close(mine.grad, 3 * h64.grad.float(), rtol=1e-4, atol=1e-6)


def test_a_duplicated_batch_has_the_same_loss_and_clipped_share():
    hidden, teacher, head, weight = tensors()
    once = distill(hidden, teacher, head, weight, clip=9.0)
    twice = distill(*(torch.cat([x, x]) for x in (hidden, teacher)), head, torch.cat([weight, weight]), clip=9.0)
    assert 0 < once.clipped_share < 1
    assert twice.clipped_share.item() == pytest.approx(once.clipped_share.item())
    assert twice.loss.item() == pytest.approx(once.loss.item(), rel=1e-6)


def test_extreme_logits_stay_finite():
    hidden, teacher, head, weight = tensors(scale=1e3)
    hidden.requires_grad_()
    out = distill(hidden, teacher, head, weight)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert torch.isfinite(hidden.grad).all()


def test_weights_decay_from_one_over_the_slots():
    w = decay_weights(torch.arange(1, 8), 7.0)
    assert w[0] == 1
    assert torch.allclose(w[1:] / w[:-1], torch.full((6,), float(torch.exp(torch.tensor(-1 / 7)))))


def test_agreement_counts_slots_whose_argmax_is_the_teachers():
    hidden, teacher, head, weight = tensors()
    out = distill(hidden, teacher, head, weight)
    want = (F.linear(hidden, head).argmax(-1) == F.linear(teacher, head).argmax(-1)).float()
    assert torch.equal(out.agreement, want)
