"""`adaflash versions ...`: what is in a version store, whether it is sound, and what may go. Heavy imports inside."""

from __future__ import annotations

from typing import Annotated

import typer

from adaflash.errors import UserError

app = typer.Typer(help="List, show, compare, check and delete drafter versions.", no_args_is_help=True)

Store = Annotated[str, typer.Option("--versions", help="Version store: what the trainer's --versions says.")]
Name = Annotated[str | None, typer.Option(help="Served model name: marks what is released and what workers run.")]
RedisUrl = Annotated[str | None, typer.Option(help="Redis. Default: $REDIS_URL or the local one.")]
Version = Annotated[str, typer.Argument(help="Version, as 12 or v12.")]


@app.command("ls")
def list_versions(versions: Store, name: Name = None, redis_url: RedisUrl = None) -> None:
    """List all versions: age, parent, replayed acceptance at the gate, size, use."""
    import time

    from rich.console import Console
    from rich.table import Table

    from adaflash.store import open_store
    from adaflash.versions import VersionError, label

    store = open_store(versions)
    use = _uses(name, redis_url)
    for report in store.reported():
        if report.startswith("v"):
            use.setdefault(version_number(report), []).append("was rejected")
    table = Table()
    for column in ("version", "age", "parent", "tau at the gate", "MiB", "use"):
        table.add_column(column)
    for number in store.numbers():
        size = store.size(number) / 2**20
        try:
            m = store.manifest(number)
        except VersionError as error:
            table.add_row(label(number), "", "", "", f"{size:.1f}", f"damaged: {error}")
            continue
        gate = m.gate
        tau = f"{gate['tau_active']:.2f} -> {gate['tau_candidate']:.2f}" if "tau_candidate" in gate else ""
        parent = label(m.parent) if m.parent is not None else ""
        age = _age(time.time() - m.created_at)
        table.add_row(m.label, age, parent, tau, f"{size:.1f}", ", ".join(use.get(number, [])))
    Console().print(table)


@app.command()
def show(version: Version, versions: Store) -> None:
    """Print a version's manifest: lineage, training, gate report, hashes; and why it was rejected, if it was."""
    import json

    from adaflash.store import open_store
    from adaflash.versions import label

    store, number = open_store(versions), version_number(version)
    found = store.manifest(number).model_dump()
    if label(number) in store.reported():
        found["rejected"] = store.read_report(label(number))
    print(json.dumps(found, indent=1))


@app.command()
def rejected(versions: Store) -> None:
    """List what was rejected and why, the latest first: candidates of the gate, versions by fleet or operator."""
    import time

    from rich.console import Console
    from rich.table import Table

    from adaflash.store import open_store

    store = open_store(versions)
    reports = {name: store.read_report(name) for name in store.reported()}
    table = Table("what", "age", "by", "why")
    for name, r in sorted(reports.items(), key=lambda item: -float(item[1]["at"])):
        who = r.get("who", "the gate" if "gate" in r else "")
        table.add_row(name, _age(time.time() - float(r["at"])), str(who), str(r["why"]))
    Console().print(table)


@app.command()
def diff(old: Version, new: Version, versions: Store) -> None:
    """Compare two versions: settings, gate reports, and how far each tensor moved."""
    from rich.console import Console
    from rich.table import Table

    from adaflash.checkpoint import read_drafter_config, read_weights
    from adaflash.store import open_store
    from adaflash.versions import label

    store = open_store(versions)
    a, b = version_number(old), version_number(new)
    before, after = store.manifest(a), store.manifest(b)
    for n, m in ((a, before), (b, after)):
        print(f"{label(n)}: parent {m.parent}, gate: {m.gate.get('why', 'none')}")
    settings = [read_drafter_config(store.local(n)).model_dump() for n in (a, b)]
    for key, value in settings[0].items():
        if settings[1][key] != value:
            print(f"config {key}: {value} -> {settings[1][key]}")
    left, right = (read_weights(store.local(n)) for n in (a, b))
    table = Table("tensor", "relative change")
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right or left[name].shape != right[name].shape:
            table.add_row(name, "only in one" if name not in left or name not in right else "other shape")
            continue
        x, y = left[name].float(), right[name].float()
        table.add_row(name, f"{float((y - x).norm() / x.norm().clamp_min(1e-12)):.4f}")
    Console().print(table)


@app.command("verify")
def verify_versions(
    versions: Store,
    version: Annotated[str | None, typer.Argument(help="Version, as 12 or v12. Default: all.")] = None,
) -> None:
    """Check hashes, tensor names, shapes and finite values; exit code 1 if a version must not be served."""
    from adaflash.store import open_store
    from adaflash.versions import VersionError, label, verify

    store = open_store(versions)
    numbers = [version_number(version)] if version else store.numbers()
    if not numbers:
        raise UserError(f"no version in {store.where}")
    bad = 0
    for number in numbers:
        try:
            verify(store.local(number))
            print(f"{label(number)}: sound")
        except VersionError as error:
            bad += 1
            print(str(error))
    if bad:
        raise typer.Exit(1)


@app.command()
def gc(
    versions: Store,
    name: Annotated[str, typer.Option(help="Served model name: what it has released and its workers run is kept.")],
    keep: Annotated[int, typer.Option(help="Newest versions to keep besides those in use.", min=3)] = 8,
    redis_url: RedisUrl = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it only say what would go.")] = False,
) -> None:
    """Delete old versions that nobody runs and nobody may return to."""
    from adaflash.store import open_store
    from adaflash.versions import label

    store = open_store(versions)
    in_use = set(_uses(name, redis_url))
    gone = [n for n in store.numbers()[:-keep] if n not in in_use]
    if yes:
        gone = store.prune(keep, in_use)
    words = ", ".join(map(label, gone)) or "nothing"
    print(f"deleted: {words}" if yes else f"would delete: {words} (give --yes)")


def version_number(text: str) -> int:
    """The number in `12` or `v12`."""
    from adaflash.versions import label, parse_label

    return parse_label(text if text.startswith("v") else label(int(text)) if text.isdigit() else text)


def _uses(name: str | None, redis_url: str | None) -> dict[int, list[str]]:
    """What versions are needed for, from the release state and the workers; nothing without a model name."""
    if name is None:
        return {}
    from adaflash.connect import require, url_from_environment
    from adaflash.keys import Keys
    from adaflash.registry import Registry
    from adaflash.release import Release
    from adaflash.versions import VersionError, parse_label

    redis, keys = require(redis_url or url_from_environment()), Keys(name)
    state = Release(redis, keys).state()
    out: dict[int, list[str]] = {}
    for word in ("active", "previous", "candidate", "waiting", "forced", "pinned"):
        number = getattr(state, word)
        if number is not None:
            out.setdefault(number, []).append(word)
    for worker in Registry(redis, keys).live():
        try:
            out.setdefault(parse_label(worker.version), []).append(f"worker {worker.id}")
        except VersionError:
            continue  # it runs a drafter that is no version, or none
    return out


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
