"""Where drafter versions are kept: a folder that trainer and workers share, or an object store.

The trainer publishes, workers copy what they are to run and prove the copy. A version appears whole or not at all, and
a number is never used twice.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from adaflash.checkpoint import CONFIG, WEIGHTS, check_weights, save_drafter
from adaflash.drafter import Drafter
from adaflash.versions import (
    MANIFEST,
    Manifest,
    VersionError,
    fsync_path,
    label,
    parse_label,
    read_manifest,
    sha256,
)

REPORTS = "reports"  # the folder of what speaks against versions and candidates
KEPT_REPORTS = 200


class StoreUnavailable(VersionError):
    """The store did not answer, refused, or lacks the version: that says nothing against it."""


def open_store(where: str | Path) -> VersionStore:
    """The store at a path or an fsspec URL. Raises VersionError in one line."""
    from adaflash.remote_store import RemoteStore

    text = str(where).removeprefix("file://")
    return RemoteStore(text) if "://" in text else VersionStore(text)


class VersionStore:
    """A model's versions in a local folder or on a volume that trainer and workers share."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().absolute()

    @property
    def where(self) -> str:
        """For messages and command lines."""
        return str(self.root)

    def path(self, number: int) -> Path:
        """The directory of version `number`, whether it exists or not."""
        return self.root / label(number)

    def numbers(self) -> list[int]:
        """All published versions, oldest first."""
        if not self.root.is_dir():
            return []
        return sorted(parse_label(p.name) for p in self.root.iterdir() if re.fullmatch(r"v\d+", p.name))

    def publish(
        self,
        drafter: Drafter,
        dtype: torch.dtype,
        *,
        target: str,
        parent: int | None,
        training: dict[str, Any] | None = None,
        gate: dict[str, Any] | None = None,
        least: int = 0,
    ) -> Manifest:
        """Writes the next version, numbered `least` or higher, and returns its manifest.

        Raises VersionError if another writer was faster, CheckpointError naming the tensor if one is not finite.
        """
        check_weights(drafter.config, drafter.state_dict())
        chosen = self._claim(least)
        with self._scratch() as home:
            scratch = Path(home)
            save_drafter(drafter, scratch, dtype)
            manifest = Manifest(
                number=chosen,
                parent=parent,
                created_at=time.time(),
                target=target,
                files={n: sha256(scratch / n) for n in (CONFIG, WEIGHTS)},
                training=training or {},
                gate=gate or {},
            )
            (scratch / MANIFEST).write_text(manifest.model_dump_json(indent=1))
            self._put(scratch, chosen)
        return manifest

    def _claim(self, least: int) -> int:
        """The number to write; the rename decides if two writers chose the same."""
        self.root.mkdir(parents=True, exist_ok=True)
        return max([least, *(n + 1 for n in self.numbers())])

    def _scratch(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(dir=self.root, prefix=".writing-", ignore_cleanup_errors=True)

    def _put(self, scratch: Path, number: int) -> None:
        """Makes what was written durable and gives it its name, at once."""
        for file in scratch.iterdir():
            file.chmod(0o644)  # workers may run as another user
            fsync_path(file)
        scratch.chmod(0o755)
        fsync_path(scratch)
        if self.path(number).exists():
            raise VersionError(f"{label(number)} already exists in {self.where}; versions are never overwritten")
        scratch.rename(self.path(number))
        fsync_path(self.root)

    def manifest(self, number: int) -> Manifest:
        """The manifest of a version."""
        return read_manifest(self.path(number))

    def copy(self, number: int, to: Path) -> None:
        """A copy of a version in the new folder `to`; nothing is proved yet."""
        if not self.path(number).is_dir():  # so it is while a volume is not mounted
            raise StoreUnavailable(f"{label(number)} is missing in {self.where}")
        shutil.copytree(self.path(number), to)

    def local(self, number: int) -> Path:
        """A folder with the version that can be read; for a remote store a cached copy."""
        return self.path(number)

    def size(self, number: int) -> int:
        """Bytes."""
        return sum(f.stat().st_size for f in self.path(number).iterdir())

    def prune(self, keep: int, in_use: set[int]) -> list[int]:
        """Deletes all but the newest `keep` versions and those in use; returns what it deleted."""
        gone = [n for n in self.numbers()[:-keep] if n not in in_use]
        for number in gone:
            self._delete(number)
        return gone

    def _delete(self, number: int) -> None:
        shutil.rmtree(self.path(number), ignore_errors=True)

    def discard_unfinished(self) -> None:
        """Removes what a writer that died left behind; call only while no one publishes."""
        for leftover in self.root.glob(".writing-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def report(self, name: str, body: dict[str, Any]) -> None:
        """Keeps why a version (`v7`) or a candidate that was not published (`round-...`) was rejected."""
        self._write_report(name, json.dumps(body, indent=1).encode())
        for old in sorted(n for n in self.reported() if not re.fullmatch(r"v\d+", n))[:-KEPT_REPORTS]:
            self._drop_report(old)

    def reported(self) -> list[str]:
        """The names of all reports."""
        return sorted(p.stem for p in (self.root / REPORTS).glob("[!.]*.json"))

    def read_report(self, name: str) -> dict[str, Any]:
        """One report."""
        return dict(json.loads((self.root / REPORTS / f"{name}.json").read_bytes()))

    def _write_report(self, name: str, body: bytes) -> None:
        folder = self.root / REPORTS
        scratch = folder / f".{name}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            scratch.write_bytes(body)
            scratch.rename(folder / f"{name}.json")
        except OSError as error:
            raise StoreUnavailable(f"version store {self.where}: {error}") from error

    def _drop_report(self, name: str) -> None:
        (self.root / REPORTS / f"{name}.json").unlink(missing_ok=True)
