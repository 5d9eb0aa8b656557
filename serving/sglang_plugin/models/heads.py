"""The drafter's heads as SGLang's `DSPARK` route sees them: one module that turns block states into confidences.

SGLang schedules verify lengths from a confidence per drafted slot. The confidence head gives one directly; the scalar
length head says how many slots to verify, which becomes a confidence of almost one up to there and of zero beyond.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adaflash.heads import DEFAULT_WIDTH, ConfidenceHead, LengthHead, verify_length
from serving.sglang_plugin.settings import VerifySettings

LENGTH, CONFIDENCE = "length", "slots"
# Tensor names in a checkpoint and below this module.
_NAMES = {
    f"confidence_head.{LENGTH}.": f"{LENGTH}.",
    f"confidence_head.{CONFIDENCE}.": f"{CONFIDENCE}.",
    "thresh_head_two_model.": f"{LENGTH}.",
    "confidence_head.": f"{CONFIDENCE}.",
}
_STEP = 1e-3  # the length rule's slots are ranked by depth: a budget that is short cuts the deepest first


class Heads(nn.Module):
    """Both heads in fp32 and which of them the loaded version really has."""

    present: Tensor
    sts_temperatures: Tensor

    def __init__(self, hidden: int, slots: int, width: int | None, settings: VerifySettings) -> None:
        super().__init__()
        self.length = LengthHead(hidden, width or DEFAULT_WIDTH).float()
        self.slots = ConfidenceHead(hidden, slots).float()
        temperature = self.slots.temperature
        del self.slots.temperature
        # SGLang's checksum and ours cover parameters only.
        self.slots.temperature = nn.Parameter(temperature, requires_grad=False)
        self.rule, self.rate = settings.rule, settings.rate
        # A tensor, not a flag: captured graphs read it.
        self.register_buffer("present", torch.zeros((), dtype=torch.bool), persistent=False)
        self.known_present = False
        self.register_buffer("sts_temperatures", torch.ones(()), persistent=False)  # SGLang's own calibration: unused

    @property
    def proj(self) -> nn.Linear:
        """SGLang reads the dtype of its weight."""
        return self.slots.proj

    def forward(self, block: Tensor) -> Tensor:
        """block [n, B, hidden] with the anchor row -> confidence of each drafted slot [n, B - 1], fp32.

        Without the head that the rule needs every slot is worth verifying.
        """
        if self.rule == "length":
            width = block.shape[1]
            rows = verify_length(torch.sigmoid(self.length(block)), width, self.rate)
            slot = torch.arange(1, width, device=block.device)
            confidence = torch.where(slot < rows[:, None], 1 - _STEP, 0.0)
        else:
            confidence = torch.sigmoid(self.slots(block))
        return torch.where(self.present, confidence, 1.0)

    @staticmethod
    def own_name(name: str) -> str | None:
        """The parameter of a checkpoint's tensor, None if it is not a head's; our own names stay as they are."""
        for theirs, ours in _NAMES.items():
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return None

    def takes(self, name: str, tensor: Tensor) -> bool:
        """False for a head of another width that the rule does not read anyway."""
        return name.startswith(self.needed()) or self.get_parameter(name).shape == tensor.shape

    def needed(self) -> str:
        """Prefix of the tensors that the rule cannot do without."""
        return f"{LENGTH}." if self.rule == "length" else f"{CONFIDENCE}."

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Takes what a version has, `tensors` by our names below this module; the rest becomes zero, not stale."""
        parameters = dict(self.named_parameters())
        for name, parameter in parameters.items():
            if name in tensors:
                parameter.data.copy_(tensors[name])
            else:
                parameter.data.zero_()
        needed = {n for n in parameters if n.startswith(self.needed())}
        self.present.fill_(needed <= tensors.keys())

    def remember(self) -> None:
        """Keeps the flag where the host reads it without waiting for the device."""
        self.known_present = bool(self.present)
