"""What verify steps are counted as."""

from types import SimpleNamespace

import pytest
import torch
from prometheus_client import REGISTRY

from adaflash.budget import Decision
from serving.sglang_plugin.steps import LONGEST_SECONDS, Stopwatch
from serving.sglang_plugin.verify_telemetry import StepFacts, VerifySteps

WIDTH = 4


def value(name, **labels):
    return REGISTRY.get_sample_value(name, labels) or 0.0


@pytest.fixture
def steps():
    """A fresh set of metrics of an adaptive worker, and the switch's observations."""
    before = set(REGISTRY._collector_to_names)
    seen = []
    adaptive = SimpleNamespace(
        settings=SimpleNamespace(mode="adaptive", rule="survival"),
        switch=SimpleNamespace(observe=lambda *a: seen.append(a), gain=1.5),
        heads_present=True,
        drafting=True,
    )
    made = VerifySteps(WIDTH, adaptive)
    made.seen = seen
    yield made
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def test_lengths_and_calibration_count_only_slots_that_were_reached(steps):
    confidence = torch.tensor([[0.95, 0.55, 0.15], [0.35, 0.95, 0.95]])
    # First: 3 rows verified, both drafts accepted. Second: the first draft was wrong, so the others say nothing.
    steps.observe([3, 1], [3, 4], confidence, StepFacts(), 2, 4)
    assert {r: value("adaflash_verify_length_total", rows=str(r)) for r in (1, 3, 4)} == {1: 0, 3: 1, 4: 1}
    got = {b: value("adaflash_confidence_slots_total", bin=str(b)) for b in range(10)}
    assert {b for b, n in got.items() if n} == {9, 5, 3}
    assert value("adaflash_confidence_accepted_total", bin="9") == 1
    assert value("adaflash_confidence_accepted_total", bin="3") == 0
    assert value("adaflash_confidence_sum_total", bin="5") == pytest.approx(0.55)
    assert steps.seen == [(2, 5, 4, True, None)]
    assert value("adaflash_speculation_speedup_ratio") == 1.5


def test_what_nobody_received_does_not_speak_for_speculation(steps):
    """The second request had ended, and a stop hid two tokens of the first."""
    steps.observe([4, 4], [4, 4], None, StepFacts(), 1, 2)
    assert steps.seen == [(1, 3, 2, True, None)]


@pytest.mark.parametrize("why", ["nan", "absent head", "other rule"])
def test_confidences_that_mean_nothing_are_not_judged(steps, why):
    steps._adaptive.heads_present = why != "absent head"
    steps._adaptive.settings.rule = "length" if why == "other rule" else "survival"
    confidence = torch.full((1, 3), float("nan") if why == "nan" else 1.0)
    steps.observe([3], [3], confidence, StepFacts(), 1, 3)
    assert sum(value("adaflash_confidence_slots_total", bin=str(b)) for b in range(10)) == 0


def test_prediction_and_measurement_are_counted_over_the_same_steps(steps):
    d = Decision(slots=3, seconds=0.2, tokens=3.5, whole_seconds=0.5, whole_tokens=4.0)
    steps.observe([3, 1], [3, 2], None, StepFacts(True, d, 0.25), 2, 4)
    steps.observe([3, 1], [3, 2], None, StepFacts(True, d, None), 2, 4)  # its duration is not known
    for kind, tokens, seconds in (("measured", 4, 0.25), ("predicted", 3.5, 0.2), ("whole_block", 4.0, 0.5)):
        assert value("adaflash_step_tokens_total", kind=kind) == tokens
        assert value("adaflash_step_seconds_total", kind=kind) == seconds


def test_shadow_measures_what_the_chosen_lengths_would_have_left(steps):
    steps._adaptive.settings.mode = "shadow"
    d = Decision(slots=2, seconds=0.2, tokens=3.0, whole_seconds=0.5, whole_tokens=4.0)
    confidence = torch.tensor([[0.9, 0.8, 0.1], [0.3, 0.2, 0.1]])  # both slots go to the first request
    steps.observe([4, 2], None, confidence, StepFacts(True, d, 0.5), 2, 6)
    assert value("adaflash_step_tokens_total", kind="measured") == 3 + 1
    assert value("adaflash_step_seconds_total", kind="measured") == 0.2


def test_switching_is_visible_and_the_switch_hears_which_steps_drafted(steps):
    steps._adaptive.drafting = False
    steps.observe([1], [1], None, StepFacts(drafting=False), 1, 1)
    assert (value("adaflash_speculation_on"), value("adaflash_speculation_switches_total", to="off")) == (0, 1)
    steps._adaptive.drafting = True
    steps.observe([2], [2], None, StepFacts(seconds=0.1), 1, 2)
    assert steps.seen == [(1, 0, 1, False, None), (1, 1, 2, True, 0.1)]
    assert (value("adaflash_speculation_on"), value("adaflash_speculation_switches_total", to="on")) == (1, 1)


def test_only_steps_that_follow_an_equal_one_have_a_duration():
    now = 0.0
    watch = Stopwatch(lambda: now)
    laps = []
    for at, requests in ((0, 2), (0.1, 2), (0.2, 3), (0.3, 3), (0.4, 0), (0.5, 3), (0.5 + LONGEST_SECONDS, 3)):
        now = at
        laps.append(watch.lap(requests))
    assert [lap is not None for lap in laps] == [False, True, False, True, False, False, False]
    assert laps[1] == pytest.approx(0.1)
