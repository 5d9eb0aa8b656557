"""The budget planner in SGLang's own class: planned two steps behind on a device, at once on the host."""

from types import SimpleNamespace

import pytest
import torch

from adaflash.budget import choose
from tests.unit.test_budget import table


@pytest.fixture
def planner(monkeypatch):
    """A planner for blocks of 5 with the cost table of the budget tests, two steps behind."""
    from sglang.srt.speculative.dspark_components import dspark_planner as stock

    from serving.sglang_plugin.planner import BudgetPlanner

    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(6, 1)), decode_cuda_graph_runner=None
    )
    made = stock.HostConfidenceBudgetPlanner(
        sps_table=None, cfg=stock.DSparkScheduleConfig(gamma=4), model_runner=runner, relay_lag_steps=0
    )
    return BudgetPlanner(made, table())


def plan(planner, confidence, generation=1):
    rows = len(confidence)
    return planner.compute_budget(
        confidence=confidence,
        generation=torch.full((rows,), generation),
        current_generation=torch.full((rows,), generation),
        req_pool_indices_cpu=torch.arange(rows),
    )


def test_a_device_budget_is_that_of_two_steps_ago_and_a_new_request_counts_as_sure(planner):
    steps = [torch.rand(2, 4, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    got = [plan(planner, c) for c in steps]
    sure = choose(torch.ones(2, 4), table()).slots
    assert got == [sure, sure, *(choose(c.cumprod(-1), table()).slots for c in steps[:3])]
    assert planner.decision.slots == got[-1]
    assert plan(planner, steps[0], generation=2) == sure, "the slot belongs to another request now"


def test_on_the_host_the_budget_is_that_of_the_coming_step(planner):
    c = torch.tensor([[0.9, 0.8, 0.2, 0.1]])
    assert planner.plan_now(c) == choose(c.cumprod(-1), table()).slots
    planner.forced_budget_frac = 0.5
    assert planner.plan_now(c) is None
    assert plan(planner, c) == 2


def test_the_length_rule_leaves_the_lengths_to_its_confidences(planner):
    planner.cost = None
    assert planner.plan_now(torch.rand(2, 4)) is None
    assert plan(planner, torch.rand(2, 4)) == 8


def test_a_step_that_planned_nothing_has_no_decision(planner):
    planner.plan_now(torch.rand(1, 4))
    planner.note_non_decode_step()
    assert planner.decision is None and planner.last_decision is None
