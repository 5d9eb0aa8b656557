"""`adaflash status` and `adaflash events`: what the fleet runs and what happened to it, from Redis. Read only."""

from __future__ import annotations

import json as to_json
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

Name = Annotated[str, typer.Option(help="Served model name.")]
RedisUrl = Annotated[str | None, typer.Option(help="Redis. Default: $REDIS_URL or the local one.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]

POLL_SECONDS = 0.5
_KNOWN = ("id", "at", "who", "what", "why", "to")


def status(name: Name, redis_url: RedisUrl = None, json: Json = False) -> None:
    """Show the released version and what every live worker runs; exit code 1 if one is not where it should be."""
    from rich.console import Console
    from rich.table import Table

    from adaflash.connect import require, url_from_environment
    from adaflash.keys import Keys
    from adaflash.registry import Registry
    from adaflash.release import Release
    from adaflash.versions import label

    redis, keys = require(redis_url or url_from_environment()), Keys(name)
    state, workers = Release(redis, keys).state(), Registry(redis, keys).live()
    active = label(state.active) if state.active is not None else ""
    behind = [w.id for w in workers if w.state != "ready" or (active and w.version != active)]
    if json:
        facts = {"active": state.active, "previous": state.previous, "behind": behind}
        print(to_json.dumps(facts | {"workers": [w.model_dump() for w in workers]}))
    else:
        previous = label(state.previous) if state.previous is not None else "none"
        print(f"{name}: active {active or 'none'}, previous {previous}, {len(workers)} live workers")
        table = Table("worker", "state", "version", "checksum", "seen", "reason")
        for w in workers:
            seen = f"{max(0.0, time.time() - w.at):.0f} s ago"
            table.add_row(w.id, w.state, w.version or "none", w.checksum[:12], seen, w.reason)
        Console().print(table)
    if behind:
        raise typer.Exit(1)


def events(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on printing what happens, until Ctrl-C.")] = False,
    last: Annotated[int, typer.Option(help="How many past events to print.", min=0)] = 20,
    redis_url: RedisUrl = None,
    json: Json = False,
) -> None:
    """Print what happened to versions and workers, oldest first: who did what, and why."""
    from adaflash.connect import require, url_from_environment
    from adaflash.keys import Keys
    from adaflash.release import read_events

    redis, keys = require(redis_url or url_from_environment()), Keys(name)
    past = read_events(redis, keys)
    for event in past[len(past) - last :] if last else []:
        print(_line(event, json), flush=True)
    if not follow:
        return
    try:
        for event in _following(redis, keys, past[-1]["id"] if past else "0-0"):
            print(_line(event, json), flush=True)
    except KeyboardInterrupt:
        return


def _following(redis: Any, keys: Any, after: str) -> Iterator[dict[str, Any]]:
    """Events after a stream id, for ever; Redis may go and come back."""
    from redis.exceptions import RedisError

    from adaflash.release import read_events

    while True:
        try:
            for event in read_events(redis, keys, f"({after}"):
                after = event["id"]
                yield event
        except RedisError:
            time.sleep(POLL_SECONDS)  # it is asked again for everything since `after`
        time.sleep(POLL_SECONDS)


def _line(event: dict[str, Any], json: bool) -> str:
    if json:
        return to_json.dumps(event)
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.get("at", 0)))
    to = f" v{event['to']}" if "to" in event else ""
    why = event.get("why") or event.get("reason") or ""
    more = {k: v for k, v in event.items() if k not in (*_KNOWN, "reason", "checksum")}
    details = " ".join(f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in more.items())
    return f"{at}  {event.get('what', '?')}{to}  by {event.get('who', '?')}" + "".join(
        f"  {part}" for part in (details, why) if part
    )
