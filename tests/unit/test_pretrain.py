"""Offline pre-training on the tiny target: it learns, goes on after an interruption, and never mixes two runs."""

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

from adaflash.checkpoint import load_drafter, save_drafter
from adaflash.cli import app
from adaflash.distill import DistillConfig
from adaflash.drafter import random_drafter
from adaflash.drafter_config import DrafterConfigError
from adaflash.errors import UserError
from adaflash.pretrain import PretrainError, PretrainOptions, pretrain, work_folder
from adaflash.samples import Conversation
from tests.unit.test_drafter import CONFIG

TALK = [Conversation([{"role": "user", "content": f"item {i}"}], "ab"[i % 2]) for i in range(20)]


def test_a_file_sorted_by_domain_is_held_out_from_every_domain(target_dir, tmp_path):
    talk = sorted(TALK, key=lambda c: c.domain)
    assert run(target_dir, tmp_path / "out", talk=talk, steps=1).domains == ["a", "b"]


class Enough(Exception):
    pass


def run(target_dir, out, talk=TALK, progress=lambda *_: None, **change):
    options = dict(steps=25, max_tokens=24, start="", layers=1, block=8, seed=0, length_head=False)
    return pretrain(PretrainOptions(target_dir, **options | change, distill=DistillConfig()), talk, out, progress)


def test_it_raises_replayed_tau_and_writes_a_drafter_that_loads(target_dir, tmp_path):
    seen = []
    r = run(target_dir, tmp_path / "out", progress=lambda what, done, total: seen.append((what, done, total)))
    assert r.after.tau > r.before.tau + 0.3
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    assert set(r.after.by(r.domains)) == {"a", "b"}
    assert load_drafter(tmp_path / "out").config.num_hidden_layers == 1
    assert ("answers", 20, 20) in seen
    assert seen[-1] == ("distilling", 25, 25)


def stop_at(what, number):
    def progress(seen, done, total):
        if (seen, done) == (what, number):
            raise Enough

    return progress


def test_a_run_that_was_cut_off_twice_ends_as_one_that_was_not(target_dir, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(target_dir, whole)
    with pytest.raises(Enough):
        run(target_dir, parts, progress=stop_at("answers", 16))
    with pytest.raises(Enough):
        run(target_dir, parts, progress=stop_at("distilling", 22))
    with (tmp_path / "parts.training/samples.jsonl").open("a") as f:
        f.write('{"prompt_ids": [1, 2')  # torn by the interruption
    seen = []
    r = run(target_dir, parts, progress=lambda what, done, total: seen.append((what, done)))
    assert r.resumed_at == 20
    assert ("distilling", 21) in seen and ("answers", 20) not in seen
    assert (tmp_path / "whole.training/samples.jsonl").read_text() == (
        tmp_path / "parts.training/samples.jsonl"
    ).read_text()
    a, b = load_drafter(whole).state_dict(), load_drafter(parts).state_dict()
    for name in a:
        torch.testing.assert_close(a[name], b[name])


def test_more_steps_continue_a_finished_run(target_dir, tmp_path):
    run(target_dir, tmp_path / "out", steps=20)
    r = run(target_dir, tmp_path / "out", steps=24)
    assert (r.resumed_at, r.steps) == (20, 24)


def test_another_run_in_the_same_place_is_refused_by_what_differs(target_dir, tmp_path):
    out = tmp_path / "out"
    run(target_dir, out, steps=1)
    with pytest.raises(PretrainError, match=r"another layers, seed, start.*--restart"):
        run(target_dir, out, layers=2, seed=4)
    shutil.rmtree(work_folder(out))
    run(target_dir, out, steps=1, layers=2, seed=4)


def test_other_conversations_of_the_same_number_are_another_run(target_dir, tmp_path):
    run(target_dir, tmp_path / "out", steps=1)
    other = [Conversation([{"role": "user", "content": "else"}])] * len(TALK)
    with pytest.raises(PretrainError, match="another conversations"):
        run(target_dir, tmp_path / "out", talk=other)


def test_a_drafter_of_another_target_is_refused_before_anything_is_made(target_dir, tmp_path):
    save_drafter(random_drafter(CONFIG, 0), tmp_path / "foreign", torch.float32)
    with pytest.raises(DrafterConfigError, match="vocab_size"):
        run(target_dir, tmp_path / "out", start=str(tmp_path / "foreign"))
    assert not work_folder(tmp_path / "out").exists()


def test_weights_that_became_nan_are_neither_saved_nor_written(target_dir, tmp_path, monkeypatch):
    run(target_dir, tmp_path / "out", steps=20)
    before = {p: p.read_bytes() for p in (tmp_path / "out/model.safetensors", tmp_path / "out.training/state.pt")}
    monkeypatch.setattr("adaflash.distill.Distiller.finite", lambda self: False)
    with pytest.raises(PretrainError, match="NaN"):
        run(target_dir, tmp_path / "out", steps=24)
    assert all(p.read_bytes() == data for p, data in before.items())


def test_a_damaged_state_is_named_and_not_used(target_dir, tmp_path):
    run(target_dir, tmp_path / "out", steps=1)
    (tmp_path / "out.training/state.pt").write_bytes(b"junk")
    with pytest.raises(PretrainError, match=r"state.pt cannot be read.*--restart"):
        run(target_dir, tmp_path / "out", steps=2)


def test_given_responses_are_learned_and_regenerated_on_request(target_dir, tmp_path):
    file = tmp_path / "talk.jsonl"
    messages = [{"role": "user", "content": "item"}, {"role": "assistant", "content": "given answer"}]
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for _ in range(4)))
    common = ["pretrain", "--model", target_dir, "--prompts", str(file), "--steps", "1", "--layers", "1"]
    outs = []
    for name, extra in (("given", []), ("own", ["--regenerate"])):
        done = CliRunner().invoke(app, [*common, "--out", str(tmp_path / name), *extra])
        assert done.exit_code == 0, done.exception
        assert "replayed tau" in done.output
        outs.append(json.loads((tmp_path / f"{name}.training/samples.jsonl").read_text().splitlines()[0])["output_ids"])
    from tests import tiny

    assert tiny.tokenizer().decode(outs[0], skip_special_tokens=True).strip() == "given answer"
    assert outs[1] != outs[0]


def test_a_wrong_loss_is_refused_with_the_known_ones(tmp_path):
    failed = CliRunner().invoke(app, ["pretrain", "--out", str(tmp_path), "--loss", "mse"])
    assert isinstance(failed.exception, UserError) and "dpace" in str(failed.exception)
