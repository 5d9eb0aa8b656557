"""What the learner keeps between rounds: newest sequences, a replay reservoir per domain, a held-out slice, features.

Held-out sequences are never trained on; which ones are is decided by a hash of the request id, so a restart agrees.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from adaflash.rollouts import Rollout
from adaflash.target import Features
from trainer.config import BufferConfig

_BATCH = 8  # sequences per teacher forward


class Buffer:
    """All sequences the learner knows."""

    def __init__(self, config: BufferConfig, new_share: float, seed: int) -> None:
        self.config, self._new_share = config, new_share
        self._random = random.Random(seed)
        self.newest: list[Rollout] = []
        self.replay: dict[str, list[Rollout]] = {}
        self.held_out: collections.deque[Rollout] = collections.deque(maxlen=config.held_out)
        self._seen: collections.Counter[str] = collections.Counter()

    def add_round(self, rollouts: Iterable[Rollout]) -> None:
        """Starts a round: the previous newest sequences move to the reservoir."""
        for r in self.newest:
            self._reserve(r)
        self.newest = []
        for r in rollouts:
            (self.held_out if held_out(r.request_id, self.config.held_out_share) else self.newest).append(r)

    def _reserve(self, r: Rollout) -> None:
        """Reservoir sampling (Vitter's algorithm R) within the domain."""
        kept = self.replay.setdefault(r.domain, [])
        self._seen[r.domain] += 1
        if len(kept) < self.config.per_domain:
            kept.append(r)
        elif (place := self._random.randrange(self._seen[r.domain])) < self.config.per_domain:
            kept[place] = r

    def draw(self, count: int) -> list[Rollout]:
        """Sequences for one step: `new_share` from the newest round, the rest evenly over the domains' reservoirs."""
        fresh = min(len(self.newest), max(1, round(count * self._new_share)))
        domains = [d for d in self.replay.values() if d]
        chosen = self._random.sample(self.newest, fresh) if self.newest else []
        if not domains:
            return chosen + self._random.sample(self.newest, min(count - fresh, len(self.newest)))
        return chosen + [self._random.choice(self._random.choice(domains)) for _ in range(count - len(chosen))]

    def everything(self) -> list[Rollout]:
        """All sequences, for the durable state; `restore` takes them back."""
        return [*(r for d in self.replay.values() for r in d), *self.newest, *self.held_out]

    def seen(self) -> dict[str, int]:
        """Sequences ever offered to each domain's reservoir, for the durable state."""
        return dict(self._seen)

    def restore(self, rollouts: Sequence[Rollout], seen: Mapping[str, int]) -> None:
        """Refills an empty buffer; nothing counts as new, and old sequences keep their weight in the reservoir."""
        for r in rollouts:
            if held_out(r.request_id, self.config.held_out_share):
                self.held_out.append(r)
            else:
                self._reserve(r)
        for domain, count in seen.items():
            self._seen[domain] = max(self._seen[domain], count)


def held_out(request_id: str, share: float) -> bool:
    """True for about `share` of all ids, always the same ones."""
    digest = hashlib.sha256(request_id.encode()).digest()
    return int.from_bytes(digest[:4], "big") < share * 2**32


class FeatureCache:
    """Target features by request id: computed in batches when missing, the least recently used dropped first."""

    def __init__(
        self, compute: Callable[[list[list[int]], list[int]], list[Features]], limit: int, longest: int
    ) -> None:
        self._compute, self._limit, self._longest = compute, limit, longest
        self._kept: collections.OrderedDict[str, Features] = collections.OrderedDict()
        self._bytes = 0

    def get(self, rollouts: Sequence[Rollout]) -> list[Features]:
        """Features of each of `rollouts`, in order."""
        found = {r.request_id: self._kept[r.request_id] for r in rollouts if r.request_id in self._kept}
        missing = list({r.request_id: r for r in rollouts if r.request_id not in found}.values())
        for i in range(0, len(missing), _BATCH):
            batch = missing[i : i + _BATCH]
            ids = [(r.prompt_ids + r.output_ids)[: self._longest] for r in batch]
            for r, f in zip(batch, self._compute(ids, [len(r.prompt_ids) for r in batch]), strict=True):
                found[r.request_id] = logged = dataclasses.replace(f, accepted=tuple(r.accepted), greedy=r.greedy)
                self._keep(r.request_id, logged)
        for request_id in found:
            if request_id in self._kept:
                self._kept.move_to_end(request_id)
        return [found[r.request_id] for r in rollouts]

    def _keep(self, request_id: str, f: Features) -> None:
        self._kept[request_id] = f
        self._bytes += _size(f)
        while self._bytes > self._limit and self._kept:
            _, old = self._kept.popitem(last=False)
            self._bytes -= _size(old)


def _size(f: Features) -> int:
    return sum(t.numel() * t.element_size() for t in (f.ids, f.context, f.final))
