"""`adaflash eval` and `fit-length-head` on the tiny target, from the command line to table, JSON and picture."""

import json

import pytest
import torch
from typer.testing import CliRunner

from adaflash.checkpoint import load_drafter
from adaflash.cli import app
from adaflash.errors import UserError
from adaflash.samples import Sample, write_samples
from adaflash.target import Target
from tests import tiny


@pytest.fixture(scope="module")
def samples(target_dir, tmp_path_factory):
    """The target's greedy walks, in two domains."""
    file = tmp_path_factory.mktemp("samples") / "samples.jsonl"
    target = Target(target_dir, [0], torch.float32)
    prompts = tiny.walks(12, 8, torch.Generator().manual_seed(6))
    mask = torch.ones_like(prompts)
    rows = target.model.generate(prompts, attention_mask=mask, max_new_tokens=40, do_sample=False).tolist()
    write_samples(file, [Sample(r[:8], r[8:], "ab"[i % 2]) for i, r in enumerate(rows)])
    with file.open("a") as f:
        f.write('{"prompt_ids": [1], "output_ids": [2, 5000]}\n')
    return file


def invoke(*arguments):
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == 0, done.exception
    return done.output


def test_eval_compares_drafters_by_domain_slot_and_position(samples, target_dir, drafter_dir, tmp_path):
    out = tmp_path / "deep" / "eval.json"
    command = ("eval", "--model", target_dir, "--samples", samples, "--json", out, "--bucket", 16)
    both = ("--drafter", drafter_dir / "weak", "--drafter", drafter_dir / "good", "--png", tmp_path / "eval.png")
    text = invoke(*command, *both)
    assert "12 samples, 1 ids_out_of_range" in text and "weak" in text and "good" in text
    weak, good = json.loads(out.read_text())
    assert good["tau"] > weak["tau"] > 1
    assert set(good["domains"]) == {"a", "b"} and len(good["slots"]) == 7
    assert set(good["positions"]) == {"0", "16", "32"}
    assert good["rules"] == {"static": {"tau": good["tau"], "verified": 8.0}}
    assert (tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG")


def test_known_results_are_not_measured_again(samples, target_dir, drafter_dir, tmp_path):
    out = tmp_path / "eval.json"
    command = ("eval", "--model", target_dir, "--samples", samples, "--json", out)
    invoke(*command, "--drafter", drafter_dir / "weak")
    (row,) = json.loads(out.read_text())
    out.write_text(json.dumps([row | {"tau": 7.5}]))  # shows that it is read back
    invoke(*command, "--drafter", drafter_dir / "weak", "--drafter", drafter_dir / "good")
    assert [r["drafter"] for r in json.loads(out.read_text())] == ["weak", "good"]
    assert json.loads(out.read_text())[0]["tau"] == 7.5
    invoke(*command, "--drafter", drafter_dir / "weak", "--bucket", 8)
    assert json.loads(out.read_text())[0]["tau"] == row["tau"], "another bucket is another measurement"
    assert len(json.loads(out.read_text())) == 3, "and what was known stays"


def test_eval_refuses_to_write_over_a_foreign_file(samples, target_dir, drafter_dir, tmp_path):
    file = tmp_path / "notes.json"
    file.write_text('{"mine": 1}')
    arguments = ["eval", "--model", target_dir, "--samples", str(samples), "--json", str(file)]
    failed = CliRunner().invoke(app, [*arguments, "--drafter", str(drafter_dir / "weak")])
    assert isinstance(failed.exception, UserError) and "something else" in str(failed.exception)
    assert file.read_text() == '{"mine": 1}'


def test_fitted_heads_are_written_and_evaluated(samples, target_dir, drafter_dir, tmp_path):
    common = ("--model", target_dir, "--samples", samples)
    out = tmp_path / "fitted"
    text = invoke("fit-length-head", "--drafter", drafter_dir / "weak", "--out", out, "--steps", 30, *common)
    assert "calibration error" in text and "rows a step" in text and "1 ids_out_of_range" in text
    assert load_drafter(out).config.with_heads(length_head=None, confidence_head=False) == (
        load_drafter(drafter_dir / "weak").config
    )
    assert not (tmp_path / "fitted.fitting").exists()
    invoke("eval", "--drafter", out, "--json", tmp_path / "e.json", *common)
    (row,) = json.loads((tmp_path / "e.json").read_text())
    assert set(row["rules"]) == {"static", "length head", "survival"}
    assert row["rules"]["survival"]["verified"] < 8
