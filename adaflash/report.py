"""What operators are told about a release, for the CLI and the admin API alike."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from adaflash.registry import Registry
from adaflash.release import Release, read_events
from adaflash.versions import label


@dataclass(frozen=True)
class Outcome:
    """What the controller did with a command."""

    done: bool
    why: str


def outcome(release: Release, command: str) -> Outcome | None:
    """None while no controller has taken the command up."""
    for event in read_events(release.redis, release.keys, command.partition("-")[0]):
        if event.get("command") == command:
            return Outcome(event["what"] != "ignored", str(event.get("because", "")))
    return None


def overview(release: Release, registry: Registry) -> dict[str, Any]:
    """State, and for each worker what it runs and what it should run; `behind` names those where that differs."""
    state, workers = release.state(), registry.live()
    now, rows, behind = time.time(), [], []
    for w in workers:
        wanted = state.wanted(w.id)
        follows = not w.capable or wanted is None or w.version == label(wanted)
        if w.state != "ready" or not follows:
            behind.append(w.id)
        rows.append(
            {
                "id": w.id,
                "url": w.url,
                "state": w.state,
                "version": w.version,
                "wanted": label(wanted) if wanted is not None and w.capable else "",
                "checksum": w.checksum,
                "tau": round(w.counters.tau, 3),
                "seen_seconds_ago": round(max(0.0, now - w.at), 1),
                "reason": w.reason,
            }
        )
    shown = state.model_dump(exclude={"base"})
    holder: Any = release.redis.get(release.keys.controller_lease)
    controller = (holder.decode() if isinstance(holder, bytes) else holder or "").partition("|")[0]
    return {"release": shown, "controller": controller, "workers": rows, "behind": behind}


def summary(found: dict[str, Any]) -> str:
    """An overview's release in one line."""
    s = found["release"]

    def name(role: str) -> str:
        return label(s[role]) if s[role] is not None else "none"

    parts = [f"active {name('active')}", f"previous {name('previous')}", f"{len(found['workers'])} live workers"]
    if s["phase"] != "idle":
        on = f" on {', '.join(s['moved'])}" if s["moved"] else ""
        parts.append(f"{s['phase']} {name('candidate')}{on}")
    for role in ("waiting", "forced", "pinned"):
        if s[role] is not None:
            parts.append(f"{role} {name(role)}")
    if s["paused"]:
        parts.append("paused")
    if s["cooldown_until"] > time.time():
        parts.append(f"cooling down for {s['cooldown_until'] - time.time():.0f} s")
    return ", ".join([*parts, f"controller {found['controller'] or 'none'}"])
