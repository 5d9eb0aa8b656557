"""The drafter's forward against an independent reference, and what it must not depend on."""

import pytest
import torch

from adaflash.acceptance import replay
from adaflash.attention import Layout, _flex, _tiles
from adaflash.drafter import random_drafter
from adaflash.drafter_config import DrafterConfig, DrafterConfigError, TargetShape
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


def make(seed=0, config=CONFIG):
    torch.manual_seed(seed)
    drafter = random_drafter(config, seed)
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


AWKWARD = {
    "plain": {},
    "partial rotary": {"partial_rotary_factor": 0.5},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}},
    "sliding": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5},
    "one key head": {"num_key_value_heads": 1},
    "last target layer": {"target_layer_ids": (0, 2, 5)},
}


@pytest.mark.parametrize("change", AWKWARD.values(), ids=AWKWARD)
def test_forward_equals_the_reference_at_every_anchor(change):
    config = CONFIG.model_copy(update=change)
    drafter, f = make(config=config), features(12, 3)
    weights = drafter.state_dict()
    anchors = torch.tensor([3, 5, 11])
    block = drafter.block_embeddings(EMBEDDING, f.ids[anchors])
    got = drafter(drafter.encode([f.context]), torch.zeros(3, dtype=torch.long), anchors, block)
    for i, a in enumerate(anchors.tolist()):
        want = reference.draft_hidden(config, weights, f.context[:a], block[i])
        torch.testing.assert_close(got[i], want, rtol=2e-4, atol=2e-5)


def test_a_block_sees_nothing_at_or_after_its_anchor():
    drafter, f = make(), features(12, 3)
    anchors = torch.tensor([4, 9])
    block = drafter.block_embeddings(EMBEDDING, f.ids[anchors])
    row = torch.zeros(2, dtype=torch.long)
    before = drafter(drafter.encode([f.context]), row, anchors, block)
    changed = f.context.clone()
    changed[4:] += 10
    after = drafter(drafter.encode([changed]), row, anchors, block)
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
        ({"target_layer_ids": (2, 0)}, "increasing"),
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


@pytest.mark.parametrize("change", AWKWARD.values(), ids=AWKWARD)
def test_a_checkpoint_config_survives_the_round_trip(change):
    config = CONFIG.model_copy(update=change).with_heads(length_head=16, confidence_head=True)
    assert DrafterConfig.from_checkpoint(config.to_checkpoint(torch.bfloat16)) == config


def test_flat_and_nested_configs_of_published_drafters_are_read():
    nested = CONFIG.to_checkpoint(torch.bfloat16)
    for key in ("rope_parameters", "enable_confidence_head", "markov_rank"):
        nested.pop(key)
    nested["dflash_config"] |= {"block_size": nested.pop("block_size")}
    flat = {k: v for k, v in nested.items() if k != "dflash_config"} | nested["dflash_config"]
    flat |= {"use_thresh_head_two_model": True, "thresh_head_bottleneck_dim": 64, "rope_scaling": None}
    assert DrafterConfig.from_checkpoint(nested) == CONFIG
    assert DrafterConfig.from_checkpoint(flat) == CONFIG.with_heads(length_head=64, confidence_head=False)


@pytest.mark.parametrize("window", [None, 4])
def test_many_anchors_of_many_sequences_equal_each_block_alone(window):
    """Tiles, packing and order change nothing; the uncompiled flex path gives the same."""
    sliding = {} if window is None else AWKWARD["sliding"] | {"sliding_window": window}
    drafter = make(config=CONFIG.model_copy(update=sliding))
    batch = [features(n, 3, seed=n) for n in (70, 9, 40)]
    row = torch.tensor([2, 0, 1, 0, 2] * 12)
    anchor = torch.tensor([(7 * i) % (len(batch[r].ids) - 4) + 3 for i, r in enumerate(row.tolist())])
    block = torch.randn(len(row), 6, 32, generator=torch.Generator().manual_seed(1))
    got = drafter(drafter.encode([f.context for f in batch]), row, anchor, block)
    one = torch.zeros(1, dtype=torch.long)
    for i in range(len(row)):
        alone = drafter(drafter.encode([batch[row[i]].context]), one, anchor[i : i + 1], block[i : i + 1])
        torch.testing.assert_close(got[i], alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
def test_the_flex_path_computes_what_the_tiles_compute(window):
    g = torch.Generator().manual_seed(0)
    row, anchor = torch.tensor([1, 0, 1, 0]), torch.tensor([8, 3, 2, 12])
    layout = Layout.of(row, anchor, [14, 11], 6)
    q, k, v = (torch.randn(24, heads, 16, generator=g) for heads in (4, 2, 2))
    context_k, context_v = (torch.randn(25, 2, 16, generator=g) for _ in range(2))
    tiles = _tiles(q, k, v, context_k, context_v, layout, window)
    flex = _flex(q, k, v, context_k, context_v, layout, window)
    torch.testing.assert_close(tiles, flex, rtol=1e-5, atol=1e-6)


REFUSED = [
    ({"rope_scaling": {"type": "longrope"}}, "rope_scaling"),
    ({"rope_scaling": {"rope_type": "llama3", "rope_dim": 4, "factor": 2.0}}, "rope_dim"),
    ({"rope_scaling": {"rope_type": "linear"}}, "needs a number for factor"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0}}, "attention_factor"),
    ({"layer_types": ["chunked_attention", "full_attention"]}, "layer_types"),
    ({"attention_bias": True}, "attention_bias"),
    ({"is_causal": True}, "is_causal"),
    ({"draft_vocab_size": 32}, "draft_vocab_size"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"dflash_config": {"projector_type": "domino"}}, "projector_type"),
    ({"dflash_config": {"conv_kernel_size": 3}}, "conv_kernel_size"),
    ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window"),
    ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
]


@pytest.mark.parametrize(("change", "key"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_we_cannot_compute_as_sglang_does_is_refused_by_name(change, key):
    raw = CONFIG.to_checkpoint(torch.float32)
    raw.pop("rope_parameters")
    nested = raw["dflash_config"] | change.pop("dflash_config", {})
    with pytest.raises(DrafterConfigError, match=key):
        DrafterConfig.from_checkpoint(raw | change | {"dflash_config": nested})


def test_a_drafter_of_another_target_is_refused_by_name():
    with pytest.raises(DrafterConfigError, match="vocab_size"):
        CONFIG.check_target(TargetShape(61, 32, 6))
    with pytest.raises(DrafterConfigError, match="num_target_layers"):
        CONFIG.check_target(TargetShape(60, 32, 7))
