"""What every way of verifying has to keep, at every width: the checks that each engine of the tests goes through."""

from __future__ import annotations

import random
from collections import Counter

import torch
from scipy.stats import chi2_contingency

from tests.e2e.conftest import Fleet, text_prompts, walk_prompts
from tests.e2e.servers import Worker

PROMPTS = [*walk_prompts(10, seed=31), *text_prompts(6)]
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"enum":["x","yy"]}},"required":["a","b"]}'
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"id": {"enum": ["a", "b"]}}, "required": ["id"]},
    },
}


def mixed_batches_give_the_plain_text(worker: Worker, plain: Worker, tokens: int = 30) -> None:
    """Batches of 1 to 16 requests of different lengths, one `max_new_tokens` each."""
    want = plain.greedy(PROMPTS, tokens)
    chooser = random.Random(5)
    for size in (1, 2, 5, 16):
        places = chooser.sample(range(len(PROMPTS)), size)
        limits = [chooser.randint(1, tokens) for _ in places]
        params = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in limits]
        body = {"input_ids": [PROMPTS[i] for i in places], "sampling_params": params}
        answers = worker.http.post("/generate", json=body).json()
        assert [a["output_ids"] for a in answers] == [want[i][:n] for i, n in zip(places, limits, strict=True)]


def ends_inside_a_block_cut_exactly(worker: Worker, plain: Worker) -> None:
    """`max_tokens`, stop tokens, EOS and stop strings at every place of a block."""
    prompt = PROMPTS[0]
    (whole,) = plain.greedy([prompt], 20)
    for n in range(1, 10):
        assert worker.greedy([prompt], n) == [whole[:n]]
    text = plain.generate([prompt], 20)[0]["text"]
    ends = [dict(stop_token_ids=[t], ignore_eos=False) for t in whole[1:8]]
    ends += [dict(stop=[text[i : i + 2]]) for i in range(1, 6)]
    for end in ends:
        (a,), (b,) = (w.generate([prompt], 20, **end) for w in (worker, plain))
        assert (a["output_ids"], a["text"]) == (b["output_ids"], b["text"])
        assert a["meta_info"]["finish_reason"] == b["meta_info"]["finish_reason"]


def logprobs_are_the_plain_ones(worker: Worker, plain: Worker) -> None:
    """Of the chosen tokens and of the three best, within 1e-4."""
    answers = []
    for w in (worker, plain):
        params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        body = {"input_ids": PROMPTS[:4], "sampling_params": params, "return_logprob": True, "top_logprobs_num": 3}
        answers.append(w.http.post("/generate", json=body).json())
    for a, b in zip(*answers, strict=True):
        for key in ("output_token_logprobs", "output_top_logprobs"):
            rows = [(r if key.endswith("top_logprobs") else [r]) for r in a["meta_info"][key]]
            other = [(r if key.endswith("top_logprobs") else [r]) for r in b["meta_info"][key]]
            assert [[x[1] for x in r] for r in rows] == [[x[1] for x in r] for r in other]
            mine, theirs = (torch.tensor([[x[0] for x in r] for r in side]) for side in (rows, other))
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


def grammars_are_served_with_the_plain_answer(worker: Worker, plain: Worker) -> None:
    """JSON schema, regex and a required tool, alone and beside free requests."""
    prompts = PROMPTS[:3]
    params = [
        {"temperature": 0, "max_new_tokens": 40, "json_schema": SCHEMA},
        {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True},
        {"temperature": 0, "max_new_tokens": 40, "regex": "(ab|cd){3,9}e"},
    ]
    for places in ([0], [2], [0, 1, 2]):
        body = {"input_ids": [prompts[i] for i in places], "sampling_params": [params[i] for i in places]}
        a, b = (w.http.post("/generate", json=body).json() for w in (worker, plain))
        assert [x["output_ids"] for x in a] == [x["output_ids"] for x in b]
    chat = {
        "model": "",
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [TOOL],
        "tool_choice": "required",
        "temperature": 0,
        "max_tokens": 60,
    }
    a, b = (w.http.post("/v1/chat/completions", json=chat | {"model": w.name}) for w in (worker, plain))
    assert (a.status_code, b.status_code) == (200, 200), a.text
    assert a.json()["choices"][0]["message"] == b.json()["choices"][0]["message"]


def everything(worker: Worker, plain: Worker) -> None:
    """All of the above, and sampling that leaves one choice."""
    mixed_batches_give_the_plain_text(worker, plain)
    ends_inside_a_block_cut_exactly(worker, plain)
    logprobs_are_the_plain_ones(worker, plain)
    grammars_are_served_with_the_plain_answer(worker, plain)
    outs = worker.generate(PROMPTS[:6], 20, temperature=1.0, top_k=1)
    assert [o["output_ids"] for o in outs] == plain.greedy(PROMPTS[:6], 20)


def swaps_keep_the_text(fleet: Fleet, plain: Worker, *drafters: str) -> None:
    """The plain text from four clients while `drafters` are swapped in turn."""
    want = plain.greedy(PROMPTS, 40)
    numbers = [fleet.publish(d) for d in drafters]
    swaps, spanned = fleet.serve_during_swaps(PROMPTS * 3, want * 3, 40, numbers)
    assert swaps >= 2 and spanned, "no request lived through a swap; the check proved nothing"


def sampling_has_the_targets_distribution(worker: Worker, plain: Worker, count: int = 3000) -> None:
    """First token, second token and the pair, by chi-square at 1 %.

    Chance alone fails one look in forty or so, a bias fails every look; so it takes two.
    """
    prompt = text_prompts(1)[0]
    for _ in range(2):
        on, off = (_pairs(w, prompt, count) for w in (worker, plain))
        p = [_p_value(Counter(x[i] for x in on), Counter(x[i] for x in off)) for i in (0, 1)]
        p.append(_p_value(Counter(on), Counter(off)))
        print(f"chi-square of {count} samples: p = {p[0]:.3f} (token 1), {p[1]:.3f} (token 2), {p[2]:.3f} (pair)")
        if min(p) > 0.01:
            return
    raise AssertionError(f"sampled tokens do not have the target's distribution: p = {p}")


def _pairs(worker: Worker, prompt: list[int], count: int) -> list[tuple[int, ...]]:
    """First and second tokens of `count` samples at temperature 1."""
    pairs: list[tuple[int, ...]] = []
    while len(pairs) < count:
        outs = worker.generate([prompt] * 250, 4, temperature=1.0)
        pairs += [tuple(o["output_ids"][:2]) for o in outs]
    return pairs[:count]


def _p_value(a: Counter, b: Counter) -> float:
    """Chi-square of two samples being from one distribution; rare values are pooled."""
    keys = [k for k in a | b if a[k] + b[k] >= 20]
    rows = [[c[k] for k in keys] + [sum(c.values()) - sum(c[k] for k in keys)] for c in (a, b)]
    columns = [(x, y) for x, y in zip(*rows, strict=True) if x + y > 0]
    assert len(columns) >= 3, "the distribution is too narrow for the test to mean anything"
    return float(chi2_contingency(torch.tensor(columns).T.numpy()).pvalue)
