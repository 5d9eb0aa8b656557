"""What the drafter proposes inside SGLang is what our own forward proposes: acceptance histograms, not only text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from adaflash.acceptance import replay
from adaflash.checkpoint import load_drafter, read_weights
from adaflash.target import Target
from tests import reference
from tests.conftest import RedisServer
from tests.e2e.conftest import Fleet, text_prompts, walk_prompts
from tests.e2e.servers import Worker, pad

TOKENS = 33
PROMPTS = [*walk_prompts(5, seed=21), *text_prompts(2)]


AWKWARD = [("partial-llama3", "dspark"), ("partial-llama3", "dflash")]


def expected(model: object, drafter: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Output ids and histograms of the cache-free reference."""
    config, weights = load_drafter(drafter).config, read_weights(drafter)
    ids, histograms = [], []
    for prompt in PROMPTS:
        output, correct = reference.speculative_walk(model, config, weights, prompt, TOKENS)
        ids.append(output)
        histograms.append(pad([correct.count(k) for k in range(max(correct) + 1)]))
    return ids, histograms


@pytest.mark.parametrize("drafter", ["weak", "good"])
def test_histograms_equal_the_cache_free_reference(fleet: Fleet, model: object, drafter: str) -> None:
    fleet.run(drafter)
    ids, histograms = expected(model, fleet.drafters / drafter)
    assert fleet.worker.greedy(PROMPTS, TOKENS) == ids
    assert fleet.worker.histograms(PROMPTS, TOKENS) == histograms
    accepted = sum(k * n for h in histograms for k, n in enumerate(h))
    assert accepted > 0, "nothing was accepted; equal histograms would prove nothing"


def test_replay_reaches_the_acceptance_that_was_served(fleet: Fleet, target_dir: str) -> None:
    fleet.run("good")
    outs = fleet.worker.generate(PROMPTS, TOKENS)
    drafter = load_drafter(fleet.drafters / "good")
    target = Target(target_dir, drafter.config.target_layer_ids, torch.float32)
    sequences = [p + o["output_ids"] for p, o in zip(PROMPTS, outs, strict=True)]
    features = target.features(sequences, [len(p) for p in PROMPTS])
    replayed = replay(drafter, features, target.embedding, target.head)
    assert [len(s) for s in replayed.steps] == [o["meta_info"]["spec_verify_ct"] for o in outs]


@pytest.fixture
def safe_mode(target_dir: str, drafter_dir: Path, redis_server: RedisServer, tmp_path: Path) -> Iterator[Worker]:
    """The same checkpoint under stock `DFLASH`."""
    arguments = ("--route", "dflash", "--drafter", str(drafter_dir / "weak"))
    worker = Worker(tmp_path / "worker.log", target_dir, "safe", redis_server.url, tmp_path / "store", *arguments)
    try:
        yield worker.wait()
    finally:
        worker.stop()


def test_one_checkpoint_serves_the_safe_mode_with_the_same_histograms(
    safe_mode: Worker, plain: Worker, model: object, drafter_dir: Path
) -> None:
    ids, histograms = expected(model, drafter_dir / "weak")
    assert safe_mode.greedy(PROMPTS, TOKENS) == ids
    assert safe_mode.histograms(PROMPTS, TOKENS) == histograms
    outs = safe_mode.generate(PROMPTS, TOKENS, temperature=1.0, top_k=1)
    assert [o["output_ids"] for o in outs] == plain.greedy(PROMPTS, TOKENS)


@pytest.mark.parametrize(("name", "route"), AWKWARD, ids="-".join)
def test_awkward_configs_draft_in_sglang_what_our_forward_drafts(
    name: str, route: str, tiny_home: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    """Partial rotary, scaled RoPE, first and last target layer as context, heads on board, a tied Qwen3 target."""
    target, drafter = str(tiny_home / "tied"), tiny_home / "awkward" / name
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    ids, histograms = expected(model, drafter)
    assert sum(k * n for h in histograms for k, n in enumerate(h)) > 20, "too little is accepted to prove anything"
    arguments = ("--route", route, "--drafter", str(drafter))
    worker = Worker(tmp_path / "worker.log", target, name, redis_server.url, tmp_path / "store", *arguments)
    try:
        worker.wait()
        assert worker.greedy(PROMPTS, TOKENS) == ids
        assert worker.histograms(PROMPTS, TOKENS) == histograms
    finally:
        worker.stop()
    loaded = load_drafter(drafter)
    teacher = Target(target, loaded.config.target_layer_ids, torch.float32)
    features = teacher.features([p + o for p, o in zip(PROMPTS, ids, strict=True)], [len(p) for p in PROMPTS])
    replayed = replay(loaded, features, teacher.embedding, teacher.head)
    assert [len(s) for s in replayed.steps] == [sum(h) for h in histograms]
