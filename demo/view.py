"""The demo's live terminal page."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from demo.monitor import Monitor, Served, tau
from demo.prompts import DOMAINS

_WINDOW_SECONDS = 60.0
_BARS = "▁▂▃▄▅▆▇█"


def page(monitor: Monitor, phase: str, elapsed: float, total: float, requests: int, failed: int) -> RenderableType:
    """One frame: what happens now, tau per domain, versions and rounds."""
    recent = monitor.recent(_WINDOW_SECONDS)
    taus = Table(box=None, pad_edge=False)
    for column in ("domain", "τ, last minute", "τ, first minute", "over time"):
        taus.add_column(column, justify="left" if column in ("domain", "over time") else "right")
    for domain in (*DOMAINS, "all"):
        mine = monitor.served if domain == "all" else [s for s in monitor.served if s.domain == domain]
        now = recent if domain == "all" else [s for s in recent if s.domain == domain]
        first = [s for s in mine if s.at < mine[0].at + _WINDOW_SECONDS] if mine else []
        row = (domain, f"{tau(now):.2f}" if now else "-", f"{tau(first):.2f}" if first else "-", sparkline(mine))
        taus.add_row(*row, style="bold" if domain == "all" else "")
    window = min(_WINDOW_SECONDS, max(time.time() - monitor.served[0].at, 1.0)) if monitor.served else 1.0
    facts = Table.grid(padding=(0, 3))
    worker = monitor.workers[0] if monitor.workers else None
    facts.add_row("worker", f"{worker.state}, drafter {worker.version or 'none'}" if worker else "starting")
    facts.add_row("swaps", str(len(monitor.swaps())))
    facts.add_row("output", f"{sum(s.tokens for s in recent) / window:.1f} tok/s")
    facts.add_row("requests", f"{requests} answered, {failed} failed")
    facts.add_row("trainer", _trainer(monitor))
    events = Text("\n".join(_event(e) for e in monitor.events[-5:]) or "no events yet", style="dim")
    bar = ProgressBar(total=max(total, 1), completed=min(elapsed, total))
    return Panel(Group(Text(phase, style="bold"), bar, "", taus, "", facts, "", events), title="AdaFlash demo")


def sparkline(rows: list[Served], width: int = 24) -> str:
    """Tau over time, one character per slice, from 1 to 4."""
    if len(rows) < 2:
        return ""
    start, end = rows[0].at, rows[-1].at
    slices: list[list[Served]] = [[] for _ in range(width)]
    for r in rows:
        slices[min(int((r.at - start) / max(end - start, 1e-6) * width), width - 1)].append(r)
    return "".join(_BARS[min(int((tau(s) - 1) / 3 * len(_BARS)), len(_BARS) - 1)] if s else " " for s in slices)


def _trainer(monitor: Monitor) -> str:
    if not monitor.trainer:
        return "waiting for the first round"
    verdict, means = monitor.trainer["verdict"], monitor.trainer["round"]
    return (
        f"{means['steps']:.0f} steps in {means['seconds']:.0f} s, agreement {means.get('agreement', 0):.2f}, "
        f"replayed τ {verdict['tau_candidate']:.2f} (active {verdict['tau_active']:.2f})"
    )


def _event(event: dict[str, object]) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(float(str(event["at"]))))
    detail = {k: v for k, v in event.items() if k in ("to", "why", "reason", "before")}
    return f"{clock} {event['what']} " + ", ".join(f"{k} {v}" for k, v in detail.items())
