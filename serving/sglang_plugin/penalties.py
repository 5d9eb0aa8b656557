"""Frequency, presence and repetition penalties and minimum lengths, exact inside a verify block.

Stock SGLang 0.5.23 drops or freezes them while it speculates. A row of a verify block is only ever used if all drafts
before it were accepted, so what was emitted before it is known: the tokens so far, and the chain up to that row. Counts
live on the device beside each request that asks for a penalty; other requests cost nothing. Runs in every rank.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
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
    "sglang.srt.speculative.dspark_components.dspark_observability",
)


@dataclass
class Emitted:
    """What one request has emitted and asks for, all on the device.

    counts [V] fp32; total []: their number; terms [4]: frequency, presence, repetition, least length; stops [V] bool:
    tokens that may not come before that length.
    """

    counts: Tensor
    total: Tensor
    terms: Tensor
    stops: Tensor

    @classmethod
    def of(cls, request: Any, vocabulary: int, device: torch.device) -> Emitted:
        """From what the host knows: after a retraction the tokens so far, else none."""
        p = request.sampling_params
        counts = torch.bincount(torch.tensor(request.output_ids, dtype=torch.int64), minlength=vocabulary).float()
        terms = [p.frequency_penalty, p.presence_penalty, p.repetition_penalty, p.min_new_tokens or 0]
        stops = torch.zeros(vocabulary, dtype=torch.bool)
        if p.min_new_tokens:
            stops[_stop_tokens(request)] = True
        host = (counts, torch.tensor(float(len(request.output_ids))), torch.tensor(terms), stops)
        return cls(*(t.to(device, non_blocking=True) for t in host))


def penalised(request: Any) -> bool:
    """True if the request's next distribution depends on what it has emitted."""
    p = request.sampling_params
    return bool(p.frequency_penalty or p.presence_penalty or p.repetition_penalty != 1.0 or (p.min_new_tokens or 0) > 0)


def penalties(states: Sequence[Emitted], counts: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """What is added to logits, and by what they are scaled, after counts [P, V] of `total` [P] tokens: both [P, V]."""
    frequency, presence, repetition, least = torch.stack([s.terms for s in states]).T[..., None]
    present = counts > 0
    added = -(frequency * counts + presence * present)
    early = total[:, None] < least
    added.masked_fill_(early & torch.stack([s.stops for s in states]), float("-inf"))
    return added, torch.where(present, repetition, 1.0)


def adjust(logits: Sequence[Tensor], states: Sequence[Emitted], chain: Tensor) -> None:
    """Applies penalties in place to the verify blocks of P requests, row by row: memory is that of one row each.

    logits: P views [T, V]; the states include the anchor; chain [P, T]: anchor and drafts. Row j sees the counts after
    drafts 1..j. Order and formulas are those of SGLang's penalizers.
    """
    seen, total = torch.stack([s.counts for s in states]), torch.stack([s.total for s in states])
    one = torch.ones_like(seen[:, :1])
    for j in range(chain.shape[1]):
        if j:
            seen.scatter_add_(1, chain[:, j : j + 1].long(), one)
        added, scale = penalties(states, seen, total + j)
        rows = torch.stack([block[j] for block in logits]).float() + added
        rows = torch.where(rows < 0, rows * scale, rows / scale)
        for block, row in zip(logits, rows, strict=True):
            block[j] = row


class Penalties:
    """Follows the penalised requests of one scheduler; `step` surrounds each forward of the extended worker."""

    def __init__(self, chain: Callable[[], Tensor], vocabulary: int) -> None:
        """`chain`: [R, T] anchor and drafts of the verify step under way."""
        self._chain, self._vocabulary = chain, vocabulary
        self._rows: list[int] = []
        self._requests: list[Any] = []

    @contextmanager
    def step(self, batch: Any) -> Iterator[None]:
        """While the block runs, logits of `batch` are adjusted."""
        global _current
        self._rows = [i for i, r in enumerate(batch.reqs or ()) if penalised(r)]
        self._requests = [batch.reqs[i] for i in self._rows]
        _current = self if self._rows else None
        sampling = batch.sampling_info if self._rows else None
        try:
            if any(r.output_ids for r in self._requests) and batch.forward_mode.is_extend():
                # Prefilled again after a retraction: SGLang's penalizers have forgotten what was emitted before.
                batch.sampling_info = self._resumed(sampling, len(batch.reqs))
            yield
        finally:
            _current = None
            if sampling is not None:
                batch.sampling_info = sampling

    def prefilled(self, tokens: Tensor) -> None:
        """After a prefill. tokens [R]: the token that each request emitted."""
        for row, request in zip(self._rows, self._requests, strict=True):
            state = Emitted.of(request, self._vocabulary, tokens.device)
            state.counts.scatter_add_(0, tokens[row : row + 1].long(), torch.ones_like(state.counts[:1]))
            state.total += 1
            setattr(request, _ATTRIBUTE, state)

    def verified(self, tokens: Tensor, accepted: Tensor) -> None:
        """After a verify step. tokens [R, T] emitted by it, of which the first `accepted` [R] count."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        for row, state in zip(self._rows, self._states(tokens.device), strict=True):
            state.counts.scatter_add_(0, tokens[row].long(), (places < accepted[row]).float())
            state.total += accepted[row]

    @property
    def needed(self) -> bool:
        """True if the batch under way has a penalised request."""
        return bool(self._rows)

    def apply(self, logits: Tensor, width: int) -> None:
        """Adjusts logits [R * width, V] of the batch under way in place."""
        blocks, chain = logits.view(-1, width, logits.shape[-1]), self._chain()
        states = self._states(logits.device)
        adjust([blocks[r] for r in self._rows], states, torch.stack([chain[r] for r in self._rows]))

    def _states(self, device: torch.device) -> list[Emitted]:
        for request in self._requests:
            if getattr(request, _ATTRIBUTE, None) is None:  # it was prefilled elsewhere
                setattr(request, _ATTRIBUTE, Emitted.of(request, self._vocabulary, device))
        return [getattr(r, _ATTRIBUTE) for r in self._requests]

    def _resumed(self, sampling: Any, requests: int) -> Any:
        """`sampling` of a prefill with the penalties of what its requests have emitted already."""
        device = sampling.temperatures.device
        states = [Emitted.of(r, self._vocabulary, device) for r in self._requests]
        added, scale = penalties(
            states, torch.stack([s.counts for s in states]), torch.stack([s.total for s in states])
        )
        whole = (
            torch.zeros(requests, added.shape[1], device=device),
            torch.ones(requests, scale.shape[1], device=device),
        )
        for tensor, rows in zip(whole, (added, scale), strict=True):
            for row, values in zip(self._rows, rows, strict=True):
                tensor[row] = values
        return dataclasses.replace(
            sampling, penalizer_orchestrator=None, acc_additive_penalties=whole[0], acc_scaling_penalties=whole[1]
        )


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
