"""From an engine's metrics to the counters that the release controller compares."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from adaflash.live import Counters, Load
from serving.sglang_plugin.telemetry import DECODE


def counters(text: str) -> Counters:
    """Sums since the engine started. `text`: Prometheus' format; what is not ours is not parsed."""
    ours = [line for line in text.splitlines() if line.startswith(DECODE)]
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families("\n".join(ours)):
        for s in family.samples:
            key = s.name.removeprefix(DECODE), s.labels.get("load", "")
            found[key] = found.get(key, 0.0) + s.value
    loads = sorted({load for _, load in found if load})
    return Counters(
        tokens=found.get(("tokens_total", ""), 0.0),
        squares=found.get(("squared_tokens_total", ""), 0.0),
        steps=found.get(("request_steps_total", ""), 0.0),
        loads={
            load: Load(laps=found.get(("laps_total", load), 0.0), seconds=found.get(("seconds_total", load), 0.0))
            for load in loads
        },
    )
