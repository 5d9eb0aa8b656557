"""The ablation's table, JSON rows and plot in `benchmarks/results/`, from the finished runs."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.ablation.run import ANCHORS, SEQUENCES, START_STEPS, STEPS
from benchmarks.ablation.variants import VARIANTS
from benchmarks.machine import describe

RESULTS = Path(__file__).resolve().parent.parent / "results"
REACH = 0.9


def tokens_to_reach(curve: list[list[float]], share: float = REACH) -> float:
    """Slots trained until tau has made `share` of its way from 1 to the final value, interpolated."""
    goal = 1 + share * (curve[-1][1] - 1)
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if y0 < goal <= y1:
            return x0 + (x1 - x0) * (goal - y0) / (y1 - y0)
    return curve[0][0] if curve[0][1] >= goal else curve[-1][0]


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per variant: mean and spread over seeds, and the paired difference to its setting's baseline."""
    out = []
    for v in VARIANTS:
        mine = {r["seed"]: r for r in rows if (r["setting"], r["variant"]) == (v.setting, v.name)}
        if not mine:
            continue
        first = next(w for w in VARIANTS if w.setting == v.setting)
        base = {r["seed"]: r["tau"] for r in rows if (r["setting"], r["variant"]) == (first.setting, first.name)}
        taus = [r["tau"] for r in mine.values()]
        gaps = [r["tau"] - base[s] for s, r in mine.items() if s in base]
        out.append(
            {
                "setting": v.setting,
                "variant": v.name,
                "seeds": len(mine),
                "tau": statistics.mean(taus),
                "tau_sd": statistics.stdev(taus) if len(taus) > 1 else 0.0,
                "gap": statistics.mean(gaps) if gaps else 0.0,
                "gap_sd": statistics.stdev(gaps) if len(gaps) > 1 else 0.0,
                "domains": {d: statistics.mean(r["domains"][d] for r in mine.values()) for d in domains_of(mine)},
                "tokens_to_90": statistics.mean(tokens_to_reach(r["curve"]) for r in mine.values()),
                "step_seconds": statistics.median(r["step_seconds"] for r in mine.values()),
                "curve": [
                    [statistics.mean(r["curve"][i][k] for r in mine.values()) for k in (0, 1)]
                    for i in range(min(len(r["curve"]) for r in mine.values()))
                ],
            }
        )
    return out


def domains_of(mine: dict[int, dict[str, Any]]) -> list[str]:
    """Domains that every run has."""
    return sorted(set.intersection(*(set(r["domains"]) for r in mine.values())))


def write(rows: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    """`ablation.json`, `ablation.md` and `ablation.png`."""
    RESULTS.mkdir(exist_ok=True)
    table, machine = summarise(rows), describe()
    (RESULTS / "ablation.json").write_text(
        json.dumps({"machine": machine, "settings": settings, "rows": table}, indent=1) + "\n"
    )
    lines = [
        "# Ablation of the distillation",
        "",
        f"`make ablation` on {machine['processor']}, {machine['cores']} cores: SmolLM2-135M-Instruct (bf16), prompts",
        f"from {settings['prompts']}; {settings['training_sequences']} training and",
        f"{settings['held_out_sequences']} held-out greedy answers of at most 64 tokens; 2 drafter layers, block 8,",
        f"{SEQUENCES} sequences and {ANCHORS} anchors a step. τ is replayed on the held-out",
        "answers; ± is the standard deviation over seeds; the difference is paired by seed.",
    ]
    for setting in ("scratch", "shift"):
        steps = STEPS[setting]
        title = (
            f"From random weights, {steps} steps"
            if setting == "scratch"
            else f"Adapting: {START_STEPS} steps on code first, then {steps} steps while math arrives"
        )
        lines += ["", f"## {title}", "", "| | seeds | τ | against baseline | math | code | slots to 90 % | s/step |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        for r in (r for r in table if r["setting"] == setting):
            d = r["domains"]
            lines.append(
                f"| {r['variant']} | {r['seeds']} | {r['tau']:.3f} ± {r['tau_sd']:.3f} "
                f"| {r['gap']:+.3f} ± {r['gap_sd']:.3f} | {d.get('math', 0):.2f} | {d.get('code', 0):.2f} "
                f"| {r['tokens_to_90']:.0f} | {r['step_seconds']:.2f} |"
            )
    (RESULTS / "ablation.md").write_text("\n".join([*lines, ""]))
    plot(table)
    print("\n".join(lines))


def plot(table: list[dict[str, Any]]) -> None:
    """Both settings side by side: final tau with its spread."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 6), constrained_layout=True)
    for axis, setting in zip(axes, ("scratch", "shift"), strict=True):
        mine = [r for r in table if r["setting"] == setting][::-1]
        if not mine:
            continue
        colours = ["#4c72b0" if r["variant"] != mine[-1]["variant"] else "#dd8452" for r in mine]
        axis.barh(
            [r["variant"] for r in mine], [r["tau"] for r in mine], xerr=[r["tau_sd"] for r in mine], color=colours
        )
        axis.axvline(mine[-1]["tau"], color="grey", linewidth=0.8, linestyle="--")
        axis.set_xlim(left=1)
        axis.set_xlabel("replayed acceptance length τ")
        axis.set_title("from random weights" if setting == "scratch" else "adapting from code to math")
    figure.savefig(RESULTS / "ablation.png", dpi=110)
    pyplot.close(figure)
