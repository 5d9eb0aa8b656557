"""Drafter versions in an object store: the same contract as a folder, where only single objects appear at once."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
from pydantic import ValidationError

from adaflash.checkpoint import CONFIG, WEIGHTS
from adaflash.errors import one_line
from adaflash.store import REPORTS, StoreUnavailable, VersionStore
from adaflash.versions import MANIFEST, Manifest, VersionError, label, parse_label, read_manifest

CLAIM = "claim"  # an object of a version that holds its number
# A store that hangs must not hang a worker's agent for ever.
TIMEOUTS = {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 3}}


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

    def reported(self) -> list[str]:
        """The names of all reports."""
        with self._named_errors():
            return sorted(Path(k).stem for k in self.fs.glob(f"{self._base}/{REPORTS}/*.json"))

    def read_report(self, name: str) -> dict[str, Any]:
        """One report."""
        with self._named_errors():
            return dict(json.loads(self.fs.cat_file(f"{self._base}/{REPORTS}/{name}.json")))

    def _write_report(self, name: str, body: bytes) -> None:
        with self._named_errors():
            self.fs.pipe_file(f"{self._base}/{REPORTS}/{name}.json", body)

    def _drop_report(self, name: str) -> None:
        with self._named_errors():
            self.fs.rm_file(f"{self._base}/{REPORTS}/{name}.json")

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
