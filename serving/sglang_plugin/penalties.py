"""Frequency, presence and repetition penalties and minimum lengths, exact inside a verify block.

Stock SGLang 0.5.23 drops or freezes them while it speculates. A row of a verify block is only ever used if all drafts
before it were accepted, so what was emitted before it is known: the tokens so far, and the chain up to that row. Counts
live on the device beside each request that asks for a penalty; other requests cost nothing. Runs in every rank.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ATTRIBUTE = "_adaflash_penalty"  # on SGLang's Req: lives and dies with it
# Modules that import the two functions below by name.
_MODULES = (
    "sglang.srt.speculative.dflash_utils",
    "sglang.srt.speculative.dflash_worker_v2",
    "sglang.srt.speculative.dspark_components.dspark_planner",
    "sglang.srt.speculative.dspark_components.dspark_verify",
    "sglang.srt.speculative.dspark_components.dspark_worker_v2",
)


@dataclass
class Emitted:
    """What one request has emitted so far: counts [V] fp32 and their number, both on the device."""

    counts: Tensor
    total: Tensor


@dataclass(frozen=True)
class Terms:
    """Penalties of the penalised requests, each [P, 1, 1]; `stops` [P, V] bool: tokens that may not come too early."""

    frequency: Tensor
    presence: Tensor
    repetition: Tensor
    least: Tensor
    stops: Tensor


def penalised(request: Any) -> bool:
    """True if the request's next distribution depends on what it has emitted."""
    p = request.sampling_params
    return bool(p.frequency_penalty or p.presence_penalty or p.repetition_penalty != 1.0 or (p.min_new_tokens or 0) > 0)


def adjust(logits: Tensor, counts: Tensor, total: Tensor, chain: Tensor, terms: Terms) -> Tensor:
    """Applies `terms` to every row of verify blocks.

    logits [P, T, V]; counts [P, V] and total [P] include the anchor; chain [P, T] is anchor and drafts. Row j sees the
    counts after drafts 1..j. Order and formulas are those of SGLang's penalizers. Returns logits in their dtype.
    """
    drafted = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    drafted[:, 1:].scatter_(-1, chain[:, 1:, None].long(), 1.0)
    seen = counts[:, None] + drafted.cumsum(1)
    present = seen > 0
    out = logits.float() - terms.frequency * seen - terms.presence * present
    row = torch.arange(logits.shape[1], device=logits.device)
    early = total[:, None] + row < terms.least[:, 0]
    out = out.masked_fill(early[..., None] & terms.stops[:, None], float("-inf"))
    scale = torch.where(present, terms.repetition, 1.0)
    return torch.where(out < 0, out * scale, out / scale).to(logits.dtype)


class Penalties:
    """Follows the penalised requests of one scheduler; `step` surrounds each forward of the extended worker."""

    def __init__(self, chain: Callable[[], Tensor]) -> None:
        """`chain`: [R, T] anchor and drafts of the verify step under way."""
        self._chain = chain
        self._rows: list[int] = []
        self._requests: list[Any] = []

    @contextmanager
    def step(self, batch: Any) -> Iterator[None]:
        """While the block runs, verify logits of `batch` are adjusted."""
        global _current
        rows = [i for i, r in enumerate(batch.reqs or ()) if penalised(r)]
        self._rows, self._requests = rows, [batch.reqs[i] for i in rows]
        _current = self if rows else None
        try:
            yield
        finally:
            _current = None

    def prefilled(self, tokens: Tensor, vocabulary: int) -> None:
        """After a prefill. tokens [R]: the first token of each request; a retracted one starts from what it had."""
        for row, request in zip(self._rows, self._requests, strict=True):
            before = torch.tensor(request.output_ids, dtype=torch.int64, device=tokens.device)
            counts = torch.bincount(before, minlength=vocabulary).float()
            counts.scatter_add_(0, tokens[row : row + 1].long(), torch.ones(1, device=tokens.device))
            setattr(request, _ATTRIBUTE, Emitted(counts, torch.tensor(len(before) + 1, device=tokens.device)))

    def verified(self, tokens: Tensor, accepted: Tensor) -> None:
        """After a verify step. tokens [R, T] emitted by it, of which the first `accepted` [R] count."""
        for row, request in zip(self._rows, self._requests, strict=True):
            emitted: Emitted = getattr(request, _ATTRIBUTE)
            counts = (torch.arange(tokens.shape[1], device=tokens.device) < accepted[row]).float()
            emitted.counts.scatter_add_(0, tokens[row].long(), counts)
            emitted.total += accepted[row]

    @property
    def needed(self) -> bool:
        """True if the batch under way has a penalised request."""
        return bool(self._rows)

    def apply(self, logits: Tensor, width: int) -> None:
        """Adjusts logits [R * width, V] of the batch under way in place."""
        states: list[Emitted] = [getattr(r, _ATTRIBUTE) for r in self._requests]
        view = logits.view(-1, width, logits.shape[-1])
        rows = torch.tensor(self._rows, device=logits.device)
        counts, total = torch.stack([s.counts for s in states]), torch.stack([s.total for s in states])
        view[rows] = adjust(view[rows], counts, total, self._chain()[rows], self._terms(logits))

    def _terms(self, logits: Tensor) -> Terms:
        params = [r.sampling_params for r in self._requests]
        table = [[p.frequency_penalty, p.presence_penalty, p.repetition_penalty, p.min_new_tokens or 0] for p in params]
        columns = torch.tensor(table, dtype=torch.float32, device=logits.device).T[..., None, None]
        stops = torch.zeros(len(params), logits.shape[-1], dtype=torch.bool)
        for i, request in enumerate(self._requests):
            if request.sampling_params.min_new_tokens:
                stops[i, _stop_tokens(request)] = True
        return Terms(columns[0], columns[1], columns[2], columns[3], stops.to(logits.device))


_current: Penalties | None = None  # the scheduler is one thread; set while a batch with a penalised request runs


def _stop_tokens(request: Any) -> list[int]:
    """The tokens that SGLang's own minimum-length penalizer forbids."""
    tokenizer = request.tokenizer
    found = set(request.sampling_params.stop_token_ids or ()) | set(request.eos_token_ids or ())
    found |= set(tokenizer.additional_stop_token_ids or ()) | {tokenizer.eos_token_id}
    return sorted(t for t in found if t is not None)


def install() -> None:
    """Puts our version before SGLang's logits adjustments of a verify step, once per process."""
    from sglang.srt.speculative import dflash_utils
    from sglang.srt.speculative.dspark_components import dspark_verify

    stock = dflash_utils.apply_dflash_verify_logits_adjustments
    if getattr(stock, "_adaflash", False):
        return

    def adjusted(*, next_token_logits: Tensor, sampling_info: Any, draft_token_num: int) -> None:
        if _current is not None and sampling_info is not None:
            _current.apply(next_token_logits, draft_token_num)
            sampling_info = dataclasses.replace(
                sampling_info, penalizer_orchestrator=None, acc_additive_penalties=None, acc_scaling_penalties=None
            )
        stock(next_token_logits=next_token_logits, sampling_info=sampling_info, draft_token_num=draft_token_num)

    adjusted._adaflash = True  # type: ignore[attr-defined]
    noop = dspark_verify.verify_logits_adjustments_are_noop

    def nothing_to_adjust(sampling_info: Any) -> bool:
        return _current is None and noop(sampling_info)

    replaced = {
        "apply_dflash_verify_logits_adjustments": (stock, adjusted),
        "verify_logits_adjustments_are_noop": (noop, nothing_to_adjust),
    }
    for name in _MODULES:
        module = sys.modules.get(name)
        for attribute, (old, new) in replaced.items():
            if module is not None and getattr(module, attribute, None) is old:
                setattr(module, attribute, new)
