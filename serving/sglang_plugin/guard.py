"""Compares the installed SGLang with the one this plugin was written to, function by function, before a worker starts.

Every internal that we call, replace or rely on is listed in `fingerprints.json` by file and name, with a digest of its
source. Nothing of SGLang is imported. `python -m serving.sglang_plugin.guard --write` renews the file after a new
version was studied and tested.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from serving.sglang_plugin import SUPPORTED_SGLANG

FILE = Path(__file__).with_name("fingerprints.json")

# What each part of the plugin touches. A route needs every part that `NEEDED` lists for it.
TOUCHED: dict[str, tuple[str, ...]] = {
    "capture": (
        "srt/speculative/spec_info.py:SpeculativeAlgorithm.create_worker",
        "srt/managers/auxiliary_output.py:append_auxiliary_output",
        "srt/managers/auxiliary_output.py:CommittedTokens",
        "srt/managers/utils.py:GenerationBatchResult",
        "srt/utils/weight_versions.py:compute_weight_version_spans",
        "srt/managers/schedule_batch.py:Req.__init__",
    ),
    "swap": (
        "srt/model_executor/model_runner_components/weight_updater.py:WeightUpdater.update_weights_from_tensor",
        "srt/managers/scheduler_components/weight_updater.py:SchedulerWeightUpdaterManager.update_weights_from_tensor",
        "srt/managers/scheduler_components/weight_updater.py:SchedulerWeightUpdaterManager.begin_weight_update",
        "srt/managers/scheduler_components/weight_updater.py:SchedulerWeightUpdaterManager.end_weight_update",
    ),
    "penalties": (
        "srt/speculative/dflash_utils.py:apply_dflash_verify_logits_adjustments",
        "srt/sampling/sampling_batch_info.py:SamplingBatchInfo.copy_for_forward",
        "srt/sampling/sampling_batch_info.py:SamplingBatchInfo.apply_logits_bias",
        "srt/sampling/penaltylib/frequency_penalty.py:BatchedFrequencyPenalizer",
        "srt/sampling/penaltylib/presence_penalty.py:BatchedPresencePenalizer",
        "srt/sampling/penaltylib/repetition_penalty.py:BatchedRepetitionPenalizer",
        "srt/sampling/penaltylib/min_new_tokens.py:BatchedMinNewTokensPenalizer",
    ),
    "dflash": (
        "srt/speculative/dflash_worker_v2.py:DFlashWorkerV2.forward_batch_generation",
        "srt/speculative/dflash_worker_v2.py:DFlashWorkerV2._can_skip_verify_logits",
        "srt/speculative/dflash_worker_v2.py:DFlashWorkerV2._init_fused_kv_helper",
        "kernels/ops/speculative/fused_kv_materialize.py:FusedKVMaterializeHelper",
        "srt/models/dflash.py:DFlashDraftModel.load_weights",
    ),
    "dspark": (
        "srt/models/dspark.py:BaseDSparkMarkovHead",
        "srt/models/dspark.py:DSparkDraftMixin",
        "srt/models/dspark.py:build_confidence_head",
        "srt/models/dflash.py:DFlashDraftModel.forward",
        "srt/models/dflash.py:DFlashDraftModel.load_weights",
        "srt/speculative/dspark_components/dspark_worker_v2.py:DSparkWorkerV2._forward_decode",
        "srt/speculative/dspark_components/dspark_worker_v2.py:DSparkWorkerV2._forward_prefill",
        "srt/speculative/dspark_components/dspark_worker_v2.py:DSparkWorkerV2.set_dspark_forced_budget_frac",
        "srt/speculative/dspark_components/dspark_draft.py:DraftBlockProposer",
        "srt/speculative/dspark_components/dspark_worker_v2.py:DSparkWorkerV2.__init__",
        "srt/speculative/dspark_components/dspark_worker_v2.py:DSparkWorkerV2.forward_batch_generation",
        "srt/speculative/dspark_components/dspark_planner.py:apply_logits_adjustments_strided",
        "srt/speculative/dspark_components/dspark_verify.py:TargetVerifyExecutor",
        "srt/speculative/dspark_components/dspark_verify.py:accept_draft_tokens",
        "srt/speculative/dspark_components/dspark_verify.py:verify_logits_adjustments_are_noop",
    ),
    "adaptive": (
        "srt/speculative/ragged_verify.py:RaggedVerifyMode",
        "srt/speculative/ragged_verify.py:RaggedVerifyLayout",
        "srt/managers/overlap_utils.py:decide_needs_confidence_relay",
        "srt/managers/overlap_utils.py:ConfidenceRelay",
        "srt/speculative/draft_worker_common.py:make_draft_sampler_capture_hook",
        "srt/speculative/dspark_components/dspark_observability.py:DsparkInfoDumper",
        "srt/speculative/dspark_components/dspark_verify.py:DsparkVerifyEpilogue",
        "srt/speculative/dspark_components/dspark_draft.py:DraftProposal",
        "srt/speculative/dspark_components/dspark_draft.py:DraftBlockResult",
        "srt/speculative/dspark_components/dspark_draft.py:resolve_draft_params",
        "srt/speculative/dspark_components/dspark_draft_sampler.py:DsparkDraftSampler",
        "srt/speculative/dspark_components/dspark_planner.py:DSparkVerifyPlanner",
        "srt/speculative/dspark_components/dspark_planner.py:HostConfidenceBudgetPlanner",
        "srt/speculative/dspark_components/dspark_planner.py:VerifyBudgetDecision",
        "srt/speculative/dspark_components/dspark_planner.py:ragged_capture_num_tokens",
        "kernels/ops/speculative/dspark/dspark_schedule.py:schedule_verify_lens_topk_from_survival",
    ),
}
_ALWAYS = ("capture", "swap", "penalties")
NEEDED: dict[str, tuple[str, ...]] = {
    "none": (),
    "dflash": (*_ALWAYS, "dflash"),
    "dspark": (*_ALWAYS, "dspark"),
    "adaptive": (*_ALWAYS, "dspark", "adaptive"),
}


@dataclass(frozen=True)
class Report:
    """The installed version and what differs, by part."""

    version: str
    changed: dict[str, list[str]]

    def against(self, route: str) -> list[str]:
        """What differs of the things that `route` needs."""
        return [name for part in NEEDED[route] for name in self.changed.get(part, [])]


def inspect(root: Path | None = None, version: str | None = None) -> Report:
    """Reads the installed SGLang; `root` is its package folder. A missing SGLang differs in everything."""
    root = root or package()
    known = json.loads(FILE.read_text())["digests"]
    changed = {
        part: [name for name in names if digest(root, name) != known.get(name)] for part, names in TOUCHED.items()
    }
    return Report(version or _version(), {part: names for part, names in changed.items() if names})


def digest(root: Path, name: str) -> str:
    """Digest of `file:Class.function`, empty if it does not exist."""
    file, _, path = name.partition(":")
    try:
        text = (root / file).read_text()
        node: ast.AST = ast.parse(text)
    except (OSError, SyntaxError):
        return ""
    for part in path.split("."):
        found = next((n for n in _definitions(node) if n.name == part), None)
        if found is None:
            return ""
        node = found
    return hashlib.sha256((ast.get_source_segment(text, node) or "").encode()).hexdigest()[:16]


def _definitions(node: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, ast.If | ast.Try):
            yield from _definitions(child)


def package() -> Path:
    """The folder of the installed `sglang`."""
    spec = importlib.util.find_spec("sglang")
    return Path(spec.origin).parent if spec is not None and spec.origin else Path("/nonexistent")


def _version() -> str:
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "none"


def main() -> None:
    """Shows what differs; `--write` takes the installed SGLang as the known one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="record the installed version's digests")
    if parser.parse_args().write:
        names = sorted({n for names in TOUCHED.values() for n in names})
        digests = {n: digest(package(), n) for n in names}
        absent = [n for n, d in digests.items() if not d]
        if absent:
            raise SystemExit(f"not in the installed sglang: {', '.join(absent)}")
        FILE.write_text(json.dumps({"sglang": _version(), "digests": digests}, indent=1) + "\n")
    report = inspect()
    print(f"sglang {report.version}, supported {SUPPORTED_SGLANG}")
    for part, names in report.changed.items():
        print(f"{part}: {', '.join(names)}")


if __name__ == "__main__":
    main()
