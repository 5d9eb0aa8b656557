"""Whatever the drafter, the text is the target's: greedy token for token, sampled by distribution."""

from __future__ import annotations

from collections import Counter

import torch
from scipy.stats import chi2_contingency

from tests.e2e.conftest import Fleet, text_prompts, walk_prompts
from tests.e2e.servers import Worker

TOKENS = 40
PROMPTS = [*walk_prompts(60), *text_prompts(40)]


def test_greedy_text_equals_plain_decoding_with_a_random_and_a_trained_drafter(fleet: Fleet, plain: Worker) -> None:
    want = plain.greedy(PROMPTS, TOKENS)
    for drafter in ("random", "good"):
        fleet.run(drafter)
        assert fleet.worker.greedy(PROMPTS, TOKENS) == want


def test_greedy_text_equals_plain_decoding_while_drafters_are_swapped(fleet: Fleet, plain: Worker) -> None:
    want = plain.greedy(PROMPTS, TOKENS)
    numbers = [fleet.publish(d) for d in ("good", "random", "weak", "good")]
    swaps, spanned = fleet.serve_during_swaps(PROMPTS, want, TOKENS, numbers)
    assert swaps >= 3
    assert spanned >= 1, "no request lived through a swap; the test proved nothing"


def test_max_tokens_inside_an_accepted_block_cuts_exactly(fleet: Fleet, plain: Worker) -> None:
    fleet.run("good")
    for tokens in range(1, 12):
        assert fleet.worker.greedy(PROMPTS[:4], tokens) == plain.greedy(PROMPTS[:4], tokens)


def test_a_stop_token_inside_an_accepted_block_cuts_exactly(fleet: Fleet, plain: Worker) -> None:
    fleet.run("good")
    prompt = PROMPTS[0]
    (whole,) = plain.greedy([prompt], 20)
    for stop in whole[1:12]:
        arguments = dict(stop_token_ids=[stop], ignore_eos=False)
        (a,) = fleet.worker.generate([prompt], 20, **arguments)
        (b,) = plain.generate([prompt], 20, **arguments)
        assert a["output_ids"] == b["output_ids"]
        assert a["meta_info"]["finish_reason"] == b["meta_info"]["finish_reason"]


def sampled_pairs(worker: Worker, prompt: list[int], count: int) -> list[tuple[int, ...]]:
    """First and second tokens of `count` samples at temperature 1."""
    pairs: list[tuple[int, ...]] = []
    while len(pairs) < count:
        outs = worker.generate([prompt] * 250, 4, temperature=1.0)
        pairs += [tuple(o["output_ids"][:2]) for o in outs]
    return pairs[:count]


def p_value(a: Counter, b: Counter) -> float:
    """Chi-square of two samples being from one distribution; rare values are pooled."""
    keys = [k for k in a | b if a[k] + b[k] >= 20]
    rows = [[c[k] for k in keys] + [sum(c.values()) - sum(c[k] for k in keys)] for c in (a, b)]
    columns = [(x, y) for x, y in zip(*rows, strict=True) if x + y > 0]
    assert len(columns) >= 3, "the distribution is too narrow for the test to mean anything"
    return float(chi2_contingency(torch.tensor(columns).T.numpy()).pvalue)


def test_sampled_first_and_second_tokens_have_the_targets_distribution(fleet: Fleet, plain: Worker) -> None:
    fleet.run("good")
    prompt = text_prompts(1)[0]
    on, off = (sampled_pairs(w, prompt, 5000) for w in (fleet.worker, plain))
    for place in (0, 1):
        p = p_value(Counter(x[place] for x in on), Counter(x[place] for x in off))
        print(f"chi-square of token {place + 1}, 5000 samples each: p = {p:.3f}")
        assert p > 0.01
    p = p_value(Counter(on), Counter(off))
    print(f"chi-square of the pair: p = {p:.3f}")
    assert p > 0.01


def test_top_k_1_at_temperature_1_is_the_greedy_text(fleet: Fleet, plain: Worker) -> None:
    fleet.run("good")
    want = plain.greedy(PROMPTS[:12], 24)
    for _ in range(2):
        outs = fleet.worker.generate(PROMPTS[:12], 24, temperature=1.0, top_k=1)
        assert [o["output_ids"] for o in outs] == want
