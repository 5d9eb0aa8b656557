"""The optimiser does what torch's Muon does, only in the dtype that is quick here."""

import pytest
import torch

from adaflash.optim import Muon, Optimizers, orthogonalise


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_muon_follows_torchs_own(shape):
    g = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=g)
    mine, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    ours = Muon([mine], 0.02)
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.0, adjust_lr_fn="original")
    for _ in range(6):
        gradient = torch.randn(shape, generator=g)
        mine.grad, theirs.grad = gradient.clone(), gradient.clone()
        ours.step()
        reference.step()
    moved = (theirs - start).norm()
    assert (mine - theirs).norm() < 0.02 * moved  # bf16 iterations there, fp32 here


def test_an_update_has_singular_values_near_one_whatever_the_gradients_scale():
    m = torch.randn(20, 30, generator=torch.Generator().manual_seed(1))
    for scale in (1e-6, 1.0, 1e6):
        values = torch.linalg.svdvals(orthogonalise(m * scale, 5))
        assert values.min() > 0.6 and values.max() < 1.3


def test_a_zero_gradient_changes_nothing():
    p = torch.nn.Parameter(torch.randn(8, 8))
    before = p.detach().clone()
    o = Optimizers([p], "muon", 0.02, 1e-3)
    p.grad = torch.zeros_like(p)
    o.step()
    assert torch.equal(p, before)
