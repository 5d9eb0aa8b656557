"""The verify budget against brute force, the cost table, and the lengths against SGLang's own scheduler."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from adaflash.budget import choose, lengths
from adaflash.cost import CostTable, CostTableError, increasing


def table(**changes) -> CostTable:
    given_ = dict(
        machine="test",
        target="t",
        sglang="0",
        block_size=5,
        requests=(1, 4),
        fractions=(0.0, 0.5, 1.0),
        seconds=((1.0, 2.0, 4.0), (2.0, 6.0, 14.0)),
        plain_seconds=(0.8, 1.6),
    )
    return CostTable(**(given_ | changes))


def test_costs_are_interpolated_between_probes_and_extrapolated_beyond():
    t = table()
    assert t.step_seconds(1).tolist() == [1.0, 1.5, 2.0, 3.0, 4.0]
    assert t.seconds_of(4, 8) == 6.0
    assert t.seconds_of(2, 8) == pytest.approx(4 + (14 - 4) / 3)
    assert t.plain(1) == 0.8
    assert t.plain(7) == pytest.approx(2.4)
    assert t.seconds_of(7, 28) == pytest.approx(24.0)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"requests": (4, 1)}, "increasing"),
        ({"fractions": (0.0, 0.5, 0.9)}, "from 0 to 1"),
        ({"seconds": ((1.0, 2.0, 4.0),)}, "row per batch size"),
        ({"plain_seconds": (0.8,)}, "plain_seconds"),
        ({"seconds": ((0.0, 2.0, 4.0), (2.0, 6.0, 14.0))}, "positive"),
        ({"seconds": ((3.0, 4.0, 5.0), (2.0, 6.0, 14.0))}, "must not fall"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused_by_name(change, word):
    with pytest.raises(ValidationError, match=word):
        table(**change)


def test_a_table_survives_its_file_and_a_broken_file_says_what_to_do(tmp_path):
    file = tmp_path / "cost.json"
    table().save(file)
    assert CostTable.load(file) == table()
    file.write_text("{}")
    with pytest.raises(CostTableError, match=r"machine.*profile-verify"):
        CostTable.load(file)
    with pytest.raises(CostTableError, match="No such file"):
        CostTable.load(tmp_path / "none.json")


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=12))
def test_increasing_never_falls_keeps_the_sum_and_leaves_increasing_data_alone(values):
    out = increasing(values)
    assert out == sorted(out)
    assert sum(out) == pytest.approx(sum(values))
    assert increasing(sorted(values)) == sorted(values)


survivals = st.integers(1, 5).flatmap(
    lambda r: st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=r, max_size=r)
)


@settings(max_examples=60, deadline=None)
@given(survivals)
def test_the_budget_is_the_best_of_all_or_everything_where_that_gains_too_little(rows):
    survival = torch.tensor(rows).cumprod(-1)
    d = choose(survival, table())
    ranked = sorted(survival.flatten().tolist(), reverse=True)
    r = len(rows)
    cost = table().step_seconds(r).tolist()
    speeds = [(r + sum(ranked[:m])) / cost[m] for m in range(len(cost))]
    best = max(speeds[: sum(s >= 1e-6 for s in ranked) + 1])
    if best / speeds[-1] >= 1.03 + 1e-6:
        assert speeds[d.slots] == pytest.approx(best)
        assert d.gain == pytest.approx(best / speeds[-1] - 1)
    if best / speeds[-1] < 1.03 - 1e-6:
        assert (d.slots, d.gain) == (4 * r, pytest.approx(0))
    assert d.tokens == pytest.approx(r + sum(ranked[: d.slots]), rel=1e-5)
    assert d.seconds == pytest.approx(cost[d.slots])


@settings(max_examples=60, deadline=None)
@given(survivals, st.integers(0, 20))
def test_lengths_are_what_sglangs_scheduler_hands_out(rows, slots):
    from sglang.kernels.ops.speculative.dspark.dspark_schedule import schedule_verify_lens_topk_from_survival
    from sglang.srt.speculative.dspark_components.dspark_planner import DSparkScheduleConfig

    survival = torch.tensor(rows).cumprod(-1)
    theirs = schedule_verify_lens_topk_from_survival(
        survival_probs=survival, budget=slots, cfg=DSparkScheduleConfig(gamma=4)
    )
    assert lengths(survival, slots).tolist() == theirs.tolist()


def test_a_confidence_that_is_not_a_number_is_not_worth_a_row():
    survival = torch.tensor([[float("nan")] * 4])
    assert choose(survival, table()).slots == 0
