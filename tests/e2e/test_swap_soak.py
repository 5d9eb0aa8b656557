"""A hundred swaps under constant streaming load: nothing fails, nothing differs, nothing grows."""

from __future__ import annotations

import itertools
import json
import statistics
import threading

import httpx
import psutil

from adaflash.keys import Keys
from adaflash.release import read_events
from tests.e2e.conftest import NAME, Fleet, text_prompts, walk_prompts

SWAPS = 100
CLIENTS = 8
TOKENS = 32
WARM = 20  # swaps before memory and handles are read for the first time


def stream(url: str, prompt: list[int]) -> str:
    """The text of a streamed completion; fails unless it ends as it should."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    headers = {"Authorization": "Bearer user-key"}
    text, finished, done = "", None, False
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=120) as r:
        assert r.status_code == 200, r.read()
        for line in r.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    text += choice["text"]
                    finished = choice["finish_reason"] or finished
    assert done and finished in ("length", "stop"), "truncated"
    return text


def footprint(fleet: Fleet) -> dict[str, int]:
    """Resident bytes and handles of agent and engine, and the connections that Redis sees."""
    root = psutil.Process(fleet.worker.popen.pid)
    family = [root, *root.children(recursive=True)]
    return {
        "rss": sum(p.memory_info().rss for p in family),
        "handles": sum(p.num_fds() for p in family),
        "connections": len(fleet.redis.client().client_list()),
        "processes": len(family),
    }


def test_a_hundred_swaps_under_eight_streaming_clients(fleet: Fleet, gateway: str) -> None:
    numbers = [fleet.publish(d) for d in ("good", "weak", "random", "good")]
    prompts = [*walk_prompts(24, seed=71), *text_prompts(8)]
    fleet.swap_to(numbers[0])
    right = [stream(gateway, p) for p in prompts]
    stopped, failures, answered = threading.Event(), [], [0] * CLIENTS

    def client(k: int) -> None:
        for n in itertools.count(k):
            if stopped.is_set():
                return
            i = (n * 7) % len(prompts)
            try:
                if stream(gateway, prompts[i]) != right[i]:
                    failures.append(f"prompt {i} differs")
                answered[k] += 1
            except (AssertionError, httpx.HTTPError, ValueError) as error:
                failures.append(repr(error)[:300])

    began = len(read_events(fleet.redis.client(), Keys(NAME)))
    threads = [threading.Thread(target=client, args=(k,)) for k in range(CLIENTS)]
    for t in threads:
        t.start()
    try:
        for swap in range(SWAPS):
            if swap == WARM:
                first = footprint(fleet)
            fleet.swap_to(numbers[(swap + 1) % len(numbers)])
        last = footprint(fleet)
    finally:
        stopped.set()
        for t in threads:
            t.join(150)
    assert not failures
    events = read_events(fleet.redis.client(), Keys(NAME))[began:]
    pauses = sorted(e["pause_seconds"] for e in events if e["what"] == "swapped")
    assert len(pauses) == SWAPS
    p99 = statistics.quantiles(pauses, n=100)[98]
    print(f"{SWAPS} swaps, {sum(answered)} streams, 0 failed; pause p50 {statistics.median(pauses):.3f} s, ", end="")
    print(f"p99 {p99:.3f} s; from swap {WARM} on: {first} -> {last}")
    assert last["rss"] < first["rss"] * 1.05
    assert last["handles"] <= first["handles"] + 8
    assert last["connections"] <= first["connections"] + 4
    assert last["processes"] == first["processes"]
