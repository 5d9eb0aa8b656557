"""`adaflash rollouts`: the newest entries of a model's rollout stream as a JSONL file of samples, oldest first."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from adaflash.errors import UserError
from adaflash.keys import Keys
from adaflash.rollouts import FIELD, RolloutError, unpack

_KEYS = {"prompt_ids", "output_ids", "domain", "accepted"}


class ExportError(UserError):
    """Nothing could be written; the message says why."""


def export(redis: Redis, name: str, out: Path, count: int) -> tuple[int, int]:
    """Writes at most `count` rollouts; returns how many were written and how many entries were unreadable."""
    stream = Keys(name).rollouts
    try:
        entries: Any = redis.xrevrange(stream, count=count)
    except RedisError as error:
        raise ExportError(f"Redis cannot be read: {error}") from None
    if not entries:
        raise ExportError(f"no rollouts of {name}: the stream {stream} is empty")
    lines, skipped = [], 0
    for _, fields in reversed(entries):
        try:
            r = unpack(fields[FIELD])
        except (RolloutError, KeyError):
            skipped += 1
            continue
        lines.append(json.dumps(r.model_dump(include=_KEYS) | {"greedy": r.greedy}))
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_name(out.name + ".tmp")
    scratch.write_text("".join(line + "\n" for line in lines))
    os.replace(scratch, out)
    return len(lines), skipped
