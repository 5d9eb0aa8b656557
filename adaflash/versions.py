"""Contract 2, the drafter version: an immutable directory `v<number>/` that the trainer publishes and workers stage.

Where versions are kept is `adaflash.store`'s business; a version is never changed. The manifest carries the sha256 of
every file, so a reader can prove what it has.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from adaflash.checkpoint import (
    CONFIG,
    WEIGHTS,
    CheckpointError,
    check_weights,
    read_drafter_config,
    read_weights,
)
from adaflash.drafter_config import DrafterConfig, DrafterConfigError
from adaflash.errors import UserError, one_line

MANIFEST = "manifest.json"


class VersionError(UserError):
    """A version that is missing, damaged or foreign; the message says which file or field."""


class Manifest(BaseModel):
    """What a version is, where it came from and what it must hash to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    number: int = Field(ge=0)
    parent: int | None
    created_at: float = Field(description="Unix time, seconds")
    target: str = Field(description="fingerprint of the target it was trained for")
    files: dict[str, str] = Field(description="sha256 of every other file of the directory")
    training: dict[str, Any] = Field(default_factory=dict, description="loss, tokens, rounds: for people")
    gate: dict[str, Any] = Field(default_factory=dict, description="why it was allowed out")

    @field_validator("files")
    @classmethod
    def _plain_names(cls, files: dict[str, str]) -> dict[str, str]:
        """A manifest comes from outside: it must not name files elsewhere."""
        for name in files:
            if name != Path(name).name or name in ("", ".", "..", MANIFEST):
                raise ValueError(f"{name!r} is not the name of a file of the version")
        return files

    @property
    def label(self) -> str:
        """`v<number>`: the directory's name and the engine's weight version."""
        return label(self.number)


def label(number: int) -> str:
    """The name of version `number`."""
    return f"v{number}"


def parse_label(text: str) -> int:
    """The number in `v<number>`."""
    match = re.fullmatch(r"v(\d+)", text)
    if not match:
        raise VersionError(f"{text!r} is not a version label such as v12")
    return int(match[1])


def read_manifest(directory: Path) -> Manifest:
    """The manifest in `directory`; VersionError if it is missing or malformed."""
    try:
        return Manifest.model_validate_json((directory / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise VersionError(f"{directory.name}: {MANIFEST} is missing") from None
    except ValidationError as error:
        raise VersionError(f"{directory.name}: {MANIFEST}: {one_line(error)}") from None


def verify(directory: Path, *, target: str | None = None, like: DrafterConfig | None = None) -> Manifest:
    """Proves a version before anyone loads it: hashes, tensor names, shapes, finite values, and that it is for us.

    `target`: the fingerprint it must be trained for. `like`: the config of the drafter it would replace.
    """
    manifest = read_manifest(directory)
    if directory.name != manifest.label:
        raise VersionError(f"{directory.name}: its manifest says {manifest.label}")
    for name, expected in manifest.files.items():
        file = directory / name
        if not file.is_file():
            raise VersionError(f"{directory.name}: {name} is missing")
        if sha256(file) != expected:
            raise VersionError(f"{directory.name}: {name} does not match the sha256 in its manifest")
    if not {CONFIG, WEIGHTS} <= manifest.files.keys():
        raise VersionError(f"{directory.name}: the manifest does not cover {CONFIG} and {WEIGHTS}")
    if target is not None and manifest.target != target:
        raise VersionError(f"{directory.name}: trained for target {manifest.target}, this worker serves {target}")
    try:
        config = read_drafter_config(directory)
        if like is not None and config.trunk() != like.trunk():
            raise VersionError(f"{directory.name}: its config differs from that of the running drafter")
        check_weights(config, read_weights(directory))
    except (CheckpointError, DrafterConfigError) as error:
        raise VersionError(f"{directory.name}: {error}") from error
    return manifest


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def target_fingerprint(directory: str | Path) -> str:
    """A short hash of what makes a target this target: config, tokenizer, and size and name of its weight files.

    Weights are identified by name and size, not hashed: a target of hundreds of gigabytes must not be read for this.
    """
    root = Path(directory)
    h = hashlib.sha256()
    if not root.is_dir():
        h.update(str(directory).encode())
        return h.hexdigest()[:16]
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (root / name).is_file():
            h.update(json.dumps([name, sha256(root / name)]).encode())
    for file in sorted(root.glob("*.safetensors")):
        h.update(json.dumps([file.name, file.stat().st_size]).encode())
    return h.hexdigest()[:16]


def fsync_path(path: Path) -> None:
    """Makes a file, or the names in a directory, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
