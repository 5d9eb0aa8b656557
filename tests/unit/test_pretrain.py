"""Offline pre-training on the tiny target: it learns, it says what it did, and bad prompts are named."""

from pathlib import Path

import pytest

from adaflash.checkpoint import load_drafter
from adaflash.pretrain import PretrainError, pretrain, read_prompts, until_stop


def test_it_raises_replayed_tau_and_writes_a_drafter_that_loads(target_dir, tmp_path):
    seen = []
    prompts = [[{"role": "user", "content": f"item {i}"}] for i in range(20)]
    r = pretrain(
        target_dir,
        prompts,
        tmp_path / "out",
        steps=25,
        max_tokens=24,
        start=None,
        layers=1,
        block=8,
        seed=0,
        progress=lambda what, done, total: seen.append((what, done, total)),
    )
    assert r.tau_after > r.tau_before + 0.3
    assert load_drafter(tmp_path / "out").config.num_hidden_layers == 1
    assert ("the target answers", 20, 20) in seen
    assert seen[-1] == ("distilling", 25, 25)


def test_prompts_are_read_in_both_forms_without_their_old_answers(tmp_path: Path):
    file = tmp_path / "p.jsonl"
    rows = [
        '{"prompt": "a"}',
        "",
        '{"messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "x"}]}',
    ]
    file.write_text("\n".join(rows))
    assert read_prompts(file) == [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]


@pytest.mark.parametrize("line", ["{", "[1]", '{"text": "a"}'])
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(PretrainError, match="line 2"):
        read_prompts(file)


def test_answers_are_cut_after_the_first_stop_token():
    assert until_stop([5, 2, 9, 2], {2}) == [5, 2]
    assert until_stop([5, 9], {2}) == [5, 9]
