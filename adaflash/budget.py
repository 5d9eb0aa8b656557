"""How many drafted slots a whole batch should verify: the choice that the verify planner makes before each step.

With a_ij the probability that slots 1..j of request i are all accepted, verifying the m likeliest slots emits
R + sum of their a in t(R, m) seconds; the best m maximises the quotient. One budget for the batch lets a confident
request use what an unsure one would waste.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adaflash.cost import CostTable

NEVER = 1e-6  # survival below this is not worth a thought (SGLang's scheduler drops it too)
LEAST_GAIN = 0.03  # below this predicted gain everything is verified: predictions are not that good


@dataclass(frozen=True)
class Decision:
    """Slots to verify beyond one row per request; seconds and tokens that are promised for it and for all slots."""

    slots: int
    seconds: float
    tokens: float
    whole_seconds: float
    whole_tokens: float

    @property
    def gain(self) -> float:
        """Tokens per second over those of verifying everything, minus 1."""
        return self.tokens / self.seconds / (self.whole_tokens / self.whole_seconds) - 1


def choose(survival: Tensor, cost: CostTable, least_gain: float = LEAST_GAIN) -> Decision:
    """survival [R, B - 1] fp32 on CPU. Everything is verified where the best budget gains less than `least_gain`."""
    requests, slots = survival.shape
    likeliest = survival.flatten().double().nan_to_num(0.0).sort(descending=True).values
    tokens = requests + torch.cat([torch.zeros(1, dtype=torch.float64), likeliest.cumsum(0)])
    seconds = cost.step_seconds(requests)
    speed = tokens / seconds
    worth = int((likeliest >= NEVER).sum())
    best = int(speed[: worth + 1].argmax())
    if float(speed[best] / speed[-1]) - 1 < least_gain:
        best = requests * slots
    return Decision(best, float(seconds[best]), float(tokens[best]), float(seconds[-1]), float(tokens[-1]))


def lengths(survival: Tensor, slots: int) -> Tensor:
    """Rows per request [R] int64 when the likeliest `slots` are verified: what SGLang's scheduler hands out.

    survival [R, B - 1], falling along each row; ties go to the earlier slot, then to the earlier request.
    """
    requests = len(survival)
    by_depth = survival.T.flatten()
    taken = torch.argsort(by_depth, descending=True, stable=True)[:slots]
    taken = taken[by_depth[taken] >= NEVER] % requests
    return 1 + torch.bincount(taken, minlength=requests)
