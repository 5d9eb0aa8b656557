"""The verify budget inside SGLang's `DSPARK` planner: our rules in the place of its own, everything else is stock.

SGLang plans from confidences of two steps ago, so that it never waits for the device; the slots of the coming step are
then handed out by its own confidences. Where the confidences are on the host anyway the budget is that of the coming
step. On every tensor-parallel rank the inputs are equal, so the budgets are.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.dspark_components.dspark_planner import (
    HostConfidenceBudgetPlanner,
    VerifyBudgetDecision,
    ragged_capture_num_tokens,
)
from torch import Tensor

from adaflash.budget import Decision, choose
from adaflash.cost import CostTable


class BudgetPlanner(HostConfidenceBudgetPlanner):
    """`cost` None: the length rule, whose confidences already say what to verify."""

    def __init__(self, stock: HostConfidenceBudgetPlanner, cost: CostTable | None) -> None:
        self.__dict__.update(stock.__dict__)
        self.cost = cost
        self.decision: Decision | None = None

    def compute_budget(
        self, *, confidence: Tensor, generation: Tensor, current_generation: Tensor, req_pool_indices_cpu: Tensor
    ) -> int:
        """Drafted slots to verify in the coming step. confidence [R, B - 1] of an earlier step, on CPU."""
        lagged, lagged_generation = self._shift_to_lag(
            confidence=confidence, generation=generation, req_pool_indices_cpu=req_pool_indices_cpu
        )
        survival = self._two_steps_prior_survival(
            lagged_confidence=lagged, lagged_generation=lagged_generation, current_generation=current_generation
        )
        self.decision = None
        if self.forced_budget_frac is not None:
            slots = round(self.forced_budget_frac * survival.numel())
        elif self.cost is not None:
            self.decision = choose(survival, self.cost)
            slots = self.decision.slots
        elif ragged_capture_num_tokens(model_runner=self._model_runner) is None:
            slots = survival.numel()  # without graphs nothing has to be sized ahead
        else:
            slots = int((survival >= self.cfg.survival_eps).sum())
        seconds = self.decision.seconds if self.decision else None
        self.last_decision = VerifyBudgetDecision(budget=slots, predicted_step_seconds=seconds)
        return slots

    def plan_now(self, confidence: Tensor | None) -> int | None:
        """The budget from the coming step's own confidences [R, B - 1]; None where that would wait for the device."""
        if self.cost is None or self.forced_budget_frac is not None or confidence is None or confidence.is_cuda:
            return None
        self.decision = choose(confidence.float().cumprod(-1), self.cost)
        self.last_decision = VerifyBudgetDecision(
            budget=self.decision.slots, predicted_step_seconds=self.decision.seconds
        )
        return self.decision.slots

    def note_non_decode_step(self) -> None:
        """No budget was planned: no decision stands for the step."""
        super().note_non_decode_step()
        self.decision = None


def zero_budget(planner: Any) -> int:
    """What a step that drafts nothing verifies: one row per request."""
    planner.last_decision = VerifyBudgetDecision(budget=0)
    planner.decision = None
    return 0
