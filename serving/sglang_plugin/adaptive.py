"""Adaptive verification in one scheduler rank: our planner, and speculation that is left out while it does not pay.

Installed around objects that the stock `DSPARK` worker already has; its decode step is not touched. While speculation
is off the drafter does not run and each request verifies one row, but the step still writes the drafter's K/V for every
committed token, so drafting can start again at any step.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.speculative.dspark_components.dspark_draft import (
    DraftBlockResult,
    DraftProposal,
    resolve_draft_params,
)
from torch import Tensor

from adaflash.budget import Decision
from adaflash.cost import CostTable
from serving.sglang_plugin.planner import BudgetPlanner, zero_budget
from serving.sglang_plugin.settings import VerifySettings
from serving.sglang_plugin.steps import LONGEST_SECONDS
from serving.sglang_plugin.switch import Switch

logger = logging.getLogger(__name__)

AGREE_EVERY = 4  # decode steps between two agreements of the tensor-parallel ranks


class Adaptive:
    """What the extended worker asks about each decode step. `leader`: the rank whose clock and measurements count."""

    def __init__(self, worker: Any, settings: VerifySettings, leader: bool) -> None:
        self.worker, self.settings, self.leader = worker, settings, leader
        self.cost = CostTable.load(settings.cost_table) if settings.cost_table else None
        rule_cost = self.cost if settings.rule == "survival" else None
        self.planner = BudgetPlanner(worker._verify_planner._budget_planner, rule_cost)
        worker._verify_planner._budget_planner = self.planner
        can_skip = settings.mode == "adaptive"  # only there a step may verify less than whole blocks
        self.switch = Switch(self.cost) if settings.switch and can_skip and self.cost else None
        self.drafting, self.forced_off = True, False
        self._switched_on, self._steps = True, 0
        self.confidence: Tensor | None = None  # [R, B - 1] of the step under way
        # SGLang forgets steps that took over a second, which they may on a CPU.
        worker._observers._info_dumper._max_step_cpu_seconds = LONGEST_SECONDS
        self._propose = worker._proposer.propose
        worker._proposer.propose = self.propose
        self._resolve = worker._verify_planner.resolve_verify_token_budget
        worker._verify_planner.resolve_verify_token_budget = self.resolve_budget

    @property
    def decision(self) -> Decision | None:
        """The planner's choice for the step under way, None where nothing was predicted."""
        return self.planner.decision

    @property
    def heads_present(self) -> bool:
        """True if the loaded drafter has the head that the rule reads."""
        return bool(self.worker.draft_model.confidence_head.known_present)

    def begin_step(self, requests: int) -> None:
        """Before each decode step, on every rank: the leader's clock and measurements decide for all."""
        if self.switch is not None and self._steps % AGREE_EVERY == 0:
            self._switched_on = self._agreed(self._decide(requests) if self.leader else True)
        self._steps += 1
        self.drafting = self._switched_on and not self.forced_off

    def _decide(self, requests: int) -> bool:
        from sglang.srt.runtime_context import get_serving

        assert self.switch is not None
        return self.switch.decide(requests, str(get_serving().weight_version))

    def propose(self, **kwargs: Any) -> DraftProposal:
        """Stock proposal, or none at all while speculation is off."""
        proposal = self._propose(**kwargs) if self.drafting else self._empty(**kwargs)
        self.confidence = proposal.confidence if self.drafting else None
        return proposal

    def resolve_budget(self, **kwargs: Any) -> int | None:
        """Slots to verify; none while speculation is off. In `shadow` they are noted and whole blocks are verified."""
        budget: int | None = zero_budget(self.planner)
        if self.drafting:
            budget = self.planner.plan_now(kwargs["confidence"])
            budget = self._resolve(**kwargs) if budget is None else budget
        return budget if self.settings.mode == "adaptive" else None

    def _empty(self, *, draft_input: Any, bs: int, sampling_info: Any, **_: Any) -> DraftProposal:
        """Mask tokens that nobody verifies, shaped as the step expects them."""
        proposer = self.worker._proposer
        device = draft_input.bonus_tokens.device
        ids = proposer.draft_block_ids_view(bs=bs, device=device)
        ids[:, 0].copy_(draft_input.bonus_tokens.view(-1))
        params = resolve_draft_params(sampling_info=sampling_info, bs=bs, device=device)
        block = DraftBlockResult(
            draft_tokens=ids[:, 1:].clone(),
            corrected_logits=None,
            greedy_mask=params.greedy_mask,
            temperatures=params.temperatures,
            greedy_draft=True,
        )
        # The budget of this step is zero whatever they say; the first steps that draft again are planned from these.
        sure = torch.ones(bs, proposer.gamma, device=device)
        shown = ids[:, : proposer.gamma].contiguous()
        return DraftProposal(draft_block_ids=shown, draft_block=block, confidence=sure, confidence_raw=sure)

    def _agreed(self, mine: bool) -> bool:
        """The leader's answer, on every tensor-parallel rank: ranks that disagree would hang in a collective."""
        from sglang.srt.runtime_context import get_parallel

        group = get_parallel().tp_group
        if group.world_size == 1:
            return mine
        answer = torch.tensor([int(mine)], dtype=torch.int64)
        torch.distributed.broadcast(answer, src=group.ranks[0], group=group.cpu_group)
        return bool(answer.item())
