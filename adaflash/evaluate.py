"""`adaflash eval`: replayed acceptance of drafters on stored samples, as a table, JSON and a plot.

What was measured before for the same drafter and samples is read back from the JSON file instead of measured again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from adaflash.acceptance import Acceptance, length_rule, replay, survival_rule
from adaflash.bootstrap import target_dtype
from adaflash.checkpoint import load_drafter
from adaflash.drafter import Drafter
from adaflash.errors import UserError
from adaflash.fingerprints import fingerprint
from adaflash.fit_heads import LEAST_SURVIVAL, RATE
from adaflash.samples import Progress, Sample, featurize
from adaflash.target import Features, Target, target_shape
from adaflash.versions import target_fingerprint


class EvaluateError(UserError):
    """The evaluation cannot run; the message says what to change."""


_AT_ONCE = 16  # sequences walked in lock step


def evaluate(
    model: str,
    drafters: Sequence[Path],
    samples: Sequence[Sample],
    known: Path | None,
    *,
    bucket: int,
    longest: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    """One row per drafter. `known` is the JSON file of results, read and rewritten after every drafter."""
    shape = target_shape(model)
    loaded = [(path, load_drafter(path)) for path in drafters]
    for _, drafter in loaded:
        drafter.config.check_target(shape)
    if known is not None:
        known.parent.mkdir(parents=True, exist_ok=True)
    ids = [json.dumps([s.prompt_ids, s.output_ids, s.domain]).encode() for s in samples]
    data = fingerprint([target_fingerprint(model).encode(), *ids])
    old = _read(known)
    rows: list[dict[str, Any]] = []
    target: Target | None = None
    features: list[Features] = []
    for path, drafter in loaded:
        key = fingerprint([p.read_bytes() for p in sorted(path.iterdir()) if p.suffix in (".json", ".safetensors")])
        row = next((r for r in old if _what(r) == (key, data, bucket)), None)
        if row is None:
            layers = drafter.config.target_layer_ids
            if target is None or target.layer_ids != layers:
                target = Target(model, layers, target_dtype(model))
                features = featurize(target, samples, longest, progress)
            row = {"key": key, "samples": data, "bucket": bucket, "drafter": path.name}
            row |= measure(drafter.to(target.device), target, features, [s.domain for s in samples], bucket, progress)
        rows.append(row | {"drafter": path.name})
        if known is not None:
            done = {_what(r) for r in rows}
            known.write_text(json.dumps(rows + [r for r in old if _what(r) not in done], indent=1) + "\n")
    return rows


def measure(
    drafter: Drafter, target: Target, features: Sequence[Features], domains: Sequence[str], bucket: int, show: Progress
) -> dict[str, Any]:
    """Acceptance of one drafter, with everything verified and, if it has heads, with their rules."""
    rules: dict[str, Any] = {"static": None}
    if drafter.length_head is not None:
        rules["length head"] = length_rule(RATE)
    if drafter.confidence_head is not None:
        rules["survival"] = survival_rule(LEAST_SURVIVAL)
    found: dict[str, Acceptance] = {}
    total = len(features) * len(rules)
    for name, rule in rules.items():
        walks: list[Any] = []
        for i in range(0, len(features), _AT_ONCE):
            part = features[i : i + _AT_ONCE]
            walks += replay(drafter, part, target.embedding, target.head, rule).walks
            show("replay", len(found) * len(features) + len(walks), total)
        found[name] = Acceptance(walks)
    full = found["static"]
    return {
        "tau": full.tau,
        "domains": full.by(list(domains)),
        "slots": full.per_slot(drafter.config.block_size),
        "positions": {str(b): t for b, t in full.by_position(bucket).items()},
        "steps": sum(map(len, full.walks)),
        "rules": {name: {"tau": a.tau, "verified": a.verified} for name, a in found.items()},
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """For the terminal."""
    domains = sorted({d for r in rows for d in r["domains"]})
    out = Table(title="Replayed acceptance length")
    for column in ("drafter", "tau", *domains, "slot 1", "last slot", "verified rows"):
        out.add_column(column, justify="left" if column == "drafter" else "right")
    for r in rows:
        verified = "; ".join(f"{n} {x['verified']:.2f} (tau {x['tau']:.2f})" for n, x in r["rules"].items())
        per_domain = [f"{r['domains'][d]:.3f}" if d in r["domains"] else "-" for d in domains]
        ends = [f"{r['slots'][0]:.0%}", f"{r['slots'][-1]:.0%}"]
        out.add_row(r["drafter"], f"{r['tau']:.3f}", *per_domain, *ends, verified)
    return out


def plot(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Three panels: by domain, by slot, by position in the output."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_domain, by_slot, by_position) = pyplot.subplots(1, 3, figsize=(14, 4), constrained_layout=True)
    domains = sorted({d for r in rows for d in r["domains"]})
    width = 0.8 / len(rows)
    for i, r in enumerate(rows):
        places = [x + i * width for x in range(len(domains))]
        by_domain.bar(places, [r["domains"].get(d, 0.0) for d in domains], width, label=r["drafter"])
        by_slot.plot(range(1, len(r["slots"]) + 1), r["slots"], marker="o", label=r["drafter"])
        by_position.plot([int(b) for b in r["positions"]], list(r["positions"].values()), marker="o")
    by_domain.set_xticks([x + 0.4 - width / 2 for x in range(len(domains))], domains)
    by_domain.set(title="by domain", ylabel="acceptance length")
    by_slot.set(title="by slot, given the slots before", xlabel="slot", ylabel="share accepted", ylim=(0, 1))
    by_position.set(title="by position in the output", xlabel="token", ylabel="acceptance length")
    by_domain.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def _what(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row measured: drafter, target and samples, bucket."""
    return row["key"], row["samples"], row["bucket"]


def _read(known: Path | None) -> list[dict[str, Any]]:
    """Earlier results; a file that holds something else is refused rather than written over."""
    if known is None or not known.is_file():
        return []
    try:
        rows: list[dict[str, Any]] = json.loads(known.read_text())
        ours = all({"key", "samples", "bucket", "tau"} <= r.keys() for r in rows)
    except (ValueError, AttributeError, TypeError):
        ours = False
    if not ours:
        raise EvaluateError(
            f"{known} holds something else than results of adaflash eval; give another --json"
        ) from None
    return rows
