"""The demo's promise to clean up: Ctrl-C in the middle leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.e2e.servers import ROOT


def mine(name: str) -> list[str]:
    """Command lines of live processes that belong to the demo run `name`."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if name in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(line)
    return found


def test_ctrl_c_stops_every_process(target_dir: str, tmp_path: Path) -> None:
    # As a script starts it in the background: with SIGINT ignored.
    shell = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    command = [*shell, sys.executable, "-m", "adaflash.cli", "demo", "--model", target_dir, "--minutes", "5"]
    with (tmp_path / "out").open("wb") as out:
        demo = subprocess.Popen(
            command, stdout=out, stderr=out, cwd=ROOT, env=os.environ | {"ADAFLASH_CACHE": str(tmp_path / "cache")}
        )
    try:
        deadline = time.monotonic() + 120
        while not (logs := list((tmp_path / "cache").glob("demo/*/logs/trainer.log"))):
            assert demo.poll() is None and time.monotonic() < deadline, (tmp_path / "out").read_text()
            time.sleep(0.2)
        run = logs[0].parent.parent.name
        time.sleep(12)  # SGLang and Ray are in the middle of their start
        assert len(mine(run)) >= 4
        demo.send_signal(signal.SIGINT)
        assert demo.wait(120) == 130
    finally:
        demo.terminate()
        demo.wait(120)
    deadline = time.monotonic() + 20
    while left := mine(run):
        assert time.monotonic() < deadline, left
        time.sleep(0.5)
    assert "logs are in" in (tmp_path / "out").read_text()
