"""Hot swap on a running engine: complete when it happens, harmless when it must not."""

from __future__ import annotations

import base64
import json
import pickle
import shutil
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from adaflash.bootstrap import drafter_config
from adaflash.checkpoint import load_drafter
from adaflash.drafter import random_drafter
from adaflash.fit_heads import with_heads
from adaflash.keys import Keys
from adaflash.release import read_events
from adaflash.versions import sha256
from serving.sglang_plugin import loader
from tests.conftest import RedisServer
from tests.e2e.conftest import NAME, Fleet, text_prompts, walk_prompts
from tests.e2e.servers import ADMIN_KEY, Worker

TOKENS = 33
PROMPTS = [*walk_prompts(8, seed=31), *text_prompts(3)]


@pytest.fixture(scope="module")
def fresh(fleet: Fleet, target_dir: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Histograms of a worker that was started with the good drafter and never swapped."""
    home = tmp_path_factory.mktemp("fresh")
    good = ("--drafter", str(fleet.drafters / "good"))
    worker = Worker(home / "worker.log", target_dir, "fresh", fleet.redis.url, home / "store", *good)
    try:
        return worker.wait().histograms(PROMPTS, TOKENS)
    finally:
        worker.stop()


def test_after_a_swap_acceptance_is_that_of_a_fresh_worker_also_for_cached_prompts(
    fleet: Fleet, fresh: list[list[int]]
) -> None:
    fleet.run("weak")
    before = fleet.worker.histograms(PROMPTS, TOKENS)
    again = fleet.worker.generate(PROMPTS, TOKENS)
    assert sum(o["meta_info"]["cached_tokens"] for o in again) > 0, "the prefix cache is off; nothing could go stale"
    fleet.run("good")
    assert fleet.worker.histograms(PROMPTS, TOKENS) == fresh != before


def test_a_version_with_length_heads_swaps_in_and_drafts_as_one_without(fleet: Fleet, fresh: list[list[int]]) -> None:
    headed = with_heads(load_drafter(fleet.drafters / "good"), 0)
    number = fleet.store.publish(headed, torch.float32, target=fleet.fingerprint, parent=None).number
    fleet.run("weak")
    fleet.promote(number)
    fleet.wait(lambda e: e.version == f"v{number}" and e.state == "ready")
    assert fleet.worker.histograms(PROMPTS, TOKENS) == fresh


def test_a_swap_changes_the_draft_alone_and_says_so(fleet: Fleet) -> None:
    def checksum(selector: str) -> list[str]:
        body = {"action": "checksum", "selector": selector}
        return [r["per_gpu_checksum"] for r in fleet.worker.http.post("/weights_checker", json=body).json()["ranks"]]

    fleet.run("weak")
    target, draft = checksum("target"), checksum("draft")
    number = fleet.run("good")
    assert checksum("target") == target
    assert checksum("draft") != draft
    event = read_events(fleet.redis.client(), Keys(NAME))[-1]
    assert (event["what"], event["to"]) == ("swapped", number)
    assert event["checksum"] == fleet.entry().checksum
    fleet.run("weak")
    assert checksum("draft") == draft


def test_requests_and_rollouts_carry_the_version_that_served_them(fleet: Fleet) -> None:
    number = fleet.run("good")
    (out,) = fleet.worker.generate(PROMPTS[:1], 12)
    assert [v["version"] for v in out["meta_info"]["weight_versions"]] == [f"v{number}"]


def tamper(directory: Path, change: object) -> None:
    weights = load_file(directory / "model.safetensors")
    change(weights)  # type: ignore[operator]
    save_file(weights, directory / "model.safetensors")
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = sha256(directory / "model.safetensors")
    (directory / "manifest.json").write_text(json.dumps(manifest))


BAD = {
    "torn": lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-100]),
    "not a number": lambda d: tamper(d, lambda w: w["norm.weight"].fill_(float("nan"))),
    "mis-shaped": lambda d: tamper(d, lambda w: w.update({"norm.weight": torch.ones(3)})),
    "without a tensor": lambda d: tamper(d, lambda w: w.pop("fc.weight")),
    "gone": lambda d: shutil.rmtree(d),
}


@pytest.mark.parametrize("damage", BAD)
def test_a_bad_version_is_refused_and_a_later_good_one_applies(fleet: Fleet, damage: str) -> None:
    good = fleet.run("good")
    want = fleet.worker.histograms(PROMPTS, TOKENS)
    bad = fleet.publish("weak")
    BAD[damage](fleet.store.path(bad))
    fleet.promote(bad)
    entry = fleet.wait(lambda e: f"v{bad} refused" in e.reason)
    assert (entry.version, entry.state) == (f"v{good}", "ready")
    event = read_events(fleet.redis.client(), Keys(NAME))[-1]
    assert (event["what"], event["to"]) == ("swap_refused", bad)
    assert fleet.worker.histograms(PROMPTS, TOKENS) == want
    later = fleet.run("good")
    assert fleet.worker.histograms(PROMPTS, TOKENS) == want
    assert fleet.entry().version == f"v{later}"


def test_a_version_for_another_target_or_of_another_shape_is_refused(fleet: Fleet, target_dir: str) -> None:
    fleet.run("good")
    config = drafter_config(target_dir, layers=1, block=8)
    for drafter, target in ((random_drafter(config, 0), fleet.fingerprint), (random_drafter(config, 0), "another")):
        number = fleet.store.publish(drafter, torch.float32, target=target, parent=None).number
        fleet.promote(number)
        fleet.wait(lambda e, n=number: f"v{n} refused" in e.reason)
    fleet.run("good")


def raw_update(worker: Worker, message: dict | bytes) -> int:
    """What an attacker with the admin key, or a bug, could send past the agent."""
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    payload = [(loader.MESSAGE, torch.from_numpy(np.frombuffer(body, dtype=np.uint8).copy()))]
    worker.http.post("/begin_weight_update", json={"selector": "draft"})
    r = worker.http.post(
        "/update_weights_from_tensor",
        json={
            "serialized_named_tensors": [base64.b64encode(pickle.dumps(payload)).decode()],
            "load_format": loader.IMPORT_PATH,
            "selector": "draft",
            "flush_cache": False,
        },
    )
    worker.http.post("/end_weight_update", json={})
    return r.status_code


def test_a_malformed_update_that_reaches_the_engine_leaves_it_serving_the_old_drafter(
    fleet: Fleet, tmp_path: Path
) -> None:
    fleet.run("good")
    want = fleet.worker.histograms(PROMPTS, TOKENS)
    outside = tmp_path / "v9"
    shutil.copytree(fleet.drafters / "weak", outside)
    for message in (
        b"\xff\x00",
        {"swap": "x"},
        {"swap": "x", "directory": str(outside)},
        {"swap": "x", "directory": "/etc"},
    ):
        raw_update(fleet.worker, message)
        assert fleet.worker.histograms(PROMPTS, TOKENS) == want


def test_the_engines_update_routes_need_the_admin_key(fleet: Fleet) -> None:
    bare = httpx.Client(base_url=fleet.worker.url, timeout=30)
    for path in ("begin_weight_update", "update_weights_from_tensor", "pause_generation", "update_weights_from_disk"):
        assert bare.post(f"/{path}", json={"selector": "draft", "mode": "in_place"}).status_code == 401
    assert fleet.worker.greedy(PROMPTS[:1], 4)


def test_the_engine_does_not_show_its_keys(fleet: Fleet) -> None:
    for path in ("server_info", "get_server_info"):
        r = httpx.get(f"{fleet.worker.url}/{path}", timeout=30)
        assert r.status_code == 401
        assert ADMIN_KEY not in r.text
        assert fleet.worker.http.get(f"/{path}").status_code == 200


def test_a_worker_whose_scheduler_is_gone_ends_with_one_line(
    target_dir: str, drafter_dir: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    """The HTTP server is stopped, so that nobody but the agent can notice."""
    arguments = ("--drafter", str(drafter_dir / "weak"))
    worker = Worker(tmp_path / "worker.log", target_dir, "lost", redis_server.url, tmp_path / "store", *arguments)
    try:
        worker.wait()
        engine = psutil.Process(worker.popen.pid).children()[0]
        (scheduler,) = [c for c in engine.children() if " ".join(c.cmdline()).startswith("sglang::scheduler")]
        engine.suspend()
        scheduler.kill()
        assert worker.popen.wait(60) == 1
        assert "adaflash: SGLang's scheduler ended without its server" in worker.log.read_text()
        assert not engine.is_running()
    finally:
        worker.stop()
