"""Samples and conversations from files: what is read, what is skipped and counted, what is refused by name."""

import json
from pathlib import Path

import pytest

from adaflash.rollouts import unusable
from adaflash.samples import (
    Conversation,
    Sample,
    SampleError,
    read_conversations,
    read_samples,
    until_stop,
    write_samples,
)


def lines(file: Path, *rows) -> Path:
    file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return file


def test_samples_survive_the_round_trip(tmp_path):
    samples = [Sample([1, 2], [3, 4, 5], "math", (2,)), Sample([1], [2, 3])]
    write_samples(tmp_path / "deep" / "s.jsonl", samples)
    assert read_samples(tmp_path / "deep" / "s.jsonl", 10, 100) == (samples, {})


def test_unusable_lines_are_counted_by_reason_and_the_rest_is_used(tmp_path):
    file = lines(
        tmp_path / "s.jsonl",
        {"prompt_ids": [1], "output_ids": [2, 3], "model": "further keys are ignored"},
        {"prompt_ids": [1], "output_ids": []},
        {"prompt_ids": [1], "output_ids": [2]},
        {"prompt_ids": [], "output_ids": [2, 3]},
        {"prompt_ids": [1], "output_ids": [2, 99]},
        {"prompt_ids": [-1], "output_ids": [2, 3]},
        {"prompt_ids": [1] * 20, "output_ids": [2, 3]},
        {"prompt_ids": "ab", "output_ids": [2, 3]},
        {"output_ids": [2, 3]},
        "[1, 2]",
        '{"prompt_ids": [1e999], "output_ids": [1, 2]}',
        "{",
    )
    samples, skipped = read_samples(file, 50, 16)
    assert samples == [Sample([1], [2, 3])]
    assert skipped == {"too_short": 3, "ids_out_of_range": 2, "prompt_too_long": 1, "malformed": 5}


def test_a_file_without_a_usable_sample_says_why(tmp_path):
    with pytest.raises(SampleError, match="1 too_short"):
        read_samples(lines(tmp_path / "s.jsonl", {"prompt_ids": [1], "output_ids": [2]}), 50, 16)
    with pytest.raises(SampleError, match="it is empty"):
        read_samples(lines(tmp_path / "e.jsonl"), 50, 16)
    with pytest.raises(SampleError, match="cannot be read"):
        read_samples(tmp_path / "none.jsonl", 50, 16)


def test_the_last_usable_prompt_leaves_room_for_two_tokens():
    assert unusable([1] * 14, [1, 1], 2, 16) == ""
    assert unusable([1] * 15, [1, 1], 2, 16) == "prompt_too_long"


def test_conversations_are_read_in_both_forms_with_their_domain(tmp_path):
    answered = {"messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "x"}], "domain": "chat"}
    found = read_conversations(lines(tmp_path / "p.jsonl", {"prompt": "a"}, "", answered))
    assert found[0] == Conversation([{"role": "user", "content": "a"}])
    assert found[1].answered and found[1].domain == "chat"
    assert not found[1].question().answered and found[1].question().messages == [{"role": "user", "content": "b"}]


@pytest.mark.parametrize("line", ["{", "[1]", '{"text": "a"}', '{"prompt": 5}', '{"messages": [{"role": "user"}]}'])
def test_a_line_that_is_no_conversation_is_named(tmp_path, line):
    with pytest.raises(SampleError, match="line 2"):
        read_conversations(lines(tmp_path / "p.jsonl", {"prompt": "a"}, line))


def test_answers_are_cut_after_the_first_stop_token():
    assert until_stop([5, 2, 9, 2], {2}) == [5, 2]
    assert until_stop([5, 9], {2}) == [5, 9]
