"""Runs every variant with every seed, resumes where an earlier call stopped, and writes table and plot.

Where there are many cores, runs may go side by side; how long a step takes is then measured afterwards, alone.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from adaflash.cli_offline import progress_bars
from benchmarks.ablation import report
from benchmarks.ablation.jobs import enter, make_bench, run_job, start_job, time_job
from benchmarks.ablation.run import start_path
from benchmarks.ablation.variants import VARIANTS, Setting

SETTINGS: tuple[Setting, ...] = ("scratch", "shift")


def main() -> None:
    """Command line."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.ablation", description=__doc__)
    p.add_argument("--prompts", type=Path, nargs="*", default=[], help="JSONL conversations with domains math and code")
    p.add_argument("--work", type=Path, default=Path("build/ablation"), help="samples and finished runs are kept here")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--sequences", type=int, default=80, help="training sequences per domain")
    p.add_argument("--held-out", type=int, default=12, help="held-out sequences per domain")
    p.add_argument("--processes", type=int, default=1, help="runs side by side, sharing the threads")
    a = p.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    file = a.work / "runs.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    done = {(r["setting"], r["variant"], r["seed"]) for r in rows}
    wanted = [(v, s) for s in range(a.seeds) for v in VARIANTS]
    todo = [(v, s) for v, s in wanted if (v.setting, v.name, s) not in done]
    with progress_bars() as show:
        if not (a.work / "samples.jsonl").is_file():
            make_bench(a, show)
        starts = [(s, n) for n in range(a.seeds) for s in SETTINGS]
        starts = [(s, n) for s, n in starts if not (start_path(a.work, s, n) / "walks.json").is_file()]
        with ProcessPoolExecutor(a.processes, get_context("spawn"), initializer=enter, initargs=(a,)) as pool:
            for i, job in enumerate(as_completed([pool.submit(start_job, *s) for s in starts])):
                job.result()
                show("first drafters", i + 1, len(starts))
            for i, job in enumerate(as_completed([pool.submit(run_job, *t) for t in todo])):
                row = job.result()
                show.console.print(f"{row['setting']:8} {row['variant']:36} seed {row['seed']}: tau {row['tau']:.3f}")
                rows.append(row)
                with file.open("a") as f:
                    f.write(json.dumps(row) + "\n")
                show("runs", i + 1, len(todo))
            if a.processes > 1:  # the runs' own times say nothing then
                timed = [(v, pool.submit(time_job, v).result()) for v in VARIANTS]
                for r in rows:
                    r["step_seconds"] = next(t for v, t in timed if (v.setting, v.name) == (r["setting"], r["variant"]))
    settings = {
        "training_sequences": 2 * a.sequences,
        "held_out_sequences": 2 * a.held_out,
        "prompts": " and ".join(f.name for f in a.prompts) or "generated prompts",
        "seeds": a.seeds,
    }
    report.write(rows, settings)


if __name__ == "__main__":
    main()
