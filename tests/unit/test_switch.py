"""When speculation is switched off and on again."""

import pytest

from serving.sglang_plugin.switch import FIRST_PAUSE, HORIZON, LONGEST_PAUSE, PROBE_STEPS, Switch
from tests.unit.test_budget import table


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


# One request, block 5: a plain step costs 0.8, a step that verifies everything 4.0: it pays from 5 tokens on.
def run(switch: Switch, tokens: int, steps: int) -> int:
    """Steps that were speculative."""
    drafted = 0
    for _ in range(steps):
        if switch.decide():
            drafted += 1
            switch.observe(1, 4, tokens)
    return drafted


def test_it_stays_on_while_it_pays_and_says_how_much():
    switch = Switch(table(), Clock())
    assert run(switch, 6, 500) == 500
    assert switch.gain == pytest.approx(6 * 0.8 / 4.0)


def test_it_goes_off_below_break_even_and_probes_ever_more_rarely():
    clock = Clock()
    switch = Switch(table(), clock)
    assert run(switch, 2, 200) == HORIZON
    assert not switch.on
    pauses = []
    for _ in range(8):
        before = clock.now
        while not switch.decide():
            clock.now += 0.5
        pauses.append(clock.now - before)
        assert run(switch, 2, 100) == PROBE_STEPS
    assert pauses == [FIRST_PAUSE, 4, 8, 16, 32, *[LONGEST_PAUSE] * 3]


def test_a_probe_that_pays_switches_it_on_for_good_and_forgets_the_long_pause():
    clock = Clock()
    switch = Switch(table(), clock)
    run(switch, 2, 200)
    clock.now = FIRST_PAUSE
    assert run(switch, 6, 300) == 300
    run(switch, 1, 400)
    assert not switch.on
    clock.now += FIRST_PAUSE
    assert switch.decide()


def test_a_probe_that_barely_breaks_even_does_not_switch_it_on():
    clock = Clock()
    switch = Switch(table(), clock)
    run(switch, 2, 200)
    clock.now = FIRST_PAUSE
    assert run(switch, 5, 100) == PROBE_STEPS  # gain exactly 1


def test_steps_that_end_after_it_went_off_do_not_count():
    switch = Switch(table(), Clock())
    run(switch, 2, 200)
    gain = switch.gain
    switch.observe(1, 4, 5)
    assert switch.gain == gain
