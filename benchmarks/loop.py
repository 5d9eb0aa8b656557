"""`make bench`: one run of the closed loop, and what it cost: start, throughput, rounds, swap pauses.

Throughput with and without speculation is measured in the same run on the same machine, one after the other, with the
same prompts and one thread per process; read the ratios, not the absolute figures.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import describe

RESULTS = Path(__file__).resolve().parent / "results"


def main() -> None:
    """Runs the demo and writes `results/loop.json` and `results/loop.md`."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "demo.json"
        command = [sys.executable, "-m", "adaflash.cli", "demo", "--json", str(out), *sys.argv[1:]]
        subprocess.run(command, check=True)
        write(json.loads(out.read_text()))


def write(s: dict[str, Any]) -> None:
    """The two result files, from a demo summary."""
    RESULTS.mkdir(exist_ok=True)
    machine = describe()
    (RESULTS / "loop.json").write_text(json.dumps({"machine": machine, **s}, indent=1) + "\n")
    pauses = sorted(s["swap_pause_seconds"]) or [0.0]
    rows = [
        ("worker start to proven ready", f"{s['worker_start_seconds']:.0f} s"),
        ("tok/s at 1 client: plain, speculative, ratio", ratio(s["tok_s_plain"], s["tok_s_speculative"])),
        ("tok/s at 8 clients: plain, speculative, ratio", ratio(s["tok_s_plain_8"], s["tok_s_speculative_8"])),
        ("training round (24 steps of 8 sequences, beside serving)", f"{s['round_seconds']:.0f} s"),
        ("swap pause, median and longest", f"{statistics.median(pauses) * 1e3:.0f} ms, {pauses[-1] * 1e3:.0f} ms"),
        ("τ first fifth -> last fifth of traffic", f"{s['tau_first']:.2f} -> {s['tau_last']:.2f}"),
        ("τ of the last version: served, replayed", f"{s['served_tau']:.2f}, {s['replay_tau']:.2f}"),
        ("swaps, requests, failed", f"{s['swaps']}, {s['requests']}, {s['failed_requests']}"),
    ]
    lines = ["# The closed loop", "", f"`make bench` on {machine['processor']}, {machine['cores']} cores, bf16.", ""]
    lines += ["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows), ""]
    (RESULTS / "loop.md").write_text("\n".join(lines))
    print("\n".join(lines))


def ratio(plain: float, speculative: float) -> str:
    """Both figures and what speculation brings."""
    return f"{plain:.1f}, {speculative:.1f}, ×{speculative / plain:.2f}" if plain else "not measured"


if __name__ == "__main__":
    main()
