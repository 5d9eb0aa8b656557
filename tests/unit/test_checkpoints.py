"""Drafter checkpoints in every layout we read and write; what cannot be served is refused by the tensor's name."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from adaflash.checkpoint import CheckpointError, load_drafter, read_weights, save_drafter
from adaflash.cli import app
from adaflash.convert import convert, inspect
from adaflash.drafter import random_drafter
from adaflash.drafter_config import DrafterConfigError
from adaflash.errors import UserError
from tests.unit.test_drafter import CONFIG, EMBEDDING, features, make

HEADED = CONFIG.with_heads(length_head=16, confidence_head=True)


@pytest.fixture
def ours(tmp_path):
    save_drafter(random_drafter(HEADED, 3), tmp_path / "ours", torch.float32)
    return tmp_path / "ours"


def rewrite(directory, change):
    """Applies `change` to the tensors of a checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_a_drafter_with_heads_survives_the_round_trip(ours):
    loaded, start = load_drafter(ours), random_drafter(HEADED, 3)
    assert loaded.config == HEADED
    for n, t in start.state_dict().items():
        assert torch.equal(t, loaded.state_dict()[n]), n


def test_the_length_head_is_spelled_as_adaflash_spells_it_on_disk_and_only_there(ours):
    names = load_file(ours / "model.safetensors").keys()
    wanted = {f"thresh_head_two_model.{n}.{k}" for n in ("down", "res.0", "out") for k in ("weight", "bias")}
    assert wanted <= names and not any(n.startswith("length_head") for n in names)
    assert any(n.startswith("length_head") for n in read_weights(ours))


def test_heads_stay_in_full_precision_beside_a_half_precision_trunk(tmp_path):
    save_drafter(random_drafter(HEADED, 3), tmp_path, torch.bfloat16)
    dtypes = {n: t.dtype for n, t in load_file(tmp_path / "model.safetensors").items()}
    assert dtypes["fc.weight"] == torch.bfloat16
    assert dtypes["thresh_head_two_model.down.weight"] == torch.float32


@pytest.mark.parametrize("layout", ["sglang", "adaflash", "dflash"])
def test_every_layout_drafts_the_same_and_converts_back(ours, tmp_path, layout):
    convert(ours, tmp_path / layout, layout, dtype=None, target=None)
    back = tmp_path / "back"
    convert(tmp_path / layout, back, "sglang", dtype=None, target=None)
    raw = json.loads((tmp_path / layout / "config.json").read_text())
    assert ("dflash_config" in raw) == (layout != "adaflash")
    first, last, f = load_drafter(ours), load_drafter(back), features(12, 3)
    block, one, anchor = (
        first.block_embeddings(EMBEDDING, f.ids[8:9]),
        torch.zeros(1, dtype=torch.long),
        torch.tensor([8]),
    )
    outs = [d(d.encode([f.context]), one, anchor, block) for d in (first, last)]
    assert torch.equal(*outs)
    assert (last.length_head is not None) == (layout != "dflash")


def test_a_published_checkpoint_with_prefixes_and_shards_is_read(tmp_path):
    drafter = make()
    save_drafter(drafter, tmp_path, torch.float32)
    tensors = {f"model.{n}": t for n, t in load_file(tmp_path / "model.safetensors").items()}
    tensors["encoder.fc.weight"] = tensors.pop("model.fc.weight")
    tensors["encoder.output_norm_enc.weight"] = tensors.pop("model.hidden_norm.weight")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, part in shards.items():
        save_file({n: tensors[n] for n in part}, tmp_path / file)
    where = {n: file for file, part in shards.items() for n in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    loaded = load_drafter(tmp_path)
    assert all(torch.equal(t, loaded.state_dict()[n]) for n, t in drafter.state_dict().items())


def test_an_index_cannot_reach_outside_its_directory(tmp_path):
    save_drafter(make(), tmp_path / "a", torch.float32)
    os.rename(tmp_path / "a/model.safetensors", tmp_path / "outside.safetensors")
    index = {"weight_map": {"fc.weight": "../outside.safetensors"}}
    (tmp_path / "a/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not in the directory"):
        load_drafter(tmp_path / "a")


def test_saving_over_a_sharded_checkpoint_leaves_no_shard_that_a_loader_would_prefer(tmp_path):
    for name in ("model-00001-of-00001.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).write_text("old")
    save_drafter(make(), tmp_path, torch.float32)
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("text", ["[]", "{", "\xff"])
def test_a_config_that_is_no_json_object_is_refused(ours, text):
    (ours / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config.json is not"):
        load_drafter(ours)


def test_pickled_weights_are_refused(ours):
    (ours / "model.safetensors").rename(ours / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="never unpickled"):
        load_drafter(ours)


BROKEN = {
    "fc.weight is not finite": lambda t: t["fc.weight"].view(-1)[5:6].fill_(float("nan")),
    "layers.0.mlp.up_proj.weight is missing": lambda t: t.pop("layers.0.mlp.up_proj.weight"),
    "norm.weight has shape": lambda t: t.update({"norm.weight": torch.ones(7)}),
    "extra.weight does not belong": lambda t: t.update({"extra.weight": torch.ones(7)}),
    "thresh_head_two_model.out.bias is missing": lambda t: t.pop("thresh_head_two_model.out.bias"),
    "lm_head.weight: a drafter with its own": lambda t: t.update({"lm_head.weight": torch.ones(60, 32)}),
    "d2t: a drafter with its own": lambda t: t.update({"d2t": torch.ones(30)}),
}


@pytest.mark.parametrize("message", BROKEN)
def test_an_unusable_tensor_is_refused_by_name(ours, message):
    rewrite(ours, BROKEN[message])
    with pytest.raises(CheckpointError, match=message):
        load_drafter(ours)


def test_a_copy_of_the_targets_head_is_dropped_and_another_head_refused(target_dir, drafter_dir, tmp_path):
    source = tmp_path / "source"
    save_drafter(load_drafter(drafter_dir / "weak"), source, torch.float32)
    own = load_file(f"{target_dir}/model.safetensors")
    rewrite(source, lambda t: t.update({"lm_head.weight": own["lm_head.weight"].clone()}))
    with pytest.raises(CheckpointError, match="--target"):
        convert(source, tmp_path / "out", "sglang", dtype=None, target=None)
    convert(source, tmp_path / "out", "sglang", dtype=None, target=target_dir)
    assert load_drafter(tmp_path / "out")
    rewrite(source, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs"):
        convert(source, tmp_path / "out2", "sglang", dtype=None, target=target_dir)


def test_inspect_says_what_a_drafter_is_and_for_which_target(drafter_dir, target_dir, ours):
    facts = inspect(drafter_dir / "weak", target_dir)
    assert facts["fits_target"] == target_dir and facts["block_size"] == 8 and facts["dtype"] == "float32"
    assert inspect(ours, None)["length_head"] == 16
    with pytest.raises(DrafterConfigError, match="vocab_size"):
        inspect(ours, target_dir)


def test_the_commands_print_and_refuse_plainly(ours, tmp_path):
    runner = CliRunner()
    shown = runner.invoke(app, ["drafter", "inspect", str(ours), "--json"])
    assert json.loads(shown.output)["confidence_head"] is True
    assert "block_size" in runner.invoke(app, ["drafter", "inspect", str(ours)]).output
    done = runner.invoke(app, ["drafter", "convert", str(ours), "--out", str(tmp_path / "x"), "--layout", "adaflash"])
    assert "heads: length" in done.output
    for arguments, message in (
        (["drafter", "convert", str(ours), "--out", str(ours)], "never overwrites"),
        (["drafter", "convert", str(ours), "--out", str(tmp_path / "y"), "--layout", "z"], "expected one of"),
        (["drafter", "convert", str(ours), "--out", str(tmp_path / "y"), "--dtype", "int8"], "float32"),
        (["drafter", "inspect", str(tmp_path / "none")], "config.json is missing"),
        (["drafter", "inspect", str(ours / "model.safetensors")], "give the directory"),
        (["drafter", "init", "--target", "x", "--out", str(tmp_path / "z"), "--layer-ids", "a,b"], "--layer-ids"),
        (["drafter", "init", "--target", "x", "--out", str(tmp_path / "z"), "--dtype", "int8"], "float32"),
    ):
        failed = runner.invoke(app, arguments)
        assert isinstance(failed.exception, UserError) and message in str(failed.exception)
