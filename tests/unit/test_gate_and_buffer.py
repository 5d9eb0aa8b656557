"""What the gate lets out, and what the buffer trains on."""

import random
from collections import Counter

import pytest

from tests.unit.test_rollouts import record
from trainer.buffer import Buffer, FeatureCache, held_out
from trainer.config import BufferConfig, GateConfig
from trainer.gate import gain_interval, judge

GATE = GateConfig(margin=0.1, worst_domain_loss=0.03, min_domain=1, min_held_out=2)


def test_a_clear_gain_passes_with_its_numbers():
    v = judge(GATE, ["a", "b"], [[2, 2], [3]], [[1, 1, 1, 1], [2, 1]], True)
    assert v.promote
    assert (v.tau_candidate, v.tau_active) == (7 / 3, 7 / 6)
    assert v.domains == {"a": (2.0, 1.0), "b": (3.0, 1.5)}


@pytest.mark.parametrize(
    ("domains", "candidate", "active", "finite", "why"),
    [
        (["a", "b"], [[4]] * 2, [[1] * 4] * 2, False, "not finite"),
        (["a"], [[4]], [[1] * 4], True, "2 are needed"),
        (["a", "b"], [[4], [1, 1]], [[1] * 4, [2]], True, "domain b would fall"),
        (["a", "b"], [[2, 2]] * 2, [[2, 2]] * 2, True, "does not beat"),
        ([], [], [], True, "needed"),
    ],
)
def test_everything_else_is_held_back_with_the_reason(domains, candidate, active, finite, why):
    v = judge(GATE, domains, candidate, active, finite)
    assert not v.promote
    assert why in v.why


def test_a_replay_that_does_not_see_what_workers_served_is_not_believed():
    steps = (["a", "b"], [[2, 2], [3]], [[1, 1, 1, 1], [2, 1]], True)
    v = judge(GATE, *steps, (2.0, 1.5))
    assert not v.promote
    assert "replay says tau 1.50 where workers served 2.00" in v.why
    assert v.report()["served"] == (2.0, 1.5)
    assert judge(GATE, *steps, (2.0, 1.95)).promote
    assert judge(GATE, *steps, None).promote


def test_a_mean_gain_that_one_lucky_sequence_made_is_held_back():
    active = [[2, 2, 2, 2]] * 12
    lucky = [[2, 2, 2, 2]] * 10 + [[8], [3, 2, 2, 1]]
    v = judge(GATE, ["a"] * 12, lucky, active, True)
    assert not v.promote
    assert "may be chance" in v.why
    steady = judge(GATE, ["a"] * 12, [[3, 3, 2]] * 12, active, True)
    assert steady.promote
    assert steady.report()["gain_low"] == pytest.approx(8 / 3 - 2)


def test_the_interval_is_paired_and_covers_the_true_gain():
    """Sequences differ by far more than the drafters do; unpaired, the interval would say nothing."""
    rng = random.Random(0)
    covered, widths = 0, []
    for trial in range(60):
        shapes = [(rng.randint(1, 4), rng.randint(8, 60)) for _ in range(24)]  # tokens a step, steps
        active = [[tokens] * steps for tokens, steps in shapes]
        candidate = [[tokens + (rng.random() < 0.1) for _ in range(steps)] for tokens, steps in shapes]
        low, high = gain_interval(candidate, active, 0.9, trial)
        widths.append(high - low)
        covered += low <= 0.1 <= high
    assert covered >= 45
    assert max(widths) < 0.08


def test_a_domain_with_too_few_sequences_has_no_veto():
    config = GATE.model_copy(update={"min_domain": 2})
    assert judge(config, ["a", "a", "b"], [[4], [4], [1, 1]], [[1] * 4, [1] * 4, [2]], True).promote


def rollouts(n, domain, start=0):
    return [record(request_id=f"{domain}{i}").model_copy(update={"domain": domain}) for i in range(start, start + n)]


def test_held_out_sequences_are_never_drawn():
    b = Buffer(BufferConfig(held_out=8, held_out_share=0.3), new_share=0.5, seed=0)
    for i in range(5):
        b.add_round(rollouts(20, "a", 20 * i))
    assert len(b.held_out) == 8
    drawn = {r.request_id for _ in range(200) for r in b.draw(8)}
    assert drawn
    assert not any(held_out(i, 0.3) for i in drawn)


def test_a_step_mixes_new_sequences_with_replay_evenly_over_domains():
    b = Buffer(BufferConfig(per_domain=10, held_out_share=0.01), new_share=0.5, seed=0)
    b.add_round(rollouts(100, "a") + rollouts(5, "b"))
    b.add_round(rollouts(10, "c"))
    drawn = Counter(r.domain for _ in range(300) for r in b.draw(8))
    assert drawn["c"] == 300 * 4
    assert drawn["a"] / drawn["b"] == pytest.approx(1, abs=0.25)
    assert {d: len(k) for d, k in b.replay.items()} == {"a": 10, "b": 5}


def test_a_restored_buffer_holds_the_same_sequences():
    b = Buffer(BufferConfig(held_out_share=0.2), new_share=0.5, seed=0)
    b.add_round(rollouts(30, "a"))
    again = Buffer(BufferConfig(held_out_share=0.2), new_share=0.5, seed=0)
    again.restore(b.everything(), b.seen())
    assert {r.request_id for r in again.everything()} == {r.request_id for r in b.everything()}
    assert [r.request_id for r in again.held_out] == [r.request_id for r in b.held_out]


def test_a_restart_does_not_make_the_reservoir_forget_how_much_it_has_seen():
    config = BufferConfig(held_out_share=0.01, per_domain=10)
    b = Buffer(config, new_share=0.5, seed=0)
    for part in range(50):
        b.add_round(rollouts(20, "a", start=20 * part))
    again = Buffer(config, new_share=0.5, seed=1)
    again.restore(b.everything(), b.seen())
    old = {r.request_id for r in again.replay["a"]}
    again.add_round(rollouts(20, "a", start=2000))
    again.add_round([])
    kept = old & {r.request_id for r in again.replay["a"]}
    assert len(kept) >= 8, "20 new among 1000 old may replace a sequence or two of ten"


def test_features_are_computed_once_and_dropped_beyond_the_byte_limit():
    from tests.unit.test_drafter import features

    calls = []

    def compute(ids, prompts):
        calls.append(len(ids))
        return [features(len(i), p) for i, p in zip(ids, prompts, strict=True)]

    cache = FeatureCache(compute, limit=1 << 20, longest=100)
    some = rollouts(3, "a")
    first = cache.get(some)
    assert cache.get(some[::-1]) == first[::-1]
    assert calls == [3]
    FeatureCache.get(tight := FeatureCache(compute, limit=1, longest=100), some)
    tight.get(some)
    assert calls == [3, 3, 3]
