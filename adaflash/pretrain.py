"""`adaflash pretrain`: a short offline distillation, so that the first request already meets a useful drafter.

The target answers the prompts itself (greedy, batched); the drafter is then distilled on those answers exactly as the
trainer does it on traffic.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adaflash.acceptance import replay
from adaflash.bootstrap import drafter_config, target_dtype
from adaflash.checkpoint import load_drafter, save_drafter
from adaflash.distill import DistillConfig, Distiller
from adaflash.drafter import random_drafter
from adaflash.errors import UserError
from adaflash.target import Features, Target

_BATCH = 16  # prompts answered at once
_SEQUENCES = 8  # sequences per optimiser step
_HELD_OUT = 0.1

Progress = Callable[[str, int, int], None]


class PretrainError(UserError):
    """The prompts cannot be used; the message names the line."""


@dataclass(frozen=True)
class Result:
    """What a pre-training reached."""

    steps: int
    seconds: float
    tau_before: float
    tau_after: float
    held_out: int


def read_prompts(file: Path) -> list[list[dict[str, str]]]:
    """Chat messages from JSONL: each line has `messages`, or `prompt` with one user message's text."""
    out = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        except (ValueError, KeyError, AttributeError):
            raise PretrainError(f"{file}, line {number}: expected JSON with 'messages' or 'prompt'") from None
        while messages and messages[-1].get("role") == "assistant":
            messages = messages[:-1]  # the target answers itself
        if messages:
            out.append(messages)
    if not out:
        raise PretrainError(f"{file} holds no prompt")
    return out


def pretrain(
    model: str,
    prompts: Sequence[list[dict[str, str]]],
    out: Path,
    *,
    steps: int,
    max_tokens: int,
    start: Path | None,
    layers: int,
    block: int,
    seed: int,
    progress: Progress,
) -> Result:
    """Answers, distils, and writes the drafter to `out`; Ctrl-C ends early and keeps what was learned."""
    began = time.monotonic()
    drafter = load_drafter(start) if start else random_drafter(drafter_config(model, layers=layers, block=block), seed)
    target = Target(model, drafter.config.target_layer_ids, target_dtype(model))
    drafter.to(target.device)
    features = [f for batch in answers(target, model, prompts, max_tokens, progress) for f in batch]
    held = features[: max(1, int(len(features) * _HELD_OUT))]
    training = features[len(held) :] or held
    before = replay(drafter, held, target.embedding, target.head).tau
    distiller = Distiller(drafter, target.embedding, target.head, DistillConfig(), seed)
    chooser = random.Random(seed)
    try:
        while distiller.steps < steps:
            distiller.step(chooser.sample(training, min(_SEQUENCES, len(training))))
            progress("distilling", distiller.steps, steps)
    except KeyboardInterrupt:
        progress("stopped early", distiller.steps, steps)
    if not distiller.finite():
        raise PretrainError("a parameter became infinite or NaN; nothing was written")
    after = replay(distiller.averaged, held, target.embedding, target.head).tau
    save_drafter(distiller.averaged, out, target_dtype(model))
    return Result(distiller.steps, time.monotonic() - began, before, after, len(held))


def answers(
    target: Target, model: str, prompts: Sequence[list[dict[str, str]]], max_tokens: int, progress: Progress
) -> Iterator[list[Features]]:
    """Features of the target's greedy answers, batch by batch; answers too short to draft for are left out."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    encoded: list[Any] = [
        tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in prompts
    ]
    stop = target.model.generation_config.eos_token_id or tokenizer.eos_token_id
    stops = set(stop) if isinstance(stop, list) else {stop}
    for i in range(0, len(encoded), _BATCH):
        batch = encoded[i : i + _BATCH]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in batch])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
        made = target.model.generate(
            ids.to(target.device),
            attention_mask=mask.to(target.device),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        target.forget()
        responses = [until_stop(row[width:].tolist(), stops) for row in made]
        pairs = [(p, r) for p, r in zip(batch, responses, strict=True) if len(r) >= 2]
        progress("the target answers", min(i + _BATCH, len(encoded)), len(encoded))
        if pairs:
            yield target.features([p + r for p, r in pairs], [len(p) for p, _ in pairs])


def until_stop(ids: list[int], stops: set[int]) -> list[int]:
    """The ids up to and with the first stop token."""
    return next((ids[: i + 1] for i, t in enumerate(ids) if t in stops), ids)
