"""How many drafted tokens are worth verifying: two small heads on the drafter's block states, and their calibration.

The heads read detached states, so fitting them never moves the drafter. The scalar head is AdaFlash's (arXiv
2607.19223, section 3.3); the per-slot head gives the survival curve that a verify budget is shared by.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEFAULT_WIDTH = 256


class LengthHead(nn.Module):
    """One ratio per block: the share of the block that is worth verifying."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(2 * hidden, width)
        self.res = nn.ModuleList([nn.Linear(width, width)])
        self.out = nn.Linear(width, 1)

    def forward(self, block: Tensor) -> Tensor:
        """block [n, B, H], final-normed states with the anchor row -> logit of the ratio [n], fp32."""
        block = block.detach().float()
        x = F.silu(self.down(torch.cat([block.mean(1), block[:, -1]], -1)))
        return self.out(x + F.silu(self.res[0](x)))[:, 0]


class ConfidenceHead(nn.Module):
    """One confidence per drafted slot: the probability that it is accepted, given that all before it were."""

    temperature: Tensor

    def __init__(self, hidden: int, slots: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden, 1)
        self.register_buffer("temperature", torch.ones(slots))

    def forward(self, block: Tensor) -> Tensor:
        """block [n, B, H] with the anchor row -> logits [n, B - 1], fp32, divided by the slots' temperatures."""
        return self.raw(block) / self.temperature

    def raw(self, block: Tensor) -> Tensor:
        """The same before calibration."""
        return self.proj(block[:, 1:].detach().float())[..., 0]


def survival(confidence: Tensor) -> Tensor:
    """a_j = prod_{i <= j} c_i: probability that slots 1..j are all accepted. confidence [..., B - 1] in (0, 1)."""
    return confidence.cumprod(-1)


def verify_length(ratio: Tensor, block: int, rate: float = 1.3) -> Tensor:
    """Rows to verify, anchor included: clamp(round(ratio * B * rate), 1, B) (AdaFlash, section 3.3). int64 [n]."""
    return (ratio * block * rate).round().clamp(1, block).long()


def length_label(accepted: Tensor, block: int) -> Tensor:
    """Label of the scalar head: (accepted drafts + 1) / B, in [1/B, 1]. accepted [n], a count or its expectation."""
    return (accepted + 1).clamp(0, block).float() / block


def length_loss(logit: Tensor, accepted: Tensor, block: int) -> Tensor:
    """Mean squared error of the ratio."""
    return F.mse_loss(torch.sigmoid(logit), length_label(accepted, block))


def confidence_loss(logits: Tensor, label: Tensor, weight: Tensor) -> Tensor:
    """Binary cross-entropy against labels in [0, 1]: what was accepted, or 1 - TV(drafter, target) in expectation.

    All [n, B - 1]; `weight`: probability that the slot is reached, 0 outside of the sequence.
    """
    loss = F.binary_cross_entropy_with_logits(logits, label.clamp(0, 1), reduction="none")
    return (loss * weight).sum() / weight.sum().clamp_min(1)


def expected_calibration_error(probability: Tensor, outcome: Tensor, bins: int = 10) -> float:
    """sum_b n_b / n |mean probability - mean outcome| over equal-width bins; 0 for no data. Both [n], fp32."""
    if not len(probability):
        return 0.0
    probability, outcome = probability.cpu(), outcome.cpu()
    place = (probability * bins).long().clamp(0, bins - 1)
    zero = torch.zeros(bins, dtype=torch.float64)
    p = zero.index_add(0, place, probability.double())
    y = zero.index_add(0, place, outcome.double())
    return float((p - y).abs().sum() / len(probability))


def fit_temperatures(raw: Tensor, outcome: Tensor, inside: Tensor) -> Tensor:
    """Per-slot temperatures that minimise cross-entropy of observed outcomes.

    raw [n, S] logits, outcome [n, S] 0/1, inside [n, S] bool: slots that were reached. A slot with fewer than 20
    observations, or only one kind of outcome, borrows the temperature fitted over all slots.
    """
    common = _temperature(raw[inside], outcome[inside])
    fitted = []
    for slot in range(raw.shape[1]):
        seen = inside[:, slot]
        y = outcome[seen, slot]
        enough = len(y) >= 20 and 0 < float(y.float().mean()) < 1
        fitted.append(_temperature(raw[seen, slot], y) if enough else common)
    return torch.tensor(fitted)


def _temperature(raw: Tensor, outcome: Tensor) -> float:
    """Golden-section search on the log temperature; the objective has one minimum."""
    if not len(raw):
        return 1.0
    z, y = raw.double(), outcome.double()

    def cost(log_t: float) -> float:
        return float(F.binary_cross_entropy_with_logits(z / torch.e**log_t, y))

    low, high, golden = -3.0, 3.0, 0.6180339887498949
    a, b = high - golden * (high - low), low + golden * (high - low)
    fa, fb = cost(a), cost(b)
    for _ in range(40):
        if fa < fb:
            high, b, fb = b, a, fa
            a = high - golden * (high - low)
            fa = cost(a)
        else:
            low, a, fa = a, b, fb
            b = low + golden * (high - low)
            fb = cost(b)
    return float(torch.e ** ((low + high) / 2))
