"""The deployment files: valid by the tools' own checks, and every dashboard query answered by a real Prometheus."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from serving.ports import free_port
from tests.e2e.conftest import NAME, Fleet, walk_prompts
from tests.e2e.servers import ROOT, Process, Worker, cost_table

DEPLOY = ROOT / "deploy"
TOOLS = Path(sys.executable).parent


def tool(name: str) -> str:
    """A tool of the environment or the system; in CI it has to be there."""
    found = shutil.which(name, path=f"{TOOLS}:{os.environ['PATH']}")
    if found is None:
        assert not os.environ.get("CI"), f"{name} is missing; .ci/run installs it"
        pytest.skip(f"{name} is not installed")
    return found


def run(*command: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | env)


def compose(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    return run(tool("docker-compose"), *arguments, **env)


def test_compose_files_are_valid_for_cpu_and_gpu() -> None:
    base = ("-f", str(DEPLOY / "compose.yaml"))
    cpu = compose(*base, "--profile", "cpu", "config", "-q", ADAFLASH_API_KEY="k")
    assert cpu.returncode == 0, cpu.stderr
    gpu = compose(
        *(*base, "-f", str(DEPLOY / "compose.gpu.yaml"), "--profile", "gpu", "config"),
        **dict(ADAFLASH_API_KEY="k", ADAFLASH_TARGET="t", ADAFLASH_DRAFTER="/drafters/d"),
    )
    assert gpu.returncode == 0, gpu.stderr
    assert "capabilities" in gpu.stdout and "LOCK: gpu" in gpu.stdout and "prepare" not in gpu.stdout


def test_compose_refuses_to_start_without_an_api_key() -> None:
    done = compose("-f", str(DEPLOY / "compose.yaml"), "--profile", "cpu", "config", "-q", ADAFLASH_API_KEY="")
    assert done.returncode != 0
    assert "ADAFLASH_API_KEY" in done.stderr


@pytest.mark.parametrize("name", ["worker", "control"])
def test_dockerfiles_pass_hadolint(name: str) -> None:
    done = run(tool("hadolint"), str(ROOT / "docker" / f"{name}.Dockerfile"))
    assert done.returncode == 0, done.stdout


def test_the_scrape_config_passes_promtool() -> None:
    done = run(tool("promtool"), "check", "config", str(DEPLOY / "prometheus" / "prometheus.yml"))
    assert done.returncode == 0, done.stderr


def test_the_committed_dashboard_is_the_generated_one(tmp_path: Path) -> None:
    before = (DEPLOY / "grafana" / "dashboards" / "adaflash.json").read_text()
    code = f"import scripts.make_dashboard as m; m.OUT = m.Path({str(tmp_path / 'd.json')!r}); m.main()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    assert (tmp_path / "d.json").read_text() == before


@pytest.fixture
def started() -> Iterator[ExitStack]:
    """Takes what is to be called at the end, the last first."""
    with ExitStack() as stack:
        yield stack


def test_every_dashboard_query_has_data_in_a_real_prometheus(
    fleet: Fleet, gateway: str, started: ExitStack, tmp_path: Path
) -> None:
    """Prometheus scrapes an adaptive worker, gateway and a trainer that has done a round; no query may be empty."""
    fleet.run("headed")
    target = str(fleet.drafters.parent / "target")
    arguments = ("--verify", "adaptive", "--cost-table", str(cost_table(target, 8, tmp_path)))
    worker = Worker(tmp_path / "worker.log", target, NAME, fleet.redis.url, fleet.store.root, *arguments)
    started.callback(worker.stop)
    worker.wait()
    fleet.run("headed")  # a swap to show, before the trainer holds the lease
    ops = free_port()
    small = ("round.rollouts=4", "round.max_wait_seconds=5", "round.steps=2", "gate.margin=99", "threads=1")
    trainer = Process(
        *("trainer", tmp_path / "trainer.log", "--model", str(fleet.drafters.parent / "target"), "--name", NAME),
        *("--versions", str(fleet.store.root), "--state", str(tmp_path / "state"), "--ops-port", str(ops)),
        *("--redis-url", fleet.redis.url, *(x for s in small for x in ("--set", s))),
    )
    started.callback(trainer.stop)
    targets = {
        "gateway:8000": gateway.removeprefix("http://"),
        "worker:30000": f"127.0.0.1:{worker.port}",
        "worker:30001": f"127.0.0.1:{worker.ops_port}",
        "trainer:30002": f"127.0.0.1:{ops}",
    }
    config = (DEPLOY / "prometheus" / "prometheus.yml").read_text().replace("interval: 10s", "interval: 3s")
    for name, address in targets.items():
        assert name in config
        config = config.replace(name, address)
    (tmp_path / "prometheus.yml").write_text(config)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "prometheus.log").open("wb") as log:
        prometheus = subprocess.Popen(
            [
                tool("prometheus"),
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    started.callback(prometheus.wait)
    started.callback(prometheus.terminate)
    trainer.wait_ready(f"http://127.0.0.1:{ops}/readyz")
    panels = json.loads((DEPLOY / "grafana" / "dashboards" / "adaflash.json").read_text())["panels"]
    waiting = {t["expr"] for p in panels for t in p["targets"]}
    deadline = time.monotonic() + 120
    headers = {"Authorization": "Bearer user-key"}
    while waiting:
        assert time.monotonic() < deadline, f"no data for {sorted(waiting)}; {scrape_errors(url)}"
        worker.generate(walk_prompts(4), 24)
        body = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
        assert httpx.post(f"{gateway}/v1/chat/completions", json=body, headers=headers, timeout=60).status_code == 200
        waiting = {e for e in waiting if not has_data(url, e)}
        time.sleep(1)


def has_data(url: str, expression: str) -> bool:
    try:
        r = httpx.get(f"{url}/api/v1/query", params={"query": expression})
    except httpx.HTTPError:
        return False
    assert r.status_code != 400, r.text
    found = r.json()["data"]["result"]
    return any(v["value"][1] != "NaN" for v in found)


def scrape_errors(url: str) -> list[str]:
    targets = httpx.get(f"{url}/api/v1/targets").json()["data"]["activeTargets"]
    return [f"{t['scrapePool']}: {t['health']} {t['lastError']}" for t in targets]
