"""`make bench-step`: our distillation step beside a straightforward one on the same tensors: time, peak memory, loss.

The straightforward step is `tests/reference_step.py`: one dense mask, dense logits, autograd. Each side runs in a
process of its own, three times; the fastest counts, the peak is over all. Read the ratios, not the absolute figures.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adaflash.distill import DistillConfig, draw_blocks
from adaflash.drafter import Drafter, random_drafter
from adaflash.drafter_config import DrafterConfig
from adaflash.target import Features
from benchmarks.machine import describe

RESULTS = Path(__file__).resolve().parent / "results"
LAYERS, CONTEXT_LAYERS, RUNS = 2, 5, 3
# hidden, vocabulary, context, anchors, block
SIZES = [
    (64, 512, 128, 8, 8),
    (64, 4096, 512, 512, 16),
    (256, 8192, 256, 64, 8),
    (576, 49152, 512, 64, 8),
    (576, 49152, 512, 256, 16),
    (1024, 151936, 512, 32, 16),
]


def tensors(hidden: int, vocabulary: int, context: int) -> tuple[Features, Tensor]:
    """One random sequence of `context` tokens, an eighth of it prompt, and a head; the same in every process."""
    g = torch.Generator().manual_seed(0)
    prompt = max(1, context // 8)
    features = Features(
        torch.randint(0, vocabulary, (context,), generator=g),
        prompt,
        torch.randn(context, CONTEXT_LAYERS * hidden, generator=g),
        torch.randn(context - prompt + 1, hidden, generator=g),
    )
    return features, torch.randn(vocabulary, hidden, generator=g) * 0.05


def drafter_of(hidden: int, vocabulary: int, block: int) -> Drafter:
    """A drafter with heads of 64 and a third of them for keys, as the small models have."""
    heads = max(1, hidden // 64)
    return random_drafter(
        DrafterConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=hidden * 8 // 3,
            num_hidden_layers=LAYERS,
            num_attention_heads=heads,
            num_key_value_heads=heads // 3 if heads % 3 == 0 else heads,
            head_dim=64,
            block_size=block,
            num_target_layers=30,
            target_layer_ids=(1, 8, 14, 20, 27),
            mask_token_id=0,
        ),
        0,
    )


def one_side(side: str, size: tuple[int, ...], out: Path) -> None:
    """In a child process: a few steps; prints seconds, peak bytes and loss, writes the gradients."""
    hidden, vocabulary, context, anchors, block = size
    features, head = tensors(hidden, vocabulary, context)
    drafter, config = drafter_of(hidden, vocabulary, block), DistillConfig(loss="adaflash", anchors=anchors)
    blocks = draw_blocks(drafter, head, [features], config, torch.Generator().manual_seed(1))
    before = psutil.Process().memory_info().rss
    seconds, loss = float("inf"), torch.zeros(())
    for _ in range(RUNS):
        drafter.zero_grad()
        started = time.perf_counter()
        if side == "ours":
            states = drafter(drafter.encode([features.context]), *blocks.place, blocks.embeddings)
            loss = blocks.loss(states, head, config, overlap=False).loss
        else:
            from tests.reference_step import reference_loss

            loss = reference_loss(drafter, head, head, [features], *blocks.place, config.loss_settings())
        loss.backward()
        seconds = min(seconds, time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    save_file({n: p.grad for n, p in drafter.named_parameters() if p.grad is not None}, out)
    print(json.dumps({"seconds": seconds, "peak_bytes": peak, "loss": float(loss.detach())}))


def measure(size: tuple[int, ...]) -> dict[str, Any]:
    """Both sides of one size, one after the other."""
    sides, gradients = {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        for side in ("ours", "reference"):
            out = Path(scratch) / f"{side}.safetensors"
            command = [sys.executable, "-m", "benchmarks.distill_step", side, json.dumps(size), str(out)]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            sides[side] = json.loads(done.stdout)
            gradients[side] = torch.cat([t.flatten() for _, t in sorted(load_file(out).items())])
    ours, theirs = sides["ours"], sides["reference"]
    return dict(
        zip(("hidden", "vocab", "context", "anchors", "block"), size, strict=True),
        ours_seconds=round(ours["seconds"], 3),
        reference_seconds=round(theirs["seconds"], 3),
        time_ratio=round(ours["seconds"] / theirs["seconds"], 3),
        ours_mib=round(ours["peak_bytes"] / 2**20),
        reference_mib=round(theirs["peak_bytes"] / 2**20),
        memory_ratio=round(ours["peak_bytes"] / theirs["peak_bytes"], 3),
        loss_rel_diff=abs(ours["loss"] - theirs["loss"]) / abs(theirs["loss"]),
        grad_rel_diff=float((gradients["ours"] - gradients["reference"]).norm() / gradients["reference"].norm()),
    )


def main() -> None:
    """All sizes; writes `results/distill_step.json` and `.md`."""
    rows = []
    for size in SIZES:
        rows.append(measure(size))
        print(json.dumps(rows[-1]), flush=True)
    machine = describe()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "distill_step.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    lines = [
        "# A distillation step beside a straightforward one",
        "",
        f"`make bench-step` on {machine['processor']}, {machine['cores']} cores, fp32, {LAYERS} drafter layers, loss",
        "`adaflash`. Forward, loss and backward, without the optimiser, which is the same for both.",
        "",
        "| hidden | vocab | context | blocks | ours | reference | time | ours | reference | memory | loss diff |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {r['hidden']} | {r['vocab']} | {r['context']} | {r['anchors']} × {r['block']} "
            f"| {r['ours_seconds']:.2f} s | {r['reference_seconds']:.2f} s | ×{r['time_ratio']:.2f} "
            f"| {r['ours_mib']} MiB | {r['reference_mib']} MiB | ×{r['memory_ratio']:.2f} | {r['loss_rel_diff']:.1e} |"
            for r in rows
        ),
        "",
    ]
    (RESULTS / "distill_step.md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        one_side(sys.argv[1], tuple(json.loads(sys.argv[2])), Path(sys.argv[3]))
    else:
        main()
