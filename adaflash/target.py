"""The frozen target as a teacher: turns token ids into the features that distillation and replay read.

Called by the trainer's learner and by the offline commands. SGLang serves the same checkpoint; nothing here is on the
serving path.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adaflash.drafter_config import TargetShape
from adaflash.errors import UserError


class TargetError(UserError):
    """The target cannot be read; the message says what to change."""


@dataclass(frozen=True)
class Features:
    """What the target computed on one sequence of T tokens.

    `ids` [T] int64; `prompt` prompt tokens; `context` [T, K * hidden] outputs of the drafter's context layers;
    `final` [T - prompt + 1, hidden] final-normed states from position prompt - 1 on (they predict tokens prompt..T);
    `accepted`: tokens that each verify step emitted when the sequence was served, empty where that is unknown;
    `greedy`: the target's argmax was served, not a sample.
    """

    ids: Tensor
    prompt: int
    context: Tensor
    final: Tensor
    accepted: tuple[int, ...] = ()
    greedy: bool = True


def read_config(path: str | Path) -> dict[str, Any]:
    """The `config.json` under a local model directory, or of a hub id."""
    local = Path(path) / "config.json"
    if local.is_file():
        loaded: dict[str, Any] = json.loads(local.read_text())
        return loaded
    if Path(path).exists() or str(path).startswith((".", "/")):
        raise TargetError(f"no model at {path}: config.json is missing; give a model directory or a hub id")
    from transformers import AutoConfig

    try:
        found: dict[str, Any] = AutoConfig.from_pretrained(str(path)).to_dict()
        return found
    except OSError as error:
        raise TargetError(f"no model at {path}: not a directory here, and the hub could not be read") from error


def target_shape(path: str | Path) -> TargetShape:
    """Vocabulary, hidden size and depth of the target, from its config alone."""
    c = read_config(path)
    c = c.get("text_config") or c
    return TargetShape(int(c["vocab_size"]), int(c["hidden_size"]), int(c["num_hidden_layers"]))


class Target:
    """An HF causal LM, frozen, with hooks on the layers whose output is the drafter's context.

    Hooks rather than `output_hidden_states`: HF's last hidden state is final-normed, SGLang's context is not.
    """

    def __init__(self, path: str, layer_ids: Sequence[int], dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        read_config(path)
        logging.disable_progress_bar()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        self.model = model.to(self.device).eval().requires_grad_(False)
        self.embedding: Tensor = self.model.get_input_embeddings().weight
        self.head: Tensor = self.model.get_output_embeddings().weight
        self._outputs: dict[int, Tensor] = {}
        for i in layer_ids:
            self.model.model.layers[i].register_forward_hook(self._keeper(i))
        self.layer_ids = tuple(layer_ids)

    def _keeper(self, index: int) -> Any:
        def keep(_module: Any, _args: Any, output: Any) -> None:
            self._outputs[index] = output[0] if isinstance(output, tuple) else output

        return keep

    def forget(self) -> None:
        """Drops what the hooks kept from a forward that was not asked for features."""
        self._outputs.clear()

    @torch.inference_mode()
    def features(self, sequences: Sequence[Sequence[int]], prompts: Sequence[int]) -> list[Features]:
        """Forwards right-padded `sequences` in one batch; `prompts` are their prompt lengths (>= 1)."""
        width = max(map(len, sequences))
        ids = torch.zeros(len(sequences), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, s in enumerate(sequences):
            ids[row, : len(s)] = torch.tensor(s)
            mask[row, : len(s)] = 1
        ids, mask = ids.to(self.device), mask.to(self.device)
        final = self.model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        context = torch.cat([self._outputs[i] for i in self.layer_ids], -1)
        self._outputs.clear()
        # Clones: inference tensors cannot enter autograd, and views would keep the padded batch alive.
        with torch.inference_mode(False):
            return [
                Features(ids[i, :n].clone(), p, context[i, :n].clone(), final[i, p - 1 : n].clone())
                for i, (n, p) in enumerate(zip(map(len, sequences), prompts, strict=True))
            ]
