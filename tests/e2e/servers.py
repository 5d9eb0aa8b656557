"""Real processes for the end-to-end tests: `adaflash worker`, `gateway` and `trainer` on free ports."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx

from adaflash.cost import CostTable
from adaflash.versions import target_fingerprint
from serving.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
ADMIN_KEY = "test-admin-key"
START_SECONDS = 420
ROW_SECONDS, STEP_SECONDS = 0.002, 0.01  # of the cost table that tests make up
OFF, PLANNED = 1e-7, 1.0  # SGLang's budget switch: do not draft; plan


class Process:
    """One `adaflash` process, its log in a file."""

    def __init__(self, command: str, log: Path, *arguments: str, **env: str) -> None:
        self.log, self.command = log, command
        with log.open("ab") as out:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "adaflash.cli", command, *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=os.environ | env,
            )

    def wait_ready(self, url: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert self.popen.poll() is None, self.log.read_text(errors="replace")[-3000:]
            try:
                if httpx.get(url, timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            assert time.monotonic() < deadline, self.log.read_text(errors="replace")[-3000:]
            time.sleep(0.25)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def stop(self) -> None:
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()


class Worker(Process):
    """A worker on the tiny target in fp32."""

    def __init__(self, log: Path, target: str, name: str, redis_url: str, store: Path, *more: str, **env: str) -> None:
        self.name, self.store = name, store
        self.port, self.ops_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        super().__init__(
            *("worker", log, "--model", target, "--name", name, "--redis-url", redis_url, "--versions", str(store)),
            *("--port", str(self.port), "--ops-port", str(self.ops_port), "--dtype", "float32"),
            *("--set", f"admin_key={ADMIN_KEY}", "--set", "max_total_tokens=16384", *more),
            **env,
        )
        self.http = httpx.Client(base_url=self.url, timeout=120, headers={"Authorization": f"Bearer {ADMIN_KEY}"})

    def wait(self) -> Worker:
        self.wait_ready(f"http://127.0.0.1:{self.ops_port}/readyz")
        return self

    def generate(self, prompts: list[list[int]], tokens: int, **sampling: object) -> list[dict]:
        """A batch of prompts through `/generate`; greedy unless `sampling` says otherwise."""
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True} | sampling
        r = self.http.post("/generate", json={"input_ids": prompts, "sampling_params": params})
        assert r.status_code == 200, r.text
        return r.json()

    def greedy(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        return [o["output_ids"] for o in self.generate(prompts, tokens)]

    def histograms(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Per prompt: verify steps by the number of correct drafts."""
        return [pad(o["meta_info"]["spec_correct_drafts_histogram"]) for o in self.generate(prompts, tokens)]


def pad(histogram: list[int] | None, width: int = 8) -> list[int]:
    return [*(histogram or []), *[0] * (width - len(histogram or []))]


def cost_table(target: str, block: int, home: Path, row_seconds: float = ROW_SECONDS) -> Path:
    """A made-up table whose rows cost enough that lengths differ."""
    slots = block - 1
    CostTable(
        machine="made up",
        target=target_fingerprint(target),
        sglang="0",
        block_size=block,
        requests=(1, 16),
        fractions=(0.0, 1.0),
        seconds=tuple((STEP_SECONDS, STEP_SECONDS + row_seconds * slots * r) for r in (1, 16)),
        plain_seconds=(STEP_SECONDS * 0.9,) * 2,
    ).save(home / "cost.json")
    return home / "cost.json"


def budget(worker: Worker, fraction: float) -> None:
    """How much of the slots an adaptive worker verifies from now on: `OFF`, `PLANNED` or a share of all."""
    r = worker.http.post("/set_internal_state", json={"server_args": {"dspark_force_budget_frac": fraction}})
    assert r.status_code == 200 and r.json() == [True], r.text
