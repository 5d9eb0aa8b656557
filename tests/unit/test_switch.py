"""When speculation is switched off and on again."""

import pytest

from serving.sglang_plugin.switch import FIRST_PAUSE, HORIZON, LEAST_STEPS, LONGEST_PAUSE, PROBE, Switch
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
        if switch.decide(1, "v1"):
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
        while not switch.decide(1, "v1"):
            clock.now += 0.5
        pauses.append(clock.now - before)
        assert run(switch, 2, 100) == PROBE
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
    assert switch.decide(1, "v1")


def test_a_probe_that_barely_breaks_even_does_not_switch_it_on():
    clock = Clock()
    switch = Switch(table(), clock)
    run(switch, 2, 200)
    clock.now = FIRST_PAUSE
    assert run(switch, 5, 100) == PROBE  # gain exactly 1


def test_steps_that_end_after_it_went_off_do_not_count():
    switch = Switch(table(), Clock())
    run(switch, 2, 200)
    gain = switch.gain
    switch.observe(1, 4, 5)
    assert switch.gain == gain


def test_half_the_load_or_another_drafter_is_probed_at_once():
    for requests, drafter in ((4, "v1"), (8, "v2")):
        switch = Switch(table(), Clock())
        for _ in range(HORIZON):
            switch.decide(8, "v1")
            switch.observe(8, 32, 8)
        assert not switch.decide(8, "v1")
        assert not switch.decide(5, "v1")
        assert switch.decide(requests, drafter)


def test_many_requests_at_once_are_as_much_evidence_as_many_steps():
    switch = Switch(table(), Clock())
    steps = 0
    while switch.decide(64, "v1"):
        switch.observe(64, 256, 64)
        steps += 1
    assert steps == LEAST_STEPS
