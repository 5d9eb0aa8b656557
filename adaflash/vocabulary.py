"""Vocabulary-wide work of the losses: per-slot values and their gradient at the drafter's states, chunk by chunk.

The head is frozen, so the gradient with respect to the states is finished in the same pass as the value, and no
[slots x vocabulary] tensor outlives its chunk. Slots that share a target position share its teacher row: with many
anchors on one sequence most teacher products are saved. Products run in the head's dtype, everything else in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_PRODUCT_ROWS = 256  # slots per matrix product
_CACHE_ELEMENTS = 1 << 19  # logits worked on at once on CPU, so that they stay in the processor's cache
_DEVICE_ELEMENTS = 1 << 26  # and on an accelerator, where launches cost more than memory
_TAIL_FLOOR = -18.4  # log of the least tail mass that a top-k teacher may claim, 1e-8


class Teacher(Protocol):
    """The target's distributions at P positions; slots name their position by row."""

    def open(self, rows: Tensor) -> OpenTeacher:
        """Makes the given rows ready, in this order."""
        ...


class OpenTeacher(Protocol):
    """Some teacher rows, ready to be read. `label` [rows]: their argmax."""

    label: Tensor

    def log_q(self, places: Tensor, log_p: Tensor) -> Tensor:
        """Log-probabilities [r, V] fp32, a fresh tensor, at `places` [r] of the opened rows."""
        ...


@dataclass(frozen=True)
class HiddenTeacher:
    """Final-normed target states [P, H] and the target's head [V, H]."""

    states: Tensor
    head: Tensor

    def open(self, rows: Tensor) -> OpenTeacher:
        """One product for all rows."""
        logits = F.linear(self.states[rows].to(self.head.dtype), self.head)
        return _OpenHidden(logits)


class _OpenHidden:
    def __init__(self, logits: Tensor) -> None:
        self.logits, self.label = logits, logits.argmax(-1)
        step = _rows_at_once(logits)
        parts = [torch.logsumexp(part.float(), -1) for part in logits.split(step)]
        self.normaliser = torch.cat(parts)

    def log_q(self, places: Tensor, log_p: Tensor) -> Tensor:
        return self.logits[places].float().sub_(self.normaliser[places, None])


@dataclass(frozen=True)
class TopKTeacher:
    """Stored log-probabilities of the k likeliest tokens: ids [P, k] int64, log_probs [P, k] fp32, likeliest first.

    The rest of the mass is one event: inside it the teacher is taken to agree with the drafter, which gives exactly
    the divergence between the two distributions over (k tokens, rest).
    """

    ids: Tensor
    log_probs: Tensor

    def open(self, rows: Tensor) -> OpenTeacher:
        """Only gathers."""
        return _OpenTopK(self.ids[rows], self.log_probs[rows].float())


class _OpenTopK:
    def __init__(self, ids: Tensor, log_probs: Tensor) -> None:
        self.ids, self.log_probs, self.label = ids, log_probs, ids[:, 0]
        mass = log_probs.exp().sum(-1).clamp_max(1.0)
        self.tail = torch.log1p(-mass).clamp_min(_TAIL_FLOOR)

    def log_q(self, places: Tensor, log_p: Tensor) -> Tensor:
        ids = self.ids[places]
        rest = torch.logsumexp(log_p.scatter(-1, ids, -torch.inf), -1)
        log_q = log_p + (self.tail[places] - rest)[:, None]
        return log_q.scatter_(-1, ids, self.log_probs[places])


class Chunk:
    """Some slots with the drafter's and the teacher's distributions, each computed when a term first asks for it."""

    def __init__(self, logits: Tensor, teacher: OpenTeacher, places: Tensor, token: Tensor) -> None:
        self.logits, self._teacher, self._places = logits, teacher, places
        self.label, self.token = teacher.label[places], token
        top, self.argmax = logits.max(-1)
        self.p = torch.softmax(logits, -1)
        # The likeliest token has probability >= 1 / V: its logarithm is safe.
        self.normaliser = top - self.p.gather(-1, self.argmax[:, None])[:, 0].log()
        self.row = torch.zeros_like(top)  # gradient: p * (row + multiple) - minus, then the label entries
        self.multiple: Tensor | None = None
        self.minus: Tensor | None = None
        self.marks: list[tuple[Tensor, Tensor]] = []

    @cached_property
    def log_p(self) -> Tensor:
        """[r, V]."""
        return self.logits - self.normaliser[:, None]

    @cached_property
    def log_q(self) -> Tensor:
        """[r, V]."""
        return self._teacher.log_q(self._places, self.log_p)

    @cached_property
    def q(self) -> Tensor:
        """[r, V]."""
        return self.log_q.exp()

    @cached_property
    def gap(self) -> Tensor:
        """log p - log q [r, V]."""
        return self.log_p - self.log_q

    def log_p_of(self, tokens: Tensor) -> Tensor:
        """[r]."""
        return self.logits.gather(-1, tokens[:, None])[:, 0] - self.normaliser

    def add_multiple(self, m: Tensor) -> None:
        """Takes `m` [r, V], which the caller gives away."""
        self.multiple = m if self.multiple is None else self.multiple.add_(m)

    def add_minus(self, m: Tensor) -> None:
        """Takes `m` [r, V], which the caller gives away."""
        self.minus = m if self.minus is None else self.minus.add_(m)

    def gradient(self) -> Tensor:
        """d sum(terms) / d logits, [r, V]."""
        if self.multiple is None:
            g = self.p.mul_(self.row[:, None])
        else:
            g = self.multiple.add_(self.row[:, None]).mul_(self.p)
        if self.minus is not None:
            g = g.sub_(self.minus)
        for tokens, amount in self.marks:
            g.scatter_add_(-1, tokens[:, None], -amount[:, None])
        return g


class Term(Protocol):
    """One summand of a loss: returns its value [r] and adds `weight` [r] times its gradient to the chunk."""

    def __call__(self, chunk: Chunk, weight: Tensor, /) -> Tensor:
        """value [r], fp32."""
        ...


@dataclass
class SlotValues:
    """What one pass found, per slot [n]: term values, and what every loss reports."""

    terms: list[Tensor]
    cross_entropy: Tensor
    argmax: Tensor
    agreement: Tensor
    label_probability: Tensor
    overlap: Tensor | None
    gradient: Tensor = field(repr=False)


def slot_pass(
    hidden: Tensor,
    head: Tensor,
    teacher: Teacher,
    rows: Tensor,
    token: Tensor,
    terms: Sequence[tuple[Term, Tensor]],
    *,
    overlap: bool,
) -> SlotValues:
    """Values and gradient of `terms` for n slots.

    hidden [n, H] drafter states; head [V, H]; rows [n] the slots' teacher rows; token [n] the served tokens; each
    term comes with its coefficient [n]. `gradient` [n, H] is d (sum of coefficient * term) / d hidden, row by row; zero
    where there is no term. `overlap` asks for 1 - TV(drafter, teacher) per slot.
    """
    n, device = len(hidden), hidden.device
    order = torch.argsort(rows, stable=True)
    grad = torch.zeros_like(hidden)
    values = [hidden.new_zeros(n, dtype=torch.float32) for _ in terms]
    ce, p_label = (hidden.new_zeros(n, dtype=torch.float32) for _ in range(2))
    shared = hidden.new_zeros(n, dtype=torch.float32) if overlap else None
    argmax, agree = torch.zeros(n, dtype=torch.int64, device=device), hidden.new_zeros(n, dtype=torch.float32)
    step = _rows_at_once(head.T)
    for part in order.split(_PRODUCT_ROWS):
        distinct, place = torch.unique_consecutive(rows[part], return_inverse=True)
        opened = teacher.open(distinct)
        logits = F.linear(hidden[part].to(head.dtype), head)
        for i in range(0, len(part), step):
            s = part[i : i + step]
            chunk = Chunk(logits[i : i + step].float(), opened, place[i : i + step], token[s])
            log_label = chunk.log_p_of(chunk.label)
            ce[s], p_label[s] = -log_label, log_label.exp()
            argmax[s], agree[s] = chunk.argmax, (chunk.argmax == chunk.label).float()
            if shared is not None:
                shared[s] = torch.minimum(chunk.p, chunk.q).sum(-1)
            for value, (term, coefficient) in zip(values, terms, strict=True):
                value[s] = term(chunk, coefficient[s])
            if terms:
                logits[i : i + step] = chunk.gradient()  # over its own logits: they are used up
        if terms:
            grad[part] = F.linear(logits, head.t()).to(grad.dtype)
    return SlotValues(values, ce, argmax, agree, p_label, shared, grad)


def _rows_at_once(logits: Tensor) -> int:
    """Rows of [..., V] to work on at once."""
    return max(1, (_CACHE_ELEMENTS if logits.device.type == "cpu" else _DEVICE_ELEMENTS) // logits.shape[-1])
