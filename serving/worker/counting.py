"""From an engine's metrics to the counters that the release controller compares."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from adaflash.live import SUMS, Counters, Load
from serving.sglang_plugin.telemetry import DECODE


def counters(text: str) -> Counters:
    """Sums since the engine started. `text`: Prometheus' format; what is not ours is not parsed."""
    ours = [line for line in text.splitlines() if line.startswith(DECODE)]
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families("\n".join(ours)):
        for s in family.samples:
            key = s.name.removeprefix(DECODE), s.labels.get("load", "")
            found[key] = found.get(key, 0.0) + s.value
    loads = {load for _, load in found if load}
    return Counters(
        **{name: found.get((f"{name}_total", ""), 0.0) for name in SUMS},
        loads={
            load: Load(**{name: found.get((f"load_{name}_total", load), 0.0) for name in Load.model_fields})
            for load in sorted(loads)
        },
    )
