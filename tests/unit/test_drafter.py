"""The drafter's forward against an independent reference, and what it must not depend on."""

import pytest
import torch

from adaflash.acceptance import replay
from adaflash.drafter import DrafterConfig, DrafterConfigError, TargetShape, random_drafter
from adaflash.target import Features
from tests import reference

CONFIG = DrafterConfig(
    vocab_size=60,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    block_size=6,
    num_target_layers=6,
    target_layer_ids=(0, 2, 4),
    mask_token_id=59,
)


def make(seed=0):
    torch.manual_seed(seed)
    drafter = random_drafter(CONFIG, seed)
    with torch.no_grad():
        for p in drafter.parameters():
            p.mul_(8.0) if p.ndim == 2 else p.add_(0.3 * torch.randn_like(p))
    return drafter


def features(length, prompt, seed=0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 59, (length,), generator=g)
    context = torch.randn(length, 96, generator=g)
    return Features(ids, prompt, context, torch.randn(length - prompt + 1, 32, generator=g))


EMBEDDING = torch.randn(60, 32, generator=torch.Generator().manual_seed(5))


def test_forward_equals_the_reference_at_every_anchor():
    drafter, f = make(), features(12, 3)
    weights = drafter.state_dict()
    anchors = torch.tensor([3, 5, 11])
    block = drafter.block_embeddings(EMBEDDING, f.ids[anchors])
    got = drafter(drafter.encode(f.context[None]), torch.zeros(3, dtype=torch.long), anchors, block)
    for i, a in enumerate(anchors.tolist()):
        want = reference.draft_hidden(CONFIG, weights, f.context[:a], block[i])
        torch.testing.assert_close(got[i], want, rtol=2e-4, atol=2e-5)


def test_a_block_sees_nothing_at_or_after_its_anchor():
    drafter, f = make(), features(12, 3)
    anchors = torch.tensor([4, 9])
    block = drafter.block_embeddings(EMBEDDING, f.ids[anchors])
    row = torch.zeros(2, dtype=torch.long)
    before = drafter(drafter.encode(f.context[None]), row, anchors, block)
    changed = f.context.clone()
    changed[4:] += 10
    after = drafter(drafter.encode(changed[None]), row, anchors, block)
    assert torch.equal(before[0], after[0])
    assert not torch.allclose(before[1], after[1])


def test_padding_and_company_do_not_change_a_replay():
    drafter, head = make(), torch.randn(60, 32)
    some = [features(n, 3, seed=n) for n in (9, 14, 20)]
    together = replay(drafter, some, EMBEDDING, head).steps
    alone = [replay(drafter, [f], EMBEDDING, head).steps[0] for f in some]
    assert together == alone


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"target_layer_ids": (0, 6)}, "target_layer_ids"),
        ({"target_layer_ids": (0, 5)}, "last layer"),
        ({"mask_token_id": 60}, "mask_token_id"),
        ({"num_key_value_heads": 3}, "num_attention_heads"),
        ({"block_size": 1}, "block_size"),
    ],
)
def test_contradictory_configs_are_refused_by_name(change, key):
    raw = CONFIG.to_checkpoint(torch.float32)
    for k, v in change.items():
        raw["dflash_config" if k in raw["dflash_config"] else k] = (
            raw["dflash_config"] | {k: v} if k in raw["dflash_config"] else v
        )
    with pytest.raises(DrafterConfigError, match=key):
        DrafterConfig.from_checkpoint(raw)


def test_a_checkpoint_config_survives_the_round_trip():
    assert DrafterConfig.from_checkpoint(CONFIG.to_checkpoint(torch.bfloat16)) == CONFIG


def test_unsupported_rope_scaling_is_refused_by_name():
    with pytest.raises(DrafterConfigError, match="rope_scaling"):
        DrafterConfig.from_checkpoint(CONFIG.to_checkpoint(torch.float32) | {"rope_scaling": {"type": "yarn"}})


def test_a_drafter_of_another_target_is_refused_by_name():
    with pytest.raises(DrafterConfigError, match="vocab_size"):
        CONFIG.check_target(TargetShape(61, 32, 6))
    with pytest.raises(DrafterConfigError, match="num_target_layers"):
        CONFIG.check_target(TargetShape(60, 32, 7))
