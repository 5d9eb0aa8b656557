"""The ablation's traffic: greedy answers of the target to real prompts, made once and kept in the work folder."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from adaflash.samples import (
    Answerer,
    Conversation,
    Progress,
    Sample,
    featurize,
    read_conversations,
    read_samples,
    write_samples,
)
from adaflash.target import Features, Target
from demo.prompts import prompts as generated

DOMAINS = ("math", "code")
MAX_TOKENS, LONGEST = 64, 384


@dataclass(frozen=True)
class Data:
    """Features and domains, training and held-out, in the same order each."""

    training: list[Features]
    training_domains: list[str]
    held_out: list[Features]
    held_out_domains: list[str]
    samples: list[Sample]


def load(target: Target, model: str, files: list[Path], work: Path, count: int, held: int, progress: Progress) -> Data:
    """`count` training and `held` held-out sequences per domain, answered by the target if the folder lacks them."""
    file = work / "samples.jsonl"
    if not file.is_file():
        answerer, scratch = Answerer(target, model), work / "samples.tmp"
        scratch.unlink(missing_ok=True)
        for batch in answerer.samples(conversations(files, count + held), MAX_TOKENS, progress):
            write_samples(scratch, batch)
        scratch.rename(file)
    samples, _ = read_samples(file, target.embedding.shape[0], LONGEST)
    features = featurize(target, samples, LONGEST, progress)
    kept: dict[str, list[int]] = {d: [i for i, s in enumerate(samples) if s.domain == d] for d in DOMAINS}
    test = [i for d in DOMAINS for i in kept[d][:held]]
    train = [i for d in DOMAINS for i in kept[d][held:]]
    return Data(
        [features[i] for i in train],
        [samples[i].domain for i in train],
        [features[i] for i in test],
        [samples[i].domain for i in test],
        [samples[i] for i in train],
    )


def conversations(files: list[Path], per_domain: int) -> list[Conversation]:
    """The same number of each domain, shuffled with a fixed seed."""
    if files:
        found = [c.question() for f in files for c in read_conversations(f)]
    else:
        found = [Conversation(p.messages, p.domain) for p in islice(generated(5, DOMAINS), 2 * per_domain)]
    out = []
    for d in DOMAINS:
        mine = [c for c in found if c.domain == d and len(c.messages[-1]["content"]) < 600]
        random.Random(3).shuffle(mine)
        out += mine[:per_domain]
    return out
