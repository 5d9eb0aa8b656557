"""`make bench-verify`: whole blocks against adaptive lengths, under a load of 1 to 16 clients on the real small LM.

Every engine is up at the same time and all but one are idle; each load level is measured on all of them in turn, in
several rounds, so that a busy moment of the machine does not fall on one of them. Read the ratios. The drafter comes
from `adaflash pretrain --length-head` and `adaflash fit-length-head`, once, and is kept in the work folder.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from adaflash.cost import CostTable
from benchmarks.machine import describe
from demo.model import ensure_model
from demo.prompts import prompts
from serving.ports import free_port
from serving.worker import launch
from serving.worker.client import Engine
from serving.worker.config import WorkerConfig

RESULTS = Path(__file__).resolve().parent / "results"
BLOCK = 8
CLIENTS = (1, 2, 4, 8, 16)
MODES: dict[str, dict[str, Any]] = {
    "static": {"verify": "static"},
    "paper": {"verify": "adaptive", "verify_rule": "length", "speculation": "on"},
    "budget": {"verify": "adaptive"},
    "plain": {"route": "none"},
}


@dataclass
class Level:
    """One load level on one engine, over all rounds."""

    tokens: int = 0
    steps: int = 0
    rows: int = 0
    speeds: list[float] = field(default_factory=list)


def main() -> None:
    """Measures and writes `results/verify_budget.json` and `.md`."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--work", type=Path, default=Path("build/verify"), help="drafter and cost table are kept here")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--tokens", type=int, default=48, help="output tokens per request")
    p.add_argument("--requests", type=int, default=3, help="requests per client and round")
    a = p.parse_args()
    model = str(ensure_model(print))
    drafter, cost = ready(a.work, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = (q.messages for q in islice(prompts(900), 64 * a.rounds))
    render = {"add_generation_prompt": True, "return_dict": False}
    questions = [list(tokenizer.apply_chat_template(messages, **render)) for messages in texts]
    levels: dict[tuple[str, int], Level] = defaultdict(Level)
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(engine(model, None if name == "plain" else drafter, cost, how))
            for name, how in MODES.items()
        }
        for round_ in range(a.rounds):
            for c in CLIENTS:
                for name in rotated(list(engines), round_):
                    measure(engines[name], questions, c, a.requests, a.tokens, round_, levels[name, c])
                    print(f"round {round_ + 1}, {c:2} clients, {name:7}: {levels[name, c].speeds[-1]:6.1f} tok/s")
    write(levels, CostTable.load(cost), a)


def ready(work: Path, model: str) -> tuple[Path, Path]:
    """Drafter with fitted heads and cost table, made where they are missing."""
    work.mkdir(parents=True, exist_ok=True)
    first, samples, drafter, cost = (work / n for n in ("first", "samples.jsonl", "drafter", "cost.json"))
    if not (first / "config.json").is_file():
        adaflash("pretrain", "--model", model, "--out", first, "--length-head", "--steps", 240, "--count", 160)
    if not samples.is_file():
        write_samples(model, samples)
    if not (drafter / "config.json").is_file():
        adaflash("fit-length-head", "--model", model, "--drafter", first, "--samples", samples, "--out", drafter)
    if not cost.is_file():
        adaflash("profile-verify", "--model", model, "--drafter", drafter, "--out", cost, threads=1)
    return drafter, cost


def write_samples(model: str, out: Path) -> None:
    """The target's own answers to prompts that neither the pretraining nor the measurement uses."""
    from adaflash.bootstrap import target_dtype
    from adaflash.samples import Answerer, Conversation
    from adaflash.samples import write_samples as append
    from adaflash.target import Target

    found = [Conversation(q.messages, q.domain) for q in islice(prompts(4242), 96)]
    answerer = Answerer(Target(model, (0,), target_dtype(model)), model)
    made = [s for batch in answerer.samples(found, 48, lambda *_: None) for s in batch]
    append(out, made)


def adaflash(*arguments: object, threads: int = os.cpu_count() or 1) -> None:
    command = [sys.executable, "-m", "adaflash.cli", *map(str, arguments)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": str(threads)})


@contextmanager
def engine(model: str, drafter: Path | None, cost: Path, how: dict[str, Any]) -> Iterator[Engine]:
    """A worker's engine without its agent."""
    os.environ["OMP_NUM_THREADS"] = "1"
    c = WorkerConfig(model=model, redis_url="", port=free_port(), cost_table=cost, **how)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        loaded = launch.Drafter(drafter, launch.check_drafter(model, drafter), "d") if drafter else None
        process = launch.start(c, loaded, "", home, home)
        up = Engine(c.url, c.admin_key, 600)
        try:
            deadline = time.monotonic() + c.start_seconds
            while not up.up():
                assert process.poll() is None and time.monotonic() < deadline, "an engine did not start"
                time.sleep(0.5)
            up.generate([1, 2, 3], 16)
            yield up
        finally:
            launch.end(process, 10)


def measure(
    up: Engine, questions: list[list[int]], clients: int, requests: int, tokens: int, round_: int, level: Level
) -> None:
    """`clients` threads that ask one request after the other; tokens per second of them all."""
    asked = questions[round_ * 64 :][: clients * requests]
    answers: list[dict[str, Any]] = []

    def client(mine: Sequence[list[int]]) -> None:
        for ids in mine:
            answers.append(ask(up, ids, tokens))

    threads = [threading.Thread(target=client, args=(asked[k::clients],)) for k in range(clients)]
    began = time.perf_counter()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    seconds = time.perf_counter() - began
    emitted = sum(x["completion_tokens"] for x in answers)
    level.tokens += emitted
    level.speeds.append(emitted / seconds)
    for x in answers:
        steps = int(x.get("spec_verify_ct") or 0)
        caps = x.get("spec_cap_lens_histogram")
        level.steps += steps
        level.rows += sum(i * n for i, n in enumerate(caps)) if caps else BLOCK * steps


def ask(up: Engine, ids: list[int], tokens: int) -> dict[str, Any]:
    """One greedy request; what SGLang says about it."""
    params = {"temperature": 0, "max_new_tokens": tokens}
    answer: dict[str, Any] = up._post("/generate", {"input_ids": ids, "sampling_params": params})
    meta: dict[str, Any] = answer["meta_info"]
    return meta


def rotated(names: list[str], by: int) -> list[str]:
    return names[by % len(names) :] + names[: by % len(names)]


def write(levels: dict[tuple[str, int], Level], cost: CostTable, a: argparse.Namespace) -> None:
    """Rows per load level, and the table."""
    rows = []
    for c in CLIENTS:
        speed = {m: statistics.median(levels[m, c].speeds) for m in MODES}
        # Rounds are paired: what a round's prompts and the machine did is the same for all.
        over = {
            m: statistics.median(x / y for x, y in zip(levels[m, c].speeds, levels["static", c].speeds, strict=True))
            for m in MODES
        }
        row: dict[str, Any] = {"clients": c, "static_tok_s": speed["static"], "plain_tok_s": speed["plain"]}
        row |= {"paper_over_static": over["paper"], "adaptive_over_static": over["budget"]}
        row |= {"plain_over_static": over["plain"]}
        for m in ("static", "paper", "budget"):
            level = levels[m, c]
            row[f"{m}_tau"] = level.tokens / max(level.steps, 1)
            row[f"{m}_rows_per_step"] = level.rows / max(level.steps, 1)
        rows.append(row)
    machine = describe()
    RESULTS.mkdir(exist_ok=True)
    settings = {"rounds": a.rounds, "tokens": a.tokens, "requests_per_client": a.requests}
    report = {"machine": machine, "settings": settings, "cost": cost.model_dump(mode="json"), "rows": rows}
    (RESULTS / "verify_budget.json").write_text(json.dumps(report, indent=1) + "\n")
    lines = [
        "# Verify lengths under load",
        "",
        f"`make bench-verify` on {machine['processor']}, {machine['cores']} cores: SmolLM2-135M-Instruct (bf16),",
        f"2-layer drafter, block 8, greedy chat, {a.tokens} tokens per request, median of {a.rounds} interleaved",
        "rounds.",
        "Ratios are over whole blocks (static) in the same round.",
        "",
        "| clients | static tok/s | paper rule | budget | plain decoding | τ static, paper, budget | rows a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r['clients']} | {r['static_tok_s']:.1f} | ×{r['paper_over_static']:.2f} "
            f"| ×{r['adaptive_over_static']:.2f} | ×{r['plain_over_static']:.2f} "
            f"| {r['static_tau']:.2f}, {r['paper_tau']:.2f}, {r['budget_tau']:.2f} "
            f"| {r['static_rows_per_step']:.1f}, {r['paper_rows_per_step']:.1f}, {r['budget_rows_per_step']:.1f} |"
        )
    (RESULTS / "verify_budget.md").write_text("\n".join([*lines, ""]))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
