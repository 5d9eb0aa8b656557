"""What the demo leaves behind: a JSON summary, a table and a plot of acceptance over time."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from demo.monitor import Served, tau


@dataclass(frozen=True)
class Summary:
    """The demo's result; `tau_first` and `tau_last` are over the first and last fifth of the requests."""

    tau_first: float
    tau_last: float
    replay_tau: float
    served_tau: float
    swaps: int
    requests: int
    failed_requests: int
    rounds: int
    versions: list[str]
    tok_s_speculative: float
    tok_s_plain: float
    tok_s_speculative_8: float
    tok_s_plain_8: float
    same_text: int
    compared_texts: int
    swap_pause_seconds: list[float]
    round_seconds: float
    worker_start_seconds: float
    tau_by_domain: dict[str, list[float]] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """As JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def fifths(rows: list[Served]) -> tuple[list[Served], list[Served]]:
    """First and last fifth of the requests, by the time they finished."""
    ordered = sorted(rows, key=lambda r: r.at)
    n = max(1, len(ordered) // 5)
    return ordered[:n], ordered[-n:]


def by_domain(rows: list[Served]) -> dict[str, list[float]]:
    """Tau of the first and of the last fifth, per domain."""
    out = {}
    for domain in sorted({r.domain for r in rows}):
        first, last = fifths([r for r in rows if r.domain == domain])
        out[domain] = [round(tau(first), 3), round(tau(last), 3)]
    return out


def table(s: Summary) -> Table:
    """Before and after."""
    t = Table(title="Before and after")
    for column in ("", "first fifth / plain", "last fifth / speculative"):
        t.add_column(column, justify="left" if not column else "right")
    for domain, (first, last) in s.tau_by_domain.items():
        t.add_row(f"τ {domain}", f"{first:.2f}", f"{last:.2f}")
    t.add_row("τ all", f"{s.tau_first:.2f}", f"{s.tau_last:.2f}", style="bold")
    t.add_row("tok/s, 1 client", f"{s.tok_s_plain:.1f}", f"{s.tok_s_speculative:.1f}")
    t.add_row("tok/s, 8 clients", f"{s.tok_s_plain_8:.1f}", f"{s.tok_s_speculative_8:.1f}")
    t.add_row("same text (bf16 may round differently)", "", f"{s.same_text} of {s.compared_texts}")
    t.add_row("τ served / replayed, last version", f"{s.served_tau:.2f}", f"{s.replay_tau:.2f}")
    t.add_row("swaps, mean pause", str(s.swaps), f"{mean(s.swap_pause_seconds) * 1e3:.0f} ms")
    t.add_row("requests failed", f"{s.failed_requests} of {s.requests}", "")
    return t


def mean(values: list[float]) -> float:
    """0 for an empty list."""
    return sum(values) / len(values) if values else 0.0


def plot(rows: list[Served], swaps: list[dict[str, Any]], path: Path) -> None:
    """Tau over time per domain (moving window of requests), swaps as dashed lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ordered = sorted(rows, key=lambda r: r.at)
    start = ordered[0].at if ordered else 0.0
    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    for domain in [*sorted({r.domain for r in ordered}), "all"]:
        mine = ordered if domain == "all" else [r for r in ordered if r.domain == domain]
        window = 12 if domain == "all" else 6
        points = [((r.at - start) / 60, tau(mine[max(0, i - window + 1) : i + 1])) for i, r in enumerate(mine)]
        style = dict(color="black", linewidth=2.5) if domain == "all" else dict(linewidth=1.2, alpha=0.8)
        axes.plot([x for x, _ in points], [y for _, y in points], label=domain, **style)
    for event in swaps:
        x = (event["at"] - start) / 60
        axes.axvline(x, color="grey", linestyle="--", linewidth=0.8)
        axes.annotate(f"v{event['to']}", (x, 1), xycoords=("data", "axes fraction"), fontsize=8, rotation=90, va="top")
    axes.set_xlabel("minutes of traffic")
    axes.set_ylabel("acceptance length τ (tokens per verify step)")
    axes.set_ylim(bottom=0.9)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
