"""Replay: what acceptance a drafter would reach on stored sequences, walked exactly as a worker walks them.

Called by the trainer's evaluation and by the offline commands. It has to agree with the acceptance that a worker
serving the same drafter reports; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from adaflash.drafter import Drafter
from adaflash.heads import survival, verify_length
from adaflash.target import Features

Rule = Callable[[Drafter, Tensor], Tensor]
"""Verify length of each block, anchor included: (drafter, states [n, B, H]) -> int64 [n] in 1..B."""


def length_rule(rate: float) -> Rule:
    """AdaFlash's: the scalar head's ratio, stretched by `rate`."""

    def rule(drafter: Drafter, states: Tensor) -> Tensor:
        assert drafter.length_head is not None
        return verify_length(torch.sigmoid(drafter.length_head(states)), states.shape[1], rate)

    return rule


def survival_rule(least: float) -> Rule:
    """Verifies the slots whose survival is at least `least`, and the anchor."""

    def rule(drafter: Drafter, states: Tensor) -> Tensor:
        assert drafter.confidence_head is not None
        return 1 + (survival(torch.sigmoid(drafter.confidence_head(states))) >= least).sum(-1)

    return rule


@dataclass(frozen=True)
class Step:
    """One verify step: `offset` of its anchor in the response, correct drafts, rows verified, tokens emitted.

    `correct` counts the drafter's whole run, also beyond the verified rows; `emitted` is cut at the sequence's end.
    """

    offset: int
    correct: int
    verified: int
    emitted: int


@dataclass(frozen=True)
class Acceptance:
    """The verify steps of each sequence."""

    walks: list[list[Step]] = field(default_factory=list)

    @property
    def steps(self) -> list[list[int]]:
        """Tokens emitted by each step, bonus included."""
        return [[s.emitted for s in walk] for walk in self.walks]

    @property
    def tau(self) -> float:
        """Acceptance length: tokens per verify step over all sequences; 1.0 when there was no step."""
        return tau_of([s for walk in self.walks for s in walk])

    @property
    def verified(self) -> float:
        """Mean rows verified per step; 0.0 when there was no step."""
        steps = [s for walk in self.walks for s in walk]
        return sum(s.verified for s in steps) / len(steps) if steps else 0.0

    def by(self, groups: Sequence[str]) -> dict[str, float]:
        """Acceptance length per group, `groups[i]` naming sequence i's (its domain, say)."""
        steps: dict[str, list[Step]] = {}
        for group, walk in zip(groups, self.walks, strict=True):
            steps.setdefault(group, []).extend(walk)
        return {g: tau_of(s) for g, s in sorted(steps.items())}

    def by_position(self, size: int) -> dict[int, float]:
        """Acceptance length of the steps that began in response tokens [b, b + size), keyed by b."""
        steps: dict[int, list[Step]] = {}
        for s in (s for walk in self.walks for s in walk):
            steps.setdefault(s.offset // size * size, []).append(s)
        return {b: tau_of(s) for b, s in sorted(steps.items())}

    def per_slot(self, block: int) -> list[float]:
        """For slot k = 1..B-1: share of its verifications that accepted it, given that all slots before it were."""
        out = []
        for k in range(1, block):
            # A step cut by the end of its sequence says nothing about slots after the end.
            reached = [s for walk in self.walks for s in walk if s.correct >= k - 1 and s.verified > k and _known(s, k)]
            out.append(sum(s.correct >= k for s in reached) / len(reached) if reached else 0.0)
        return out


def _known(s: Step, slot: int) -> bool:
    """Whether the step's sequence went on far enough to judge `slot`."""
    return s.correct >= slot or s.emitted == min(s.correct + 1, s.verified)


def tau_of(steps: Sequence[Step]) -> float:
    """Tokens per verify step."""
    return sum(s.emitted for s in steps) / len(steps) if steps else 1.0


@torch.inference_mode()
def replay(
    drafter: Drafter,
    features: Sequence[Features],
    embedding: Tensor,
    head: Tensor,
    rule: Rule | None = None,
    vocabulary: Tensor | None = None,
) -> Acceptance:
    """Walks all sequences in lock step: draft at the anchor, take the longest matching run + 1, jump.

    The first response token comes from prefill, so it is the first anchor and no step emitted it. `embedding` and
    `head` [vocab, hidden] are the target's. With a `rule`, only that many rows are verified and can be taken.
    `vocabulary` [rows of head] int64 names the tokens of a reduced head.
    """
    if not features:
        return Acceptance()
    width, device = drafter.config.block_size, embedding.device
    context = drafter.encode([f.context for f in features])
    ids, lengths = _pad([f.ids for f in features], width), [len(f.ids) for f in features]
    anchors = [f.prompt for f in features]
    walks: list[list[Step]] = [[] for _ in features]
    while live := [i for i, a in enumerate(anchors) if a < lengths[i] - 1]:
        row = torch.tensor(live, device=device)
        anchor = torch.tensor([anchors[i] for i in live], device=device)
        states = drafter(context, row, anchor, drafter.block_embeddings(embedding, ids[row, anchor]))
        wanted = ids[row[:, None], anchor[:, None] + torch.arange(1, width, device=device)]
        runs = _runs(states[:, 1:], wanted, head, vocabulary).tolist()
        verified = [width] * len(live) if rule is None else rule(drafter, states).tolist()
        for i, run, rows in zip(live, runs, verified, strict=True):
            emitted = min(run + 1, rows, lengths[i] - 1 - anchors[i])
            walks[i].append(Step(anchors[i] - features[i].prompt, run, rows, emitted))
            anchors[i] += emitted
    return Acceptance(walks)


def _runs(states: Tensor, wanted: Tensor, head: Tensor, vocabulary: Tensor | None) -> Tensor:
    """Leading slots whose argmax is the wanted token: states [n, S, H], wanted [n, S] -> int64 [n].

    Slot by slot, and only for blocks that are right so far: the head is most of a replay's work, and most blocks of a
    young drafter are wrong at once.
    """
    run = torch.zeros(len(states), dtype=torch.int64, device=states.device)
    right = torch.arange(len(states), device=states.device)
    for slot in range(states.shape[1]):
        proposed = F.linear(states[right, slot].to(head.dtype), head).argmax(-1)
        if vocabulary is not None:
            proposed = vocabulary[proposed]
        right = right[proposed == wanted[right, slot]]
        if not len(right):
            break
        run[right] += 1
    return run


def _pad(rows: Sequence[Tensor], extra: int) -> Tensor:
    """Right-pads token rows with -1, `extra` columns beyond the longest, so that no lookup leaves the table."""
    width = max(map(len, rows)) + extra
    return torch.stack([F.pad(r, (0, width - len(r)), value=-1) for r in rows])
