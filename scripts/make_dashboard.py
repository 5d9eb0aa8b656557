"""Writes the Grafana dashboard; edit the panels here and run `python scripts/make_dashboard.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards" / "adaflash.json"
TOKENS, STEPS = "adaflash_output_tokens_total", "adaflash_verify_steps_total"


def speed(kind: str) -> str:
    """Tokens per second of verify steps: measured, predicted, or predicted for whole blocks."""
    tokens, seconds = (f'sum(rate(adaflash_step_{unit}_total{{kind="{kind}"}}[5m]))' for unit in ("tokens", "seconds"))
    return f"({tokens} / ({seconds} > 0))"


# title, unit, kind, what it tells, [(legend, PromQL)]
PANELS: list[tuple[str, str, str, str, list[tuple[str, str]]]] = [
    (
        "Acceptance length τ per domain",
        "short",
        "timeseries",
        "Tokens per verify step, bonus included. 1 means the drafter helps nothing.",
        [
            ("{{domain}}", f"sum by (domain) (rate({TOKENS}[5m])) / (sum by (domain) (rate({STEPS}[5m])) > 0)"),
            ("all", f"sum(rate({TOKENS}[5m])) / (sum(rate({STEPS}[5m])) > 0)"),
        ],
    ),
    (
        "Output",
        "tokens/s",
        "timeseries",
        "Tokens per second from verify steps of finished requests, over all workers.",
        [("tok/s", f"sum(rate({TOKENS}[2m]))")],
    ),
    (
        "Drafter version per worker",
        "short",
        "timeseries",
        "Steps up at each swap; workers that stay behind show as separate lines.",
        [("{{instance}}", "adaflash_drafter_version"), ("released", 'max(adaflash_release_version{role="active"})')],
    ),
    (
        "Swaps",
        "short",
        "timeseries",
        "Swaps in the last 15 minutes by result; anything but done is explained on the event stream.",
        [("{{result}}", "sum by (result) (increase(adaflash_swaps_total[15m]))")],
    ),
    (
        "Swap pause, mean",
        "s",
        "stat",
        "How long generation stood still per swap.",
        [("pause", "sum(adaflash_swap_pause_seconds_sum) / (sum(adaflash_swap_pause_seconds_count) > 0)")],
    ),
    (
        "Speculation",
        "short",
        "stat",
        "Workers whose start-up proof saw speculation, and workers whose plugin is live.",
        [("speculating", "sum(adaflash_speculation_active)"), ("plugin live", "sum(adaflash_plugin_active)")],
    ),
    (
        "Acceptance per slot",
        "percentunit",
        "timeseries",
        "Share of verify steps that accepted slot k: the curve's shape is the diagnosis of a drafter.",
        [
            (
                "slot {{slot}}",
                f"sum by (slot) (rate(adaflash_slot_accepted_total[5m])) / scalar(sum(rate({STEPS}[5m])) > 0)",
            )
        ],
    ),
    (
        "Rows verified per request and step",
        "short",
        "timeseries",
        "Mean verify length of finished requests, and the share of their rows that emitted nothing.",
        [
            ("mean", f"sum(rate(adaflash_verified_rows_total[5m])) / (sum(rate({STEPS}[5m])) > 0)"),
            (
                "wasted share",
                "sum(rate(adaflash_wasted_rows_total[5m])) / (sum(rate(adaflash_verified_rows_total[5m])) > 0)",
            ),
        ],
    ),
    (
        "Verify lengths",
        "short",
        "timeseries",
        "Steps per second by the rows that a request verified in them.",
        [("{{rows}}", "sum by (rows) (rate(adaflash_verify_length_total[5m]))")],
    ),
    (
        "Gain over whole blocks",
        "percentunit",
        "timeseries",
        "Tokens per second of the chosen lengths over those of verifying whole blocks: as predicted and as measured.",
        [(kind, f"{speed(kind)} / {speed('whole_block')} - 1") for kind in ("predicted", "measured")],
    ),
    (
        "Calibration error of the confidence head",
        "percentunit",
        "timeseries",
        "Mean distance between confidence and acceptance; refit the heads when it grows.",
        [
            (
                "error",
                "sum(abs(sum by (bin) (rate(adaflash_confidence_sum_total[15m])) - "
                "sum by (bin) (rate(adaflash_confidence_accepted_total[15m])))) / "
                "(sum(rate(adaflash_confidence_slots_total[15m])) > 0)",
            )
        ],
    ),
    (
        "Does drafting pay?",
        "short",
        "timeseries",
        "Workers that draft now, measured speed over plain decoding, and workers on a safer route than configured.",
        [
            ("drafting", "sum(adaflash_speculation_on)"),
            ("speed over plain, {{instance}}", "adaflash_speculation_speedup_ratio"),
            ("safe mode", "sum(adaflash_safe_mode)"),
        ],
    ),
    (
        "Replayed τ of the trainer",
        "short",
        "timeseries",
        "Candidate and active drafter on the newest held-out slice.",
        [("{{drafter}}", "adaflash_trainer_replay_tau")],
    ),
    (
        "Release",
        "short",
        "timeseries",
        "What the release controller decided in the last hour, what is on its way, and whether releases are paused.",
        [
            ("{{what}}", "sum by (what) (increase(adaflash_release_events_total[1h]))"),
            ("in {{phase}}", 'max by (phase) (adaflash_release_phase{phase!="idle"})'),
            ("paused", "max(adaflash_release_paused)"),
        ],
    ),
    (
        "Requests that lived through a swap",
        "percentunit",
        "timeseries",
        "Share of the finished requests that saw more than one drafter version. Their text is the same either way.",
        [
            (
                "share",
                'sum(rate(adaflash_finished_requests_total{versions="several"}[5m])) / '
                "(sum(rate(adaflash_finished_requests_total[5m])) > 0)",
            )
        ],
    ),
    (
        "Trainer rounds",
        "short",
        "timeseries",
        "Rounds by the gate's verdict, and seconds of the last one.",
        [
            ("{{verdict}}", "sum by (verdict) (increase(adaflash_trainer_rounds_total[15m]))"),
            ("seconds", "adaflash_trainer_round_seconds"),
        ],
    ),
    (
        "Rollouts",
        "short",
        "timeseries",
        "Per second, by what became of them. Dropped ones cost learning, never responses.",
        [
            ("{{result}}", "sum by (result) (rate(adaflash_rollouts_total[5m]))"),
            ("not read yet", "adaflash_trainer_waiting_rollouts"),
        ],
    ),
    (
        "Requests",
        "reqps",
        "timeseries",
        "At the gateway, by status.",
        [("{{status}}", "sum by (status) (rate(adaflash_gateway_requests_total[2m]))")],
    ),
    (
        "Request time, 95th percentile",
        "s",
        "timeseries",
        "At the gateway, by route.",
        [
            (
                "{{route}}",
                "histogram_quantile(0.95, sum by (le, route) (rate(adaflash_gateway_request_seconds_bucket[5m])))",
            )
        ],
    ),
]


def panel(index: int, title: str, unit: str, kind: str, text: str, queries: list[tuple[str, str]]) -> dict[str, Any]:
    """One panel of a two-column grid."""
    source = {"type": "prometheus", "uid": "prometheus"}
    return {
        "id": index + 1,
        "type": kind,
        "title": title,
        "description": text,
        "datasource": source,
        "gridPos": {"h": 8, "w": 12, "x": 12 * (index % 2), "y": 8 * (index // 2)},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": chr(65 + i), "expr": expr, "legendFormat": legend, "datasource": source}
            for i, (legend, expr) in enumerate(queries)
        ],
    }


def main() -> None:
    """Writes the file."""
    dashboard = {
        "uid": "adaflash",
        "title": "AdaFlash",
        "tags": ["adaflash"],
        "schemaVersion": 41,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "panels": [panel(i, *p) for i, p in enumerate(PANELS)],
    }
    OUT.write_text(json.dumps(dashboard, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
