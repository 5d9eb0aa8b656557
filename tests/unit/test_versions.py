"""Versions: published whole or not at all, and proved before use."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from adaflash.checkpoint import CheckpointError, load_drafter
from adaflash.fit_heads import with_heads
from adaflash.store import StoreUnavailable, VersionStore
from adaflash.versions import Manifest, VersionError, parse_label, sha256, target_fingerprint, verify
from tests.unit.test_drafter import CONFIG, make


@pytest.fixture
def store(tmp_path):
    s = VersionStore(tmp_path / "store")
    s.publish(make(1), torch.float32, target="t", parent=None)
    return s


def rewrite(directory, change):
    """Changes tensors and makes the manifest agree, as a faulty trainer would."""
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors")
    m = json.loads((directory / "manifest.json").read_text())
    m["files"]["model.safetensors"] = sha256(directory / "model.safetensors")
    (directory / "manifest.json").write_text(json.dumps(m))


def test_numbers_are_unique_and_increasing(store, monkeypatch):
    second = store.publish(make(2), torch.float32, target="t", parent=0)
    assert (store.numbers(), second.number, second.parent) == ([0, 1], 1, 0)
    assert store.publish(make(3), torch.float32, target="t", parent=1, least=7).number == 7
    assert store.publish(make(3), torch.float32, target="t", parent=1, least=3).number == 8
    monkeypatch.setattr(store, "_claim", lambda _: 1)  # as two writers that looked at the same moment
    with pytest.raises(VersionError, match="already exists"):
        store.publish(make(3), torch.float32, target="t", parent=1)
    assert verify(store.path(1)) == second


def test_a_version_that_the_store_lacks_is_not_the_versions_fault(store, tmp_path):
    with pytest.raises(StoreUnavailable, match="v5 is missing"):
        store.copy(5, tmp_path / "v5")


def test_a_published_drafter_is_the_one_that_was_given(store):
    loaded = load_drafter(store.path(0))
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), make(1).parameters(), strict=True))


def test_a_drafter_with_nan_is_never_published(store):
    broken = make(2)
    broken.layers[1].mlp.up_proj.weight.data[3, 4] = float("nan")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight is not finite"):
        store.publish(broken, torch.float32, target="t", parent=0)
    assert store.numbers() == [0]
    assert not list(store.root.glob(".writing-*"))


def test_a_version_with_heads_may_replace_one_without(store):
    plain = load_drafter(store.path(0))
    headed = with_heads(plain, 0)
    number = store.publish(headed, torch.float32, target="t", parent=0).number
    assert verify(store.path(number), like=plain.config).number == number


def test_a_writer_that_dies_leaves_no_version(store, monkeypatch):
    monkeypatch.setattr(Manifest, "model_dump_json", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store.publish(make(2), torch.float32, target="t", parent=0)
    assert store.numbers() == [0]
    assert not list(store.root.glob(".writing-*"))


def break_hash(d):
    with (d / "model.safetensors").open("ab") as f:
        f.write(b"x")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda d: (d / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda d: (d / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda d: (d / "manifest.json").write_text("{"), "manifest.json"),
        (lambda d: (d / "manifest.json").write_bytes(b"\xff\xfe\x00"), "manifest.json"),
        (break_hash, "does not match the sha256"),
        (lambda d: rewrite(d, lambda w: w["norm.weight"].fill_(float("nan"))), "norm.weight is not finite"),
        (lambda d: rewrite(d, lambda w: w.pop("fc.weight")), "fc.weight is missing"),
        (lambda d: rewrite(d, lambda w: w.update(x=torch.ones(1))), "x does not belong"),
        (lambda d: rewrite(d, lambda w: w.update({"norm.weight": torch.ones(3)})), "norm.weight has shape"),
    ],
)
def test_damaged_versions_are_refused_with_the_file_or_tensor_named(store, damage, reason):
    damage(store.path(0))
    with pytest.raises(VersionError, match=reason):
        verify(store.path(0))


def test_a_version_for_another_target_or_shape_is_refused(store):
    with pytest.raises(VersionError, match="trained for target t"):
        verify(store.path(0), target="other")
    with pytest.raises(VersionError, match="its config differs"):
        verify(store.path(0), like=CONFIG.model_copy(update={"rope_theta": 1.0}))


def test_a_renamed_version_is_refused(store):
    shutil.copytree(store.path(0), store.path(5))
    with pytest.raises(VersionError, match="its manifest says v0"):
        verify(store.path(5))


def test_a_manifest_that_names_a_file_elsewhere_is_refused(store):
    m = json.loads((store.path(0) / "manifest.json").read_text())
    m["files"]["../x"] = "0"
    (store.path(0) / "manifest.json").write_text(json.dumps(m))
    with pytest.raises(VersionError, match="not the name of a file of the version"):
        verify(store.path(0))


def test_labels_parse_and_nonsense_does_not():
    assert parse_label("v12") == 12
    for text in ("12", "v", "v1x", "v-1"):
        with pytest.raises(VersionError):
            parse_label(text)


def test_the_fingerprint_follows_config_and_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    one = target_fingerprint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert target_fingerprint(tmp_path) != one == target_fingerprint_of_copy(tmp_path)


def target_fingerprint_of_copy(path):
    copy = path.parent / "copy"
    copy.mkdir()
    (copy / "config.json").write_text("{}")
    return target_fingerprint(copy)


def test_pruning_keeps_the_newest_and_those_in_use(store):
    for seed in range(2, 7):
        store.publish(make(seed), torch.float32, target="t", parent=None)
    assert store.prune(2, {1}) == [0, 2, 3]
    assert store.numbers() == [1, 4, 5]
    assert store.publish(make(9), torch.float32, target="t", parent=None).number == 6


def test_a_published_version_is_readable_by_other_users(store):
    modes = {p.name: p.stat().st_mode & 0o777 for p in (store.path(0), *store.path(0).iterdir())}
    assert modes["v0"] == 0o755
    assert {m for n, m in modes.items() if n != "v0"} == {0o644}


def reports_stay_and_old_ones_go(store, monkeypatch):
    monkeypatch.setattr("adaflash.store.KEPT_REPORTS", 2)
    assert store.reported() == []
    store.report("v3", {"at": 1.0, "why": "slow"})
    for k in range(4):
        store.report(f"round-{k:010d}", {"at": float(k), "why": "no gain"})
    assert store.reported() == ["round-0000000002", "round-0000000003", "v3"]
    store.report("v3", {"at": 2.0, "why": "slower"})
    assert store.read_report("v3") == {"at": 2.0, "why": "slower"}


def test_reports_stay_beside_the_versions_and_old_ones_of_the_gate_go(store, monkeypatch):
    reports_stay_and_old_ones_go(store, monkeypatch)
    assert store.numbers() == [0]


def test_a_report_that_cannot_be_written_is_the_stores_failure(store):
    (store.root / "reports").write_text("in the way")
    with pytest.raises(StoreUnavailable, match="version store"):
        store.report("v0", {"at": 0.0, "why": "x"})
