"""What a verify step costs, by requests and rows: measured by `adaflash profile-verify`, read by the verify planner.

A request verifies one row for its anchor and one per drafted slot. Costs are kept per number of requests, since
attention and scheduling grow with requests and matrix products with rows; between probes they are interpolated.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator
from torch import Tensor

from adaflash.errors import UserError, one_line


class CostTableError(UserError):
    """A cost table that cannot be used; the message says which and why."""


class CostTable(BaseModel):
    """Seconds of a step, measured on one machine for one target and block size."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    machine: str
    target: str = Field(description="fingerprint of the target")
    sglang: str
    block_size: int = Field(ge=2)
    requests: tuple[int, ...] = Field(min_length=1, description="probed batch sizes, increasing")
    fractions: tuple[float, ...] = Field(min_length=2, description="probed shares of the drafted slots, from 0 to 1")
    seconds: tuple[tuple[float, ...], ...] = Field(description="[requests][fractions]")
    plain_seconds: tuple[float, ...] = Field(description="per batch size: a step that drafts nothing")

    _by_requests: dict[int, Tensor] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if list(self.requests) != sorted(set(self.requests)) or self.requests[0] < 1:
            raise ValueError(f"requests {list(self.requests)} must be positive and increasing")
        f = list(self.fractions)
        if f != sorted(set(f)) or f[0] != 0 or f[-1] != 1:
            raise ValueError(f"fractions {f} must increase from 0 to 1")
        if len(self.seconds) != len(self.requests) or any(len(row) != len(f) for row in self.seconds):
            raise ValueError("seconds needs one row per batch size and one number per fraction")
        if len(self.plain_seconds) != len(self.requests):
            raise ValueError("plain_seconds needs one number per batch size")
        if min(min(row) for row in (*self.seconds, self.plain_seconds)) <= 0:
            raise ValueError("every cost must be positive")
        for column in (*zip(*self.seconds, strict=True), self.plain_seconds):
            if list(column) != sorted(column):  # beyond the last probe the last slope goes on
                raise ValueError("costs must not fall with the number of requests")
        return self

    def step_seconds(self, requests: int) -> Tensor:
        """Cost of a step of `requests` that verifies 0, 1, ... all drafted slots: [requests * (B - 1) + 1] fp64."""
        if requests not in self._by_requests:
            self._by_requests[requests] = self._step_seconds(requests)
        return self._by_requests[requests]

    def _step_seconds(self, requests: int) -> Tensor:
        slots = requests * (self.block_size - 1)
        share = torch.arange(slots + 1, dtype=torch.float64) / slots
        low, high, weight = _neighbours(self.requests, requests)
        a, b = (_interpolate(self.fractions, self.seconds[i], share) for i in (low, high))
        return torch.lerp(a, b, weight).clamp_min(1e-9)

    def seconds_of(self, requests: int, slots: int) -> float:
        """Cost of one step of `requests` that verifies `slots` drafted slots."""
        table = self.step_seconds(requests)
        return float(table[min(max(slots, 0), len(table) - 1)])

    def plain(self, requests: int) -> float:
        """Cost of a step that drafts nothing and emits one token per request."""
        low, high, weight = _neighbours(self.requests, requests)
        a, b = self.plain_seconds[low], self.plain_seconds[high]
        return max(a + (b - a) * weight, 1e-9)

    def save(self, path: Path) -> None:
        """Replaces the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(path.name + ".tmp")
        scratch.write_text(self.model_dump_json(indent=1))
        os.replace(scratch, path)

    @classmethod
    def load(cls, path: Path) -> CostTable:
        """Raises CostTableError with one line."""
        try:
            return cls.model_validate_json(path.read_text())
        except OSError as error:
            raise CostTableError(f"cost table {path}: {error.strerror}; `adaflash profile-verify` makes one") from None
        except ValueError as error:
            raise CostTableError(f"cost table {path}: {one_line(error)}; run `adaflash profile-verify` again") from None


def increasing(values: list[float]) -> list[float]:
    """The nearest sequence that never falls (pool adjacent violators): more rows never cost less, noise says so."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (b, m), (a, n) = pools.pop(), pools.pop()
            pools.append(((a * n + b * m) / (n + m), n + m))
    return [value for value, n in pools for _ in range(n)]


def _neighbours(probes: tuple[int, ...], requests: int) -> tuple[int, int, float]:
    """Indices to interpolate between and the weight of the second; beyond the last probe the last slope goes on."""
    if len(probes) == 1 or requests <= probes[0]:
        return 0, 0, 0.0
    high = next((i for i, p in enumerate(probes) if p >= requests), len(probes) - 1)
    low = high - 1
    return low, high, (requests - probes[low]) / (probes[high] - probes[low])


def _interpolate(xs: tuple[float, ...], ys: tuple[float, ...], at: Tensor) -> Tensor:
    x, y = torch.tensor(xs, dtype=torch.float64), torch.tensor(ys, dtype=torch.float64)
    high = torch.searchsorted(x, at.contiguous()).clamp(1, len(x) - 1)
    low = high - 1
    return y[low] + (at - x[low]) / (x[high] - x[low]) * (y[high] - y[low])
