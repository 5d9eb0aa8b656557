"""From an engine's metrics to the counters that the release controller compares, and how it compares them."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from adaflash.live import CanaryPolicy, Counters, Load, compare, load_class, relative_speed
from serving.worker.counting import counters

TEXT = """
# HELP sglang:num_running_reqs x
sglang:num_running_reqs{model="x"} 1.0
adaflash_decode_requests_total 3.0
adaflash_decode_tokens_total{pid="1"} 30.0
adaflash_decode_tokens_total{pid="2"} 12.0
adaflash_decode_tokens_squared_total 100.0
adaflash_decode_steps_total 20.0
adaflash_decode_load_laps_total{load="4"} 5.0
adaflash_decode_load_seconds_total{load="4"} 1.5
adaflash_decode_load_tokens_total{load="4"} 9.0
adaflash_decode_load_laps_total{load="8"} 1.0
adaflash_decode_load_seconds_total{load="8"} 0.5
adaflash_verify_steps_total{domain="x"} 9.0
"""
POLICY = CanaryPolicy(min_steps=1000, tau_loss=0.05, speed_loss=0.1)


def test_the_counters_of_every_process_are_added_and_nothing_else():
    c = counters(TEXT)
    assert (c.requests, c.tokens, c.tokens_squared, c.steps, c.tokens_steps) == (3, 42, 100, 20, 0)
    assert c.loads == {"4": Load(laps=5, seconds=1.5, tokens=9), "8": Load(laps=1, seconds=0.5)}
    assert counters("") == Counters()


def test_what_was_added_since_is_never_negative():
    a, b = Counters(tokens=5, steps=2, loads={"1": Load(laps=2, seconds=1)}), Counters(tokens=7, steps=1)
    assert (b - a) == Counters(tokens=2, steps=0, loads={"1": Load()})


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_impossible_counters_are_refused(bad):
    with pytest.raises(ValidationError):
        Counters(tokens=bad)


def test_load_classes_are_bounded():
    assert [load_class(n) for n in (1, 2, 3, 9, 64, 1000)] == ["1", "2", "4", "16", "64", "64"]


def made(tau: float, requests: int, spread: float = 0.2, **loads: Load) -> Counters:
    """Requests of 50 steps; half of them accept `spread` more than `tau` a step, half so much less."""
    rows = [((tau + spread * (1 if k % 2 else -1)) * 50, 50) for k in range(requests)]
    return Counters(
        requests=requests,
        tokens=sum(t for t, _ in rows),
        steps=sum(s for _, s in rows),
        tokens_squared=sum(t * t for t, _ in rows),
        steps_squared=sum(s * s for _, s in rows),
        tokens_steps=sum(t * s for t, s in rows),
        loads={k[1:]: v for k, v in loads.items()},
    )


def test_the_variance_is_that_of_requests_not_of_steps():
    rng = np.random.default_rng(0)
    found, claimed = [], []
    for _ in range(300):
        steps = rng.integers(5, 60, size=40)
        tokens = steps * rng.normal(2.5, 0.7, size=40).clip(1)  # one request's steps are alike
        c = Counters(
            requests=40,
            tokens=tokens.sum(),
            steps=steps.sum(),
            tokens_squared=(tokens**2).sum(),
            steps_squared=(steps**2).sum(),
            tokens_steps=(tokens * steps).sum(),
        )
        found.append(c.tau)
        claimed.append(c.variance**0.5)
    assert np.mean(claimed) == pytest.approx(np.std(found), rel=0.15)


@pytest.mark.parametrize(
    ("canary", "rest", "outcome"),
    [
        (made(2.0, 19), made(2.0, 500), "open"),  # steps enough, requests too few
        (made(2.0, 500), made(2.0, 19), "open"),
        (made(1.95, 100), made(2.0, 100), "good"),
        (made(1.85, 100), made(2.0, 100), "bad"),
        (made(1.0, 20), made(3.0, 20), "bad"),
        (made(2.0, 40, spread=1.0), made(2.0, 40, spread=1.0), "open"),  # they differ too much to say anything
        (made(2.0, 4000, spread=1.0), made(2.0, 4000, spread=1.0), "good"),
    ],
)
def test_a_candidate_is_judged_once_enough_requests_say_the_same(canary, rest, outcome):
    assert compare(canary, rest, POLICY).outcome == outcome


def test_a_clear_failure_needs_no_minimum_of_steps_but_requests_enough():
    policy = CanaryPolicy(min_steps=10**6)
    assert compare(made(1.0, 3, spread=0), made(3.0, 20), policy).outcome == "bad"
    assert compare(made(1.0, 2, spread=0), made(3.0, 500), policy).outcome == "open"
    assert compare(made(1.0, 3, spread=0), made(3.0, 19), policy).outcome == "open"
    assert compare(made(2.6, 20), made(3.0, 20), policy).outcome == "open"
    # Requests differ so much that three bad ones may be chance, however alike they are.
    assert compare(made(1.0, 3, spread=0), made(3.0, 500, spread=1.0), policy).outcome == "open"


def test_speed_is_compared_between_like_loads_only():
    fast, busy = Load(laps=100, seconds=10, tokens=200), Load(laps=100, seconds=40, tokens=1600)
    rest = made(2.0, 100, _1=fast, _8=busy)
    slow = made(2.0, 100, _1=Load(laps=100, seconds=12, tokens=200))
    assert relative_speed(slow, rest) == pytest.approx(10 / 12)
    assert compare(slow, rest, POLICY).outcome == "bad"
    idle = made(2.0, 100, _1=fast)  # far less loaded than the rest on average
    assert relative_speed(idle, rest) == pytest.approx(1)
    other = made(2.0, 100, _16=Load(laps=100, seconds=99, tokens=9))
    assert relative_speed(other, rest) is None
    assert compare(other, rest, POLICY).outcome == "good"
    few = made(2.0, 100, _1=Load(laps=5, seconds=9, tokens=9))
    assert relative_speed(few, rest) is None
