"""The drafter's optimisers: Muon or AdamW for its matrices, AdamW for its vectors, and the running average of weights.

Built by the distiller; `state_dict` and `load_state_dict` make a training resumable.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, Literal

import torch
from torch import Tensor, nn

from adaflash.drafter import Drafter

OptimizerName = Literal["muon", "adamw"]


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024): momentum, orthogonalised by Newton-Schulz, scaled by sqrt(max(1, rows / columns)).

    The same update as `torch.optim.Muon` with `adjust_lr_fn="original"` and no weight decay. That one always iterates
    in bf16, which takes 1.6 times as long as fp32 on a processor without bf16 tiles, and is most of a small drafter's
    step.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95, iterations: int = 5) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "iterations": iterations})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p.grad)
                state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(p.grad.lerp(state["momentum"], group["momentum"]), group["iterations"])
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonalise(m: Tensor, iterations: int) -> Tensor:
    """Pushes all singular values of m [a, b] towards 1: the quintic Newton-Schulz iteration, result in m's dtype."""
    x = m.to(_product_dtype(m.device))
    if m.shape[0] > m.shape[1]:
        x = x.T
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.T if m.shape[0] > m.shape[1] else x).to(m.dtype)


@functools.cache
def _product_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the hardware has units for it."""
    tiles = device.type == "cpu" and getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return torch.bfloat16 if device.type != "cpu" or tiles else torch.float32


class Optimizers:
    """Both optimisers of a drafter's trunk, stepped together."""

    def __init__(self, parameters: list[nn.Parameter], name: OptimizerName, rate: float, vector_rate: float) -> None:
        matrices = [p for p in parameters if p.ndim == 2]
        vectors = [p for p in parameters if p.ndim < 2]
        self.all: list[torch.optim.Optimizer] = []
        if matrices and name == "muon":
            self.all.append(Muon(matrices, rate))
        elif matrices:
            self.all.append(torch.optim.AdamW(matrices, lr=rate, weight_decay=0.0))
        if vectors:
            self.all.append(torch.optim.AdamW(vectors, lr=vector_rate, weight_decay=0.0))

    def step(self) -> None:
        """One update from the current gradients, which are dropped."""
        for o in self.all:
            o.step()
            o.zero_grad()

    def state_dict(self) -> list[dict[str, Any]]:
        """For `load_state_dict`."""
        return [o.state_dict() for o in self.all]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Takes up where `state` was saved, with the settings given here, not those of then."""
        for o, s in zip(self.all, state, strict=True):
            load_optimizer(o, s)


def load_optimizer(o: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads momenta but keeps the rates that `o` was built with; `state` is copied, torch would share its tensors."""
    settings = [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups]
    o.load_state_dict(copy.deepcopy(state))
    for group, mine in zip(o.param_groups, settings, strict=True):
        group.update(mine)


class WeightAverage:
    """Exponential average of a drafter's weights; traffic has no end, so it takes the place of annealing the rate."""

    def __init__(self, drafter: Drafter, decay: float) -> None:
        self.decay = decay
        self.drafter = copy.deepcopy(drafter).requires_grad_(False)

    def update(self, drafter: Drafter, steps: int) -> None:
        """Short memory at first, so that a random start is forgotten; heads are not averaged but taken over."""
        keep = min(self.decay, steps / (steps + 4))
        trunk = {n for n, _ in drafter.trunk_parameters()}
        with torch.no_grad():
            new = dict(drafter.named_parameters())
            for name, mean in self.drafter.named_parameters():
                mean.lerp_(new[name], 1 - keep if name in trunk else 1.0)
