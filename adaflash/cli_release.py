"""`adaflash status`, `events` and the operators' verbs: what the fleet runs, what happened to it, what it should do."""

from __future__ import annotations

import json as to_json
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from adaflash.errors import UserError
from adaflash.fleet import Verb

Name = Annotated[str, typer.Option(help="Served model name.")]
RedisUrl = Annotated[str | None, typer.Option(help="Redis. Default: $REDIS_URL or the local one.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]

Why = Annotated[str, typer.Option(help="Reason, for the event stream.")]

POLL_SECONDS = 0.5
ANSWER_SECONDS = 20.0
_KNOWN = ("id", "at", "who", "what", "why", "to", "gate", "command")


def status(name: Name, redis_url: RedisUrl = None, json: Json = False) -> None:
    """Show the released version and what every live worker runs; exit code 1 if one is not where it should be."""
    from rich.console import Console
    from rich.table import Table

    from adaflash.connect import require, url_from_environment
    from adaflash.keys import Keys
    from adaflash.registry import Registry
    from adaflash.release import Release
    from adaflash.report import overview, summary

    redis, keys = require(redis_url or url_from_environment()), Keys(name)
    found = overview(Release(redis, keys), Registry(redis, keys))
    if json:
        print(to_json.dumps(found))
    else:
        print(f"{name}: {summary(found)}")
        table = Table("worker", "state", "runs", "should run", "tau", "checksum", "seen", "reason")
        for w in found["workers"]:
            seen = f"{w['seen_seconds_ago']:.0f} s ago"
            runs, tau = w["version"] or "none", f"{w['tau']:.2f}" if w["tau"] else ""
            table.add_row(w["id"], w["state"], runs, w["wanted"], tau, w["checksum"][:12], seen, w["reason"])
        Console().print(table)
    if found["behind"]:
        raise typer.Exit(1)


def verb(name: Verb, text: str, takes_version: bool = False) -> Callable[..., None]:
    """The command of one operator's verb; it waits until the controller has answered."""

    def send(model: str, redis_url: str | None, why: str, version: int | None) -> None:
        from adaflash.connect import require, url_from_environment
        from adaflash.keys import Keys
        from adaflash.release import Release
        from adaflash.report import outcome

        release = Release(require(redis_url or url_from_environment()), Keys(model), _who())
        sent, deadline = release.ask(name, version, why), time.monotonic() + ANSWER_SECONDS
        while (found := outcome(release, sent)) is None:
            if time.monotonic() > deadline:
                raise UserError(f"{name} is queued, but no controller has taken it up: is a gateway running?")
            time.sleep(0.2)
        if not found.done:
            raise UserError(f"{name} was ignored: {found.why}")
        print(f"{name}: done; follow it with `adaflash status --name {model}`")

    def without(name: Name, why: Why = "", redis_url: RedisUrl = None) -> None:
        send(name, redis_url, why, None)

    def with_version(
        name: Name,
        version: Annotated[str | None, typer.Argument(help="Version, as 12 or v12.")] = None,
        why: Why = "",
        redis_url: RedisUrl = None,
    ) -> None:
        from adaflash.cli_versions import version_number

        send(name, redis_url, why, version_number(version) if version is not None else None)

    command = with_version if takes_version else without
    command.__doc__ = text
    return command


promote = verb("promote", "Give a version to every worker, one at a time, without trying it on a few first.", True)
reject = verb("reject", "Take the candidate back, or never try the given version.", True)
pin = verb("pin", "Hold the fleet on a version (default: the active one) until `unpin`; nothing is tried.", True)
unpin = verb("unpin", "Let new versions in again.")
rollback = verb("rollback", "Go back: from the candidate to the active version, else to the previous one.")
pause = verb("pause", "Let nothing go forward; what goes back still does.")
resume = verb("resume", "Go on after `pause`.")
VERBS = {
    "promote": promote,
    "reject": reject,
    "pin": pin,
    "unpin": unpin,
    "rollback": rollback,
    "pause": pause,
    "resume": resume,
}


def _who() -> str:
    """The person at the terminal, for the audit entry."""
    import getpass
    import socket

    return f"{getpass.getuser()}@{socket.gethostname()}"


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
    why = event.get("because") or event.get("why") or event.get("reason") or ""
    more = {k: v for k, v in event.items() if k not in (*_KNOWN, "reason", "checksum", "because") and v is not None}
    details = " ".join(f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in more.items())
    return f"{at}  {event.get('what', '?')}{to}  by {event.get('who', '?')}" + "".join(
        f"  {part}" for part in (details, why) if part
    )
