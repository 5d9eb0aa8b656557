"""When speculation is switched off and on again."""

import pytest

from serving.sglang_plugin.switch import (
    CHECKED_SECONDS,
    FIRST_PAUSE,
    HORIZON,
    LEAST_STEPS,
    LONGEST_PAUSE,
    PROBE,
    Switch,
)
from tests.unit.test_budget import table


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


PLAIN, WHOLE = 0.8, 4.0  # one request, block 5: tabled seconds of a plain step and of one that verifies everything


def run(switch: Switch, tokens: int, steps: int, plain: float | None = None, whole: float | None = None) -> int:
    """Steps that were speculative; from 5 tokens on they pay. `plain`, `whole`: what steps really take."""
    drafted, before = 0, None
    for _ in range(steps):
        draft = switch.decide(1, "v1")
        drafted += draft
        switch.observe(1, 4 if draft else 0, tokens if draft else 1, draft, before)
        before = whole if draft else plain
    return drafted


def test_it_stays_on_while_it_clearly_pays_and_says_how_much():
    switch = Switch(table(), Clock())
    assert run(switch, 7, 500) == 500
    assert switch.gain == pytest.approx(7 * PLAIN / WHOLE)


def test_it_goes_off_below_break_even_and_probes_ever_more_rarely():
    clock = Clock()
    switch = Switch(table(), clock)
    assert run(switch, 2, 400) == HORIZON
    assert not switch.on
    pauses = []
    for _ in range(8):
        before = clock.now
        while not switch.decide(1, "v1"):
            clock.now += 0.5
        pauses.append(clock.now - before)
        assert run(switch, 2, 100) == PROBE
    assert pauses == [FIRST_PAUSE, 4, 8, 16, 32, *[LONGEST_PAUSE] * 3]


def test_a_probe_that_pays_switches_it_on_for_good_and_forgets_the_long_pause():
    clock = Clock()
    switch = Switch(table(), clock)
    run(switch, 2, 400)
    clock.now = FIRST_PAUSE
    assert run(switch, 7, 300) == 300
    run(switch, 1, 800)
    assert not switch.on
    clock.now += FIRST_PAUSE
    assert switch.decide(1, "v1")


def test_a_probe_that_barely_breaks_even_does_not_switch_it_on():
    clock = Clock()
    switch = Switch(table(), clock)
    run(switch, 2, 400)
    clock.now = FIRST_PAUSE
    assert run(switch, 5, 100) == PROBE  # gain exactly 1


def test_a_doubtful_gain_is_checked_once_against_steps_that_do_not_draft():
    clock = Clock()
    switch = Switch(table(), clock)
    assert run(switch, 6, 400, PLAIN, WHOLE) == HORIZON  # 1.2 by the table
    clock.now = FIRST_PAUSE
    assert run(switch, 6, 2000, PLAIN, WHOLE) == 2000
    clock.now += CHECKED_SECONDS + FIRST_PAUSE
    assert run(switch, 6, 400, PLAIN, WHOLE) < 400


@pytest.mark.parametrize(
    ("plain", "whole", "stays"), [(PLAIN / 2, WHOLE, False), (PLAIN, WHOLE * 2, False), (PLAIN / 2, WHOLE / 2, True)]
)
def test_a_wrong_cost_table_is_corrected_by_what_steps_really_take(plain, whole, stays):
    clock = Clock()
    switch = Switch(table(), clock)
    run(switch, 6, 400, plain, whole)
    clock.now = FIRST_PAUSE
    assert (run(switch, 6, 1000, plain, whole) == 1000) == stays
    assert switch.gain == pytest.approx(6 * plain / whole, rel=0.05)


def test_a_disturbed_step_does_not_count_as_drift():
    clock = Clock()
    switch = Switch(table(), clock)
    run(switch, 6, 400, PLAIN, WHOLE)
    clock.now = FIRST_PAUSE
    for k in range(1000):
        assert switch.decide(1, "v1")
        switch.observe(1, 4, 6, True, 400.0 if k % 3 == 0 else WHOLE)


def test_steps_that_end_after_it_went_off_do_not_count():
    switch = Switch(table(), Clock())
    run(switch, 2, HORIZON)
    gain = switch.gain
    switch.observe(1, 4, 5, True, None)
    assert switch.gain == gain


def test_half_the_load_or_another_drafter_is_probed_at_once():
    for requests, drafter in ((4, "v1"), (8, "v2")):
        switch = Switch(table(), Clock())
        for _ in range(HORIZON):
            switch.decide(8, "v1")
            switch.observe(8, 32, 8, True, None)
        assert not switch.decide(8, "v1")
        assert not switch.decide(5, "v1")
        assert switch.decide(requests, drafter)


def test_many_requests_at_once_are_as_much_evidence_as_many_steps():
    switch = Switch(table(), Clock())
    steps = 0
    while switch.decide(128, "v1"):
        switch.observe(128, 512, 128, True, None)
        steps += 1
    assert steps == LEAST_STEPS
