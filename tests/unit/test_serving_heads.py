"""The heads inside SGLang say what `adaflash.heads` says, and know which of them a version has."""

import pytest
import torch

from adaflash.heads import ConfidenceHead, LengthHead, verify_length
from serving.sglang_plugin.models.heads import Heads
from serving.sglang_plugin.settings import VerifySettings

HIDDEN, BLOCK, WIDTH = 16, 6, 8


@pytest.fixture
def checkpoint():
    """Tensors of both heads as a checkpoint names them, and the modules they come from."""
    torch.manual_seed(0)
    length, slots = LengthHead(HIDDEN, WIDTH), ConfidenceHead(HIDDEN, BLOCK - 1)
    slots.temperature.copy_(torch.rand(BLOCK - 1) + 0.5)
    tensors = {f"thresh_head_two_model.{n}": t for n, t in length.state_dict().items()}
    tensors |= {f"confidence_head.{n}": t for n, t in slots.state_dict().items()}
    return tensors, length, slots


def serving_heads(rule, tensors, rate=1.3):
    heads = Heads(HIDDEN, BLOCK - 1, WIDTH, VerifySettings(mode="adaptive", rule=rule, rate=rate))
    heads.load({Heads.own_name(n): t for n, t in tensors.items()})
    return heads


def test_survival_confidences_are_the_calibrated_heads(checkpoint):
    tensors, _, slots = checkpoint
    block = torch.randn(3, BLOCK, HIDDEN)
    with torch.no_grad():
        got, want = serving_heads("survival", tensors)(block), torch.sigmoid(slots(block))
    torch.testing.assert_close(got, want)


def test_the_length_rule_confides_in_exactly_the_rows_that_it_verifies(checkpoint):
    tensors, length, _ = checkpoint
    block = torch.randn(40, BLOCK, HIDDEN) * 3
    with torch.no_grad():
        got = serving_heads("length", tensors)(block)
        rows = verify_length(torch.sigmoid(length(block)), BLOCK, 1.3)
    assert (1 + (got > 0.5).sum(-1)).tolist() == rows.tolist()
    assert ((got.cumprod(-1) >= 1e-6).sum(-1) + 1).tolist() == rows.tolist()
    assert len(set(rows.tolist())) > 1


@pytest.mark.parametrize(("rule", "prefix"), [("survival", "thresh_head"), ("length", "confidence_head")])
def test_without_the_rules_head_everything_is_worth_verifying(checkpoint, rule, prefix):
    tensors = {n: t for n, t in checkpoint[0].items() if n.startswith(prefix)}
    heads = serving_heads(rule, tensors)
    heads.remember()
    assert not heads.known_present
    with torch.no_grad():
        assert (heads(torch.randn(2, BLOCK, HIDDEN)) == 1).all()


def test_a_version_without_heads_leaves_nothing_of_the_one_before(checkpoint):
    heads = serving_heads("survival", checkpoint[0])
    assert bool(heads.present)
    heads.load({})
    assert not bool(heads.present)
    assert all(float(p.abs().sum()) == 0 for p in heads.parameters())


def test_a_head_of_another_width_is_left_out_unless_the_rule_reads_it(checkpoint):
    wide = torch.zeros(WIDTH + 1, 2 * HIDDEN)
    assert not serving_heads("survival", {}).takes("length.down.weight", wide)
    assert serving_heads("survival", {}).takes("length.down.weight", wide[:-1])
    assert serving_heads("length", {}).takes("length.down.weight", wide), "the loader refuses it by name"


def test_names_are_mapped_once_and_other_tensors_are_not_ours(checkpoint):
    assert Heads.own_name("layers.0.mlp.up_proj.weight") is None
    for name in checkpoint[0]:
        own = Heads.own_name(name)
        assert Heads.own_name(f"confidence_head.{own}") == own
    assert {Heads.own_name(n) for n in checkpoint[0]} == dict(serving_heads("length", {}).named_parameters()).keys()
