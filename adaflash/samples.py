"""Token sequences for the offline commands: read from JSONL, answered by the target itself, turned into features.

One line per sample: `prompt_ids`, `output_ids`, and if known `domain`, `accepted` (tokens each verify step emitted) and
`greedy` (false for sampled responses). Exported rollouts have the same keys; further keys are ignored. Lines that
cannot be used are counted by reason.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from adaflash.errors import UserError
from adaflash.rollouts import unusable
from adaflash.target import Features, Target

_BATCH = 16  # prompts answered, or sequences forwarded, at once

Progress = Callable[[str, int, int], None]
"""(what is being done, done, of how many)."""


class SampleError(UserError):
    """A file of samples or conversations that cannot be used; the message names it."""


@dataclass(frozen=True)
class Sample:
    """A prompt and the response the target gave."""

    prompt_ids: list[int]
    output_ids: list[int]
    domain: str = "other"
    accepted: tuple[int, ...] = ()
    greedy: bool = True


@dataclass(frozen=True)
class Conversation:
    """Chat messages; a last assistant message is the response to learn, otherwise the target answers."""

    messages: list[dict[str, str]]
    domain: str = "other"

    @property
    def answered(self) -> bool:
        """True if it ends with a response."""
        return self.messages[-1].get("role") == "assistant"

    def question(self) -> Conversation:
        """The same without its trailing responses."""
        kept = list(self.messages)
        while kept and kept[-1].get("role") == "assistant":
            kept.pop()
        return replace(self, messages=kept)


def read_samples(file: Path, vocabulary: int, longest: int) -> tuple[list[Sample], collections.Counter[str]]:
    """Usable samples of a JSONL file, and how many lines were skipped for which reason."""
    out, skipped = [], collections.Counter[str]()
    for line in _lines(file):
        try:
            row = json.loads(line)
            sample = Sample(
                [int(i) for i in row["prompt_ids"]],
                [int(i) for i in row["output_ids"]],
                str(row.get("domain") or "other"),
                tuple(int(n) for n in row.get("accepted") or ()),
                bool(row.get("greedy", True)),
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            skipped["malformed"] += 1
            continue
        reason = unusable(sample.prompt_ids, sample.output_ids, vocabulary, longest)
        if reason:
            skipped[reason] += 1
        else:
            out.append(sample)
    if not out:
        why = ", ".join(f"{n} {reason}" for reason, n in sorted(skipped.items())) or "it is empty"
        raise SampleError(f"{file} holds no usable sample ({why})")
    return out, skipped


def hold_out(samples: Sequence[Sample], share: float) -> list[int]:
    """Places of the samples to judge on: the first `share` of every domain, at least one of each."""
    places: dict[str, list[int]] = {}
    for i, s in enumerate(samples):
        places.setdefault(s.domain, []).append(i)
    return sorted(i for mine in places.values() for i in mine[: max(1, int(len(mine) * share))])


def write_samples(file: Path, samples: Iterable[Sample]) -> None:
    """Appends samples to a JSONL file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as f:
        for s in samples:
            f.write(json.dumps(asdict(s)) + "\n")


def read_conversations(file: Path) -> list[Conversation]:
    """Conversations from JSONL with `messages`, or `prompt` (one user message); `domain` if there is one."""
    out = []
    for number, line in enumerate(_lines(file, keep_empty=True), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
            if not all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in messages):
                raise TypeError
            conversation = Conversation(list(messages), str(row.get("domain") or "other"))
            usable = bool(conversation.question().messages)
        except (ValueError, KeyError, AttributeError, TypeError):
            raise SampleError(f"{file}, line {number}: expected JSON with 'messages' or 'prompt' as text") from None
        if usable:
            out.append(conversation)
    if not out:
        raise SampleError(f"{file} holds no prompt")
    return out


def _lines(file: Path, *, keep_empty: bool = False) -> list[str]:
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise SampleError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SampleError(f"{file} is not UTF-8 text") from None
    return lines if keep_empty else [line for line in lines if line.strip()]


class Answerer:
    """The target and its tokenizer, answering conversations greedily."""

    def __init__(self, target: Target, model: str) -> None:
        from transformers import AutoTokenizer

        self.target, self.tokenizer = target, AutoTokenizer.from_pretrained(model)
        stop = target.model.generation_config.eos_token_id or self.tokenizer.eos_token_id
        self.stops = set(stop) if isinstance(stop, list) else {stop}

    def samples(
        self, conversations: Sequence[Conversation], max_tokens: int, progress: Progress
    ) -> Iterator[list[Sample]]:
        """Batch by batch and in order: given responses as they are, the others answered by the target."""
        for i in range(0, len(conversations), _BATCH):
            batch = conversations[i : i + _BATCH]
            made = iter(self._answer([c for c in batch if not c.answered], max_tokens))
            yield [self._given(c, max_tokens) if c.answered else next(made) for c in batch]
            progress("answers", min(i + _BATCH, len(conversations)), len(conversations))

    def _prompt(self, c: Conversation) -> list[int]:
        return self._render(c.messages, add_generation_prompt=True)

    def _render(self, messages: list[dict[str, str]], **more: bool) -> list[int]:
        try:
            ids: Any = self.tokenizer.apply_chat_template(messages, return_dict=False, **more)
        except Exception as error:  # the template is the model's own code, and it raises what it likes
            raise SampleError(f"the target's chat template does not take a conversation: {error}") from error
        return list(ids)

    def _given(self, c: Conversation, max_tokens: int) -> Sample:
        prompt = self._prompt(c.question())
        whole = self._render(c.messages)
        return Sample(prompt, until_stop(whole[len(prompt) :], self.stops)[:max_tokens], c.domain)

    def _answer(self, batch: Sequence[Conversation], max_tokens: int) -> list[Sample]:
        if not batch:
            return []
        prompts = [self._prompt(c) for c in batch]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        made = self.target.model.generate(
            ids.to(self.target.device),
            attention_mask=mask.to(self.target.device),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        self.target.forget()
        rows = [until_stop(row[width:].tolist(), self.stops) for row in made]
        return [Sample(p, r, c.domain) for p, r, c in zip(prompts, rows, batch, strict=True)]


def until_stop(ids: list[int], stops: set[int]) -> list[int]:
    """The ids up to and with the first stop token."""
    return next((ids[: i + 1] for i, t in enumerate(ids) if t in stops), ids)


def featurize(target: Target, samples: Sequence[Sample], longest: int, progress: Progress) -> list[Features]:
    """The target's features of every sample, sequences cut at `longest` tokens."""
    out: list[Features] = []
    for i in range(0, len(samples), _BATCH):
        batch = samples[i : i + _BATCH]
        whole = [(s.prompt_ids + s.output_ids)[:longest] for s in batch]
        made = target.features(whole, [len(s.prompt_ids) for s in batch])
        out += [replace(f, accepted=s.accepted, greedy=s.greedy) for f, s in zip(made, batch, strict=True)]
        progress("features", len(out), len(samples))
    return out
