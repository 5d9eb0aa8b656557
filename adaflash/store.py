"""Where drafter versions are kept: a folder that trainer and workers share, or an object store.

The trainer publishes, workers copy what they are to run and prove the copy. A version appears whole or not at all, and
a number is never used twice.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import torch
from pydantic import ValidationError

from adaflash.checkpoint import CONFIG, WEIGHTS, check_weights, save_drafter
from adaflash.drafter import Drafter
from adaflash.errors import one_line
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

CLAIM = "claim"  # an object of a remote version that holds its number
# A store that hangs must not hang a worker's agent for ever.
TIMEOUTS = {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 3}}


class StoreUnavailable(VersionError):
    """The store did not answer, refused, or lacks the version: that says nothing against it."""


def open_store(where: str | Path) -> VersionStore:
    """The store at a path or an fsspec URL. Raises VersionError in one line."""
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


class RemoteStore(VersionStore):
    """A model's versions in an object store, by fsspec URL such as `s3://bucket/drafters`.

    One object appears whole, several do not appear at once: a version exists once its manifest does, which is written
    last. Who may write a number is decided by its claim, an object that only one writer can create.
    """

    def __init__(self, url: str) -> None:
        options: dict[str, Any] = {"use_listings_cache": False}
        if url.startswith("s3://"):
            options["config_kwargs"] = TIMEOUTS
        self.url = url.rstrip("/")
        try:
            self.fs, base = fsspec.core.url_to_fs(self.url, **options)
        except (ImportError, ValueError) as error:
            raise VersionError(f"version store {self.url}: {error}") from None
        self._base = base.rstrip("/")
        self._cache = tempfile.TemporaryDirectory(prefix="adaflash-versions-", ignore_cleanup_errors=True)
        super().__init__(Path(self._cache.name))

    @property
    def where(self) -> str:
        """For messages and command lines."""
        return self.url

    def _key(self, number: int, name: str) -> str:
        return f"{self._base}/{label(number)}/{name}"

    def numbers(self) -> list[int]:
        """All published versions, oldest first."""
        return self._with(MANIFEST)

    def _with(self, name: str) -> list[int]:
        with self._named_errors():
            found = self.fs.glob(f"{self._base}/v*/{name}")
        parts = (key.split("/")[-2] for key in found)
        return sorted(parse_label(p) for p in parts if re.fullmatch(r"v\d+", p))

    def _claim(self, least: int) -> int:
        """Creates the claim of the next number that nobody has claimed."""
        while True:
            chosen = max([least, *(n + 1 for n in (*self._with(CLAIM), *self.numbers()))])
            with contextlib.suppress(FileExistsError), self._named_errors(but=FileExistsError):
                self.fs.pipe_file(self._key(chosen, CLAIM), b"", mode="create")
                return chosen

    def _put(self, scratch: Path, number: int) -> None:
        """The manifest last: before it the version does not exist."""
        with self._named_errors():
            for name in (CONFIG, WEIGHTS, MANIFEST):
                self.fs.put_file(str(scratch / name), self._key(number, name))

    def manifest(self, number: int) -> Manifest:
        """The manifest of a version."""
        with self._named_errors():
            raw = self.fs.cat_file(self._key(number, MANIFEST))
        try:
            return Manifest.model_validate_json(raw)
        except ValidationError as error:
            raise VersionError(f"{label(number)}: {MANIFEST}: {one_line(error)}") from None

    def copy(self, number: int, to: Path) -> None:
        """A copy of a version in the new folder `to`; nothing is proved yet."""
        files = self.manifest(number).files
        to.mkdir(parents=True)
        for name in (*files, MANIFEST):
            try:
                with self._named_errors(but=FileNotFoundError):
                    self.fs.get_file(self._key(number, name), str(to / name))
            except FileNotFoundError:
                raise VersionError(f"{label(number)}: {name} is missing in {self.where}") from None

    def local(self, number: int) -> Path:
        """A cached copy of the version."""
        to = self.path(number)
        if not (to / MANIFEST).is_file() or read_manifest(to) != self.manifest(number):
            shutil.rmtree(to, ignore_errors=True)
            self.copy(number, to)
        return to

    def size(self, number: int) -> int:
        """Bytes."""
        with self._named_errors():
            return int(sum(self.fs.info(k)["size"] for k in self.fs.glob(f"{self._base}/{label(number)}/*")))

    def _delete(self, number: int) -> None:
        """All but the claim: the number is never used again."""
        with self._named_errors():
            for name in (MANIFEST, WEIGHTS, CONFIG):
                if self.fs.exists(self._key(number, name)):
                    self.fs.rm_file(self._key(number, name))

    def discard_unfinished(self) -> None:
        """Removes what a writer that died left behind; call only while no one publishes."""
        for number in sorted(set(self._with(CLAIM)) - set(self.numbers())):
            self._delete(number)

    @contextlib.contextmanager
    def _named_errors(self, but: type[Exception] = VersionError) -> Iterator[None]:
        """Whatever the store's client raises, in one line that names the store; each has exceptions of its own."""
        try:
            yield
        except but:
            raise
        except FileNotFoundError as error:
            raise StoreUnavailable(f"version store {self.where}: not found: {error}") from None
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            raise StoreUnavailable(f"version store {self.where}: {type(error).__name__}: {first}") from error
