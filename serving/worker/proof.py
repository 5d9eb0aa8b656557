"""The start-up proof: an engine is ready only when the plugin is live, the drafter loaded and speculation happens."""

from __future__ import annotations

from pathlib import Path

from serving.sglang_plugin import receipts
from serving.worker.client import Engine
from serving.worker.launch import Drafter

PROBE_TOKENS = 12


class ProofFailed(RuntimeError):
    """The engine runs but not as it should; the message says what is missing and what to look at."""


def prove(engine: Engine, run_dir: Path, drafter: Drafter | None) -> str:
    """Raises ProofFailed, or returns the checksum of the loaded drafter (empty without one)."""
    probe = list(range(1, 9))
    meta = engine.generate(probe, PROBE_TOKENS)["meta_info"]
    if drafter is None:
        return ""
    started = receipts.read(run_dir, receipts.STARTED)
    if not started:
        raise ProofFailed(
            "the AdaFlash plugin is not live inside SGLang: check SGLANG_PLUGINS and SGLANG_PLATFORM "
            "(another platform's name hides our plugin) and that adaflash-serve is installed in this environment"
        )
    for receipt in started:
        if receipt["hooks_missing"]:
            raise ProofFailed(f"SGLang did not apply our hook on {receipt['hooks_missing'][0]}")
    if not meta.get("spec_verify_ct"):
        raise ProofFailed("SGLang answered without speculating although a drafter is configured")
    return str(started[0]["checksum"])
