"""From an engine's metrics to the counters that the release controller compares, and how it compares them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from adaflash.live import CanaryPolicy, Counters, Load, compare, load_class, relative_speed
from serving.worker.counting import counters

TEXT = """
# HELP sglang:num_running_reqs x
sglang:num_running_reqs{model="x"} 1.0
adaflash_decode_tokens_total{pid="1"} 30.0
adaflash_decode_tokens_total{pid="2"} 12.0
adaflash_decode_squared_tokens_total 100.0
adaflash_decode_request_steps_total 20.0
adaflash_decode_laps_total{load="4"} 5.0
adaflash_decode_seconds_total{load="4"} 1.5
adaflash_decode_laps_total{load="8"} 1.0
adaflash_decode_seconds_total{load="8"} 0.5
adaflash_verify_steps_total{domain="x"} 9.0
"""
POLICY = CanaryPolicy(min_steps=1000, tau_loss=0.05, speed_loss=0.1)


def test_the_counters_of_every_process_are_added_and_nothing_else():
    c = counters(TEXT)
    assert (c.tokens, c.squares, c.steps) == (42, 100, 20)
    assert c.loads == {"4": Load(laps=5, seconds=1.5), "8": Load(laps=1, seconds=0.5)}
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


def made(tau: float, steps: float, spread: float = 1.0, **loads: Load) -> Counters:
    squares = steps * (tau**2 + spread**2)
    return Counters(tokens=steps * tau, squares=squares, steps=steps, loads={k[1:]: v for k, v in loads.items()})


@pytest.mark.parametrize(
    ("canary", "rest", "outcome"),
    [
        (made(2.0, 999), made(2.0, 5000), "open"),
        (made(2.0, 5000), made(2.0, 999), "open"),
        (made(1.95, 1000), made(2.0, 1000), "good"),
        (made(1.85, 1000), made(2.0, 1000), "bad"),
        (made(1.0, 100), made(3.0, 100), "bad"),  # long before the minimum
        (made(2.7, 100), made(3.0, 100), "open"),  # may be chance
        (made(1.0, 99), made(3.0, 5000), "open"),
    ],
)
def test_a_candidate_is_judged_by_enough_steps_or_by_a_clear_difference(canary, rest, outcome):
    assert compare(canary, rest, POLICY).outcome == outcome


def test_speed_is_compared_between_like_loads_only():
    rest = made(2.0, 2000, _1=Load(laps=100, seconds=10), _8=Load(laps=100, seconds=40))
    slow = made(2.0, 2000, _1=Load(laps=100, seconds=12))
    assert relative_speed(slow, rest) == pytest.approx(10 / 12)
    assert compare(slow, rest, POLICY).outcome == "bad"
    idle = made(2.0, 2000, _1=Load(laps=100, seconds=10))  # far less loaded than the rest on average
    assert relative_speed(idle, rest) == pytest.approx(1)
    other = made(2.0, 2000, _16=Load(laps=100, seconds=99))
    assert relative_speed(other, rest) is None
    assert compare(other, rest, POLICY).outcome == "good"
    few = made(2.0, 2000, _1=Load(laps=5, seconds=9))
    assert relative_speed(few, rest) is None
