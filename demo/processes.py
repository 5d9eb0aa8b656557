"""Starts and stops the demo's processes: each writes its own log file, and none survives the demo."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from adaflash.errors import UserError


class DemoFailed(UserError):
    """The demo cannot go on; the message names the process and its log."""


def _die_with_parent() -> None:
    """Runs in the child before exec: a demo that is killed takes its processes along."""
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


class Process:
    """One child process of the demo."""

    def __init__(self, name: str, arguments: list[str], logs: Path, env: dict[str, str] | None = None) -> None:
        self.name, self.log = name, logs / f"{name}.log"
        command = [sys.executable, "-m", "adaflash.cli", *arguments]
        with self.log.open("ab") as out:
            self._popen = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | (env or {}),
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        self.pid = self._popen.pid

    def wait_ready(self, url: str, seconds: float, waiting: Callable[[], None]) -> None:
        """Until `url` answers 200; raises DemoFailed with the log's last line if the process ends first."""
        deadline = time.monotonic() + seconds
        while True:
            self.require_alive()
            try:
                if httpx.get(url, timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                pass  # not listening yet
            if time.monotonic() > deadline:
                raise DemoFailed(f"{self.name} was not ready after {seconds:.0f} s; see {self.log}")
            waiting()
            time.sleep(0.5)

    def require_alive(self) -> None:
        """Raises DemoFailed if the process has ended."""
        code = self._popen.poll()
        if code is not None:
            lines = self.log.read_text(errors="replace").strip().splitlines()
            raise DemoFailed(
                f"{self.name} ended with exit code {code}: {lines[-1] if lines else 'no output'} ({self.log})"
            )

    def stop(self, seconds: float = 60) -> None:
        """SIGTERM, then SIGKILL after `seconds`."""
        if self._popen.poll() is None:
            self._popen.terminate()
            try:
                self._popen.wait(seconds)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()
