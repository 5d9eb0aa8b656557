"""Adaptive verify lengths on the real engine: the text stays the target's, the lengths are what the heads say."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from adaflash.checkpoint import load_drafter, read_weights
from adaflash.cost import CostTable
from adaflash.keys import Keys
from adaflash.rollouts import FIELD, unpack
from adaflash.versions import target_fingerprint
from tests import reference, tiny
from tests.conftest import RedisServer
from tests.e2e import checks
from tests.e2e.conftest import Fleet, text_prompts, walk_prompts
from tests.e2e.servers import OFF, PLANNED, ROW_SECONDS, STEP_SECONDS, Worker, budget, cost_table, pad

TOKENS = 33
PROMPTS = [*walk_prompts(4, seed=21), *text_prompts(2)]


@pytest.fixture(scope="module")
def exact(start: Callable) -> Iterator[Fleet]:
    """Survival budget without overlapped scheduling."""
    with start("exact", "headed-weak", "adaptive", "overlap=false") as fleet:
        yield fleet


@pytest.fixture(scope="module")
def overlapped(start: Callable) -> Iterator[Fleet]:
    with start("overlapped", "headed", "adaptive") as fleet:
        yield fleet


def walk(model: object, drafter: Path, prompt: list[int], rows: Callable) -> tuple[list[int], list[int], list[int]]:
    """Ids, correct drafts and verified rows of the cache-free reference."""
    config, weights = load_drafter(drafter).config, read_weights(drafter)
    return reference.verified_walk(model, config, weights, prompt, TOKENS, rows(weights))


def survival_rule(weights: dict, row_seconds: float = ROW_SECONDS) -> Callable:
    return reference.survival_rows(weights, lambda m: STEP_SECONDS + row_seconds * m)


def follows_the_reference(worker: Worker, model: object, drafter: Path, rows: Callable, width: int = 8) -> None:
    """Text, acceptance and verify lengths of one request at a time."""
    seen = []
    for prompt in PROMPTS:
        ids, correct, verified = walk(model, drafter, prompt, rows)
        (out,) = worker.generate([prompt], TOKENS)
        meta = out["meta_info"]
        assert out["output_ids"] == ids
        assert pad(meta["spec_correct_drafts_histogram"], width) == [correct.count(k) for k in range(width)]
        assert pad(meta["spec_cap_lens_histogram"], width + 1) == [verified.count(k) for k in range(width + 1)]
        seen += verified
    assert len(set(seen)) > 1, "one length only; equal histograms would prove little"


def test_lengths_and_acceptance_are_the_references_also_after_a_swap(exact: Fleet, model: object) -> None:
    follows_the_reference(exact.worker, model, exact.drafters / "headed-weak", survival_rule)
    exact.run("headed")
    follows_the_reference(exact.worker, model, exact.drafters / "headed", survival_rule)


def test_a_version_without_heads_is_verified_whole_and_a_later_one_with_heads_is_not(
    exact: Fleet, model: object
) -> None:
    exact.run("weak")
    for prompt in PROMPTS[:2]:
        _, correct, _ = walk(model, exact.drafters / "weak", prompt, lambda _: len)
        meta = exact.worker.generate([prompt], TOKENS)[0]["meta_info"]
        assert pad(meta["spec_correct_drafts_histogram"]) == [correct.count(k) for k in range(8)]
        assert pad(meta["spec_cap_lens_histogram"], 9)[8] == len(correct)
    exact.run("headed")
    follows_the_reference(exact.worker, model, exact.drafters / "headed", survival_rule)


def test_the_draft_state_stays_in_sync_while_speculation_is_off(exact: Fleet, model: object) -> None:
    """What was emitted without drafting is a cached prefix of the next request, which drafts as if from scratch."""
    exact.run("headed")
    prompt = walk_prompts(1, seed=77)[0]
    (want,) = exact.worker.greedy([prompt], TOKENS)
    budget(exact.worker, OFF)
    (out,) = exact.worker.generate([prompt + want[:1]], 24)
    assert out["output_ids"] == want[1:25]
    assert out["meta_info"]["spec_cap_lens_histogram"] == [0, 23]
    budget(exact.worker, PLANNED)
    grown = prompt + want[:25]
    ids, correct, verified = walk(model, exact.drafters / "headed", grown, survival_rule)
    (out,) = exact.worker.generate([grown], TOKENS)
    meta = out["meta_info"]
    assert meta["cached_tokens"] >= len(prompt) + 23
    assert out["output_ids"] == ids
    assert pad(meta["spec_correct_drafts_histogram"]) == [correct.count(k) for k in range(8)]
    assert pad(meta["spec_cap_lens_histogram"], 9) == [verified.count(k) for k in range(9)]


@pytest.mark.parametrize("fraction", [OFF, 0.3, PLANNED])
def test_adaptive_requests_answer_as_plain_ones(exact: Fleet, plain: Worker, fraction: float) -> None:
    exact.run("headed")
    budget(exact.worker, fraction)
    try:
        checks.everything(exact.worker, plain)
    finally:
        budget(exact.worker, PLANNED)


# A factor below 1 favours what was said before; the others then decide when that ends.
PENALTIES = [
    {"repetition_penalty": 0.4},
    {"repetition_penalty": 0.4, "frequency_penalty": 2.0},
    {"frequency_penalty": -2.0, "presence_penalty": -2.0},
    {"min_new_tokens": 12},
]


def test_penalised_requests_are_decoded_by_the_formulas(exact: Fleet, overlapped: Fleet, fleet: Fleet, model: object):
    """Beside requests without penalties, in adaptive modes with and without overlap and in static mode."""
    for served, drafter in ((exact, "headed"), (overlapped, "headed"), (fleet, "good")):
        served.run(drafter)
    stops = [tiny.tokenizer().eos_token_id]
    prompt = text_prompts(1)[0]
    want, free = {}, exact.worker.greedy([prompt], 24)[0]
    for i, asked in enumerate(PENALTIES):
        ends = [free[2], *stops] if "min_new_tokens" in asked else stops
        want[i] = ends, reference.penalised_greedy(model, prompt, 24, asked, ends)
    for i in range(len(PENALTIES)):
        assert want[i][1] != free, f"penalty {i} changes nothing here; equality would prove nothing"
    for served in (exact, overlapped, fleet):
        params = [{"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}]
        params += [
            {"temperature": 0, "max_new_tokens": 24, "stop_token_ids": want[i][0], **asked}
            for i, asked in enumerate(PENALTIES)
        ]
        body = {"input_ids": [prompt] * len(params), "sampling_params": params}
        answers = served.worker.http.post("/generate", json=body).json()
        assert answers[0]["output_ids"] == free
        assert [a["output_ids"] for a in answers[1:]] == [ids for _, ids in want.values()]


def test_overlapped_requests_answer_as_plain_ones(overlapped: Fleet, plain: Worker) -> None:
    overlapped.run("headed")
    checks.everything(overlapped.worker, plain)


@pytest.mark.parametrize("fraction", [OFF, PLANNED])
def test_sampled_tokens_have_the_targets_distribution(overlapped: Fleet, plain: Worker, fraction: float) -> None:
    overlapped.run("headed")
    budget(overlapped.worker, fraction)
    try:
        checks.sampling_has_the_targets_distribution(overlapped.worker, plain)
    finally:
        budget(overlapped.worker, PLANNED)


def test_text_stays_the_targets_while_headed_and_headless_drafters_are_swapped(
    overlapped: Fleet, plain: Worker
) -> None:
    checks.swaps_keep_the_text(overlapped, plain, "headed-weak", "random", "headed")


def test_prefix_hits_keep_acceptance_also_after_a_swap(overlapped: Fleet) -> None:
    shared = walk_prompts(1, seed=5)[0] * 3
    prompts = [shared + p for p in walk_prompts(12, seed=41)]
    for drafter in ("headed-weak", "headed"):
        overlapped.run(drafter)
        first, second = (taus(overlapped.worker, prompts) for _ in range(2))
        assert second >= 0.95 * first


def taus(worker: Worker, prompts: list[list[int]]) -> float:
    outs = [worker.generate([p], 24)[0]["meta_info"] for p in prompts]
    return statistics.mean(24 / o["spec_verify_ct"] for o in outs)


def test_what_happened_is_in_the_rollouts_and_in_the_metrics(overlapped: Fleet) -> None:
    overlapped.run("headed")
    keys = Keys(overlapped.worker.name)
    overlapped.redis.client().delete(keys.rollouts)
    overlapped.worker.generate([PROMPTS[0]], TOKENS)
    budget(overlapped.worker, OFF)
    try:
        overlapped.worker.generate([PROMPTS[0]], TOKENS)
        overlapped.wait(lambda e: overlapped.redis.client().xlen(keys.rollouts) == 2)
        off = metrics(overlapped.worker)
        assert off["adaflash_speculation_on"] == 0
    finally:
        budget(overlapped.worker, PLANNED)
    drafted, plain_steps = (unpack(fields[FIELD]) for _, fields in overlapped.redis.client().xrange(keys.rollouts))
    assert set(plain_steps.verified) == {1} == set(plain_steps.accepted)
    assert len(set(drafted.verified)) > 1
    assert all(a <= v for a, v in zip(drafted.accepted, drafted.verified, strict=True))
    overlapped.worker.generate([PROMPTS[1]], TOKENS)
    m = metrics(overlapped.worker)
    assert m['adaflash_verify_mode_info{mode="adaptive",rule="survival"}'] == 1
    assert (m["adaflash_plugin_active"], m["adaflash_length_head_present"], m["adaflash_speculation_on"]) == (1, 1, 1)
    assert m['adaflash_speculation_switches_total{to="off"}'] >= 1 <= m['adaflash_speculation_switches_total{to="on"}']
    assert sum(v > 0 for k, v in m.items() if k.startswith("adaflash_verify_length_total")) > 1
    assert m["adaflash_wasted_rows_total"] > 0 < m['adaflash_slot_verified_total{slot="1"}']
    assert m['adaflash_slot_verified_total{slot="1"}'] >= m['adaflash_slot_accepted_total{slot="1"}']
    for kind in ("measured", "predicted", "whole_block"):
        assert m[f'adaflash_step_seconds_total{{kind="{kind}"}}'] > 0
    judged = sum(v for k, v in m.items() if k.startswith("adaflash_confidence_slots_total"))
    assert judged >= sum(v for k, v in m.items() if k.startswith("adaflash_confidence_accepted_total")) > 0


def metrics(worker: Worker) -> dict[str, float]:
    lines = worker.http.get("/metrics").text.splitlines()
    rows = [line.rsplit(" ", 1) for line in lines if line.startswith("adaflash_")]
    return {name: float(number) for name, number in rows}


def test_the_length_rule_at_width_16_verifies_what_the_scalar_head_says(
    start: Callable, plain: Worker, model: object
) -> None:
    rate = 0.6
    with start("wide", "wide", "adaptive", "verify_rule=length", f"verify_rate={rate}") as fleet:
        rule = lambda w: lambda hidden: reference.length_rows(w, hidden, rate)  # noqa: E731
        follows_the_reference(fleet.worker, model, fleet.drafters / "wide", rule, 16)
        checks.everything(fleet.worker, plain)
        checks.sampling_has_the_targets_distribution(fleet.worker, plain)
        checks.swaps_keep_the_text(fleet, plain, "wide-weak", "wide")


def test_shadow_changes_nothing_and_reports_what_it_would_choose(start: Callable, plain: Worker, model: object) -> None:
    with start("shadow", "headed", "shadow") as fleet:
        for prompt in PROMPTS:
            _, correct, _ = walk(model, fleet.drafters / "headed", prompt, lambda _: len)
            meta = fleet.worker.generate([prompt], TOKENS)[0]["meta_info"]
            assert pad(meta["spec_correct_drafts_histogram"]) == [correct.count(k) for k in range(8)]
        checks.everything(fleet.worker, plain)
        checks.sampling_has_the_targets_distribution(fleet.worker, plain)
        checks.swaps_keep_the_text(fleet, plain, "headed-weak", "headed")
        m = metrics(fleet.worker)
        kinds = ("measured", "predicted", "whole_block")
        tokens = [m[f'adaflash_step_tokens_total{{kind="{k}"}}'] for k in kinds]
        assert tokens[0] > 0 and 0 < tokens[1] < tokens[2]
        assert sum(v for k, v in m.items() if k.startswith("adaflash_confidence_slots_total")) > 0


def test_the_budget_at_width_2_follows_the_reference_and_keeps_the_text(
    start: Callable, plain: Worker, model: object
) -> None:
    dear = 0.006  # a row has to be accepted more often than not
    with start("narrow", "narrow", "adaptive", "overlap=false", row_seconds=dear) as fleet:
        rule = lambda w: survival_rule(w, dear)  # noqa: E731
        follows_the_reference(fleet.worker, model, fleet.drafters / "narrow", rule, 2)
        checks.everything(fleet.worker, plain)
        checks.sampling_has_the_targets_distribution(fleet.worker, plain)
        checks.swaps_keep_the_text(fleet, plain, "narrow-weak", "narrow")


def test_two_tensor_parallel_ranks_choose_the_same_lengths_switch_together_and_swap(
    start: Callable, plain: Worker
) -> None:
    """Ranks that disagreed about a length or about drafting would hang in a collective."""
    ranks = 'engine_args=["--tp-size","2"]'
    pair = "0|1" if (os.cpu_count() or 1) > 1 else "0|0"
    want = plain.greedy(checks.PROMPTS, 60)
    # With 16 requests a row costs so much that a random drafter does not pay, and that lengths differ for a good one.
    with start(
        *("ranks", "headed-weak", "adaptive", ranks, "speculation=auto"),
        row_seconds=0.0004,
        SGLANG_CPU_OMP_THREADS_BIND=pair,
    ) as fleet:
        for drafter in ("headed-weak", "random", "headed"):
            if drafter != "headed-weak":
                fleet.run(drafter)
            for _ in range(3):
                assert fleet.worker.greedy(checks.PROMPTS, 60) == want
        m = metrics(fleet.worker)
        assert m['adaflash_speculation_switches_total{to="off"}'] >= 1
        assert m['adaflash_speculation_switches_total{to="on"}'] >= 1
        used = {k for k, v in m.items() if k.startswith("adaflash_verify_length_total") and v > 0}
        assert len(used) > 2, used


def test_a_cost_table_of_something_else_is_refused_with_what_to_do(
    target_dir: str, drafter_dir: Path, shared_redis: RedisServer, tmp_path: Path
) -> None:
    table = cost_table(target_dir, 16, tmp_path)
    arguments = ("--drafter", str(drafter_dir / "headed"), "--verify", "adaptive", "--cost-table", str(table))
    worker = Worker(tmp_path / "worker.log", target_dir, "wrong", shared_redis.url, tmp_path / "store", *arguments)
    try:
        assert worker.popen.wait(120) == 1
    finally:
        worker.stop()
    assert "block_size 16 was measured, 8 is served" in worker.log.read_text()


def test_profiling_measures_a_table_that_a_worker_takes(target_dir: str, drafter_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    arguments = ["--model", target_dir, "--drafter", str(drafter_dir / "headed"), "--out", str(out)]
    arguments += ["--dtype", "float32", "--requests", "1,3", "--steps", "4", "--context", "8"]
    run = subprocess.run(
        [sys.executable, "-m", "adaflash.cli", "profile-verify", *arguments], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    table = CostTable.load(out)
    assert (table.block_size, table.requests, table.target) == (8, (1, 3), target_fingerprint(target_dir))
    for plain_seconds, row in zip(table.plain_seconds, table.seconds, strict=True):
        # On so small a target rows are too cheap to tell apart; not drafting at all is not.
        assert 0.001 < plain_seconds < row[-1] < 1
    assert "slots verified" in run.stdout
