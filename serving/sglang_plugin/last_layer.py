"""Lets a drafter read the target's last layer: SGLang captures a layer's output only where the next layer begins.

Installed on the target model in each scheduler rank. The last output is what the final norm adds up anyway (its second
result), so nothing is computed twice and nothing else changes; without such a drafter nothing is installed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any


def find_decoder(model: Any) -> Any | None:
    """The decoder stack of a causal LM, if SGLang captures from it layer by layer."""
    decoder = getattr(model, "model", None)
    wanted = ("layers", "norm", "layers_to_capture")
    return decoder if decoder is not None and all(hasattr(decoder, name) for name in wanted) else None


def install(model: Any, layer_ids: Sequence[int], depth: int) -> None:
    """Wraps the decoder's forward if the drafter reads layer `depth - 1`; raises RuntimeError where it cannot."""
    if depth - 1 not in layer_ids:
        return
    decoder = find_decoder(model)
    if decoder is None:
        raise RuntimeError(
            f"the drafter reads the target's last layer {depth - 1}, which SGLang does not capture for "
            f"{type(model).__name__}: use a drafter with other target_layer_ids"
        )
    original, kept = decoder.forward, []

    def keep(_module: Any, _args: Any, output: Any) -> None:
        if isinstance(output, tuple):
            kept.append(output[1].clone())  # the buffer is reused by later forwards

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        kept.clear()
        result = original(*args, **kwargs)
        if len(decoder.layers) not in decoder.layers_to_capture:  # SGLang names an output by the next layer's number
            return result
        if not kept:
            raise RuntimeError("the target's final norm does not show the last layer's output; choose another layer")
        hidden, earlier = result if isinstance(result, tuple) else (result, [])
        earlier.append(kept.pop())
        return hidden, earlier

    decoder.norm.register_forward_hook(keep)
    decoder.forward = forward
