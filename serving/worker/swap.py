"""Hot swap of the drafter in a running engine: stage and prove first, then pause for as little as possible.

pause(in_place) -> begin(draft) -> path loader -> receipt -> version label -> end -> continue -> checksums.
Running requests keep their state; their text cannot change, since the target verifies every token.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path

from adaflash.drafter_config import DrafterConfig
from adaflash.store import StoreUnavailable, VersionStore
from adaflash.versions import Manifest, label, verify
from serving.sglang_plugin import loader, receipts
from serving.worker.client import Engine, EngineError

logger = logging.getLogger(__name__)

STAGE_POLL_SECONDS = 0.2
STAGE_THREAD = "stage"
MOST_STAGING = 4  # copies that nobody waits for any more cannot be ended, but are not let pile up


class SwapError(RuntimeError):
    """The swap did not happen and the previous drafter still runs; the message is the reason."""


class SwapFailed(SwapError):
    """The engine did not do its part; the version may be sound."""


class EngineBroken(RuntimeError):
    """The engine could not be brought back to a known state and has to be restarted."""


@dataclass(frozen=True)
class Swapped:
    """A proven swap."""

    label: str
    checksum: str
    pause_seconds: float


def stage(
    store: VersionStore, number: int, home: Path, target: str, like: DrafterConfig | None
) -> tuple[Path, Manifest]:
    """Copies a version to a new folder in the worker's own and proves the copy; raises VersionError or OSError."""
    home.mkdir(parents=True, exist_ok=True)
    own = Path(tempfile.mkdtemp(dir=home))  # an earlier copy, given up because it was slow, may still be written
    copy = own / label(number)
    try:
        store.copy(number, copy)
        return copy, verify(copy, target=target, like=like)
    except BaseException:
        shutil.rmtree(own, ignore_errors=True)
        raise


def stage_beside(
    work: Callable[[], tuple[Path, Manifest]], go_on: Callable[[], bool], seconds: float
) -> tuple[Path, Manifest] | None:
    """Stages in a thread, so that a slow store hides nothing from the agent; None once `go_on` says no.

    Raises what `work` raised, and StoreUnavailable after `seconds` or while too many earlier copies hang.
    """
    if sum(t.name == STAGE_THREAD for t in threading.enumerate()) >= MOST_STAGING:
        raise StoreUnavailable(f"{MOST_STAGING} earlier copies from the version store have not ended")
    done: Future[tuple[Path, Manifest]] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, name=STAGE_THREAD, daemon=True).start()
    deadline = time.monotonic() + seconds
    while go_on():
        try:
            return done.result(timeout=STAGE_POLL_SECONDS)
        except FutureTimeout:
            if done.done():
                raise  # the work's own
            if time.monotonic() > deadline:
                raise StoreUnavailable(f"the version was not copied within {seconds:.0f} s") from None
    return None


class Swapper:
    """Swaps in one engine; remembers the target's checksum to prove that it never changes."""

    def __init__(self, engine: Engine, run_dir: Path) -> None:
        self.engine, self.run_dir = engine, run_dir
        self.ranks = max(1, len(receipts.read(run_dir, receipts.STARTED)))
        self.target_checksum = engine.checksums("target")

    def swap(self, directory: Path, new_label: str) -> Swapped:
        """Loads a staged version. Raises SwapError if the old drafter stays, EngineBroken if nothing is certain."""
        swap_id = uuid.uuid4().hex
        paused_at = time.monotonic()
        try:
            self.engine.pause()
            self._begin()
            checksum = self._load(swap_id, directory, new_label)
        except EngineError as error:
            raise SwapFailed(str(error)) from error
        finally:
            self._resume()
            pause = time.monotonic() - paused_at
        if self._target_checksum() != self.target_checksum:
            raise EngineBroken("the target's checksum changed during a drafter swap")
        return Swapped(new_label, checksum, pause)

    def _begin(self) -> None:
        try:
            self.engine.begin_update()
        except EngineError as error:
            if "already open" not in str(error):
                raise
            self.engine.end_update()  # left open by an agent that died
            self.engine.begin_update()

    def _load(self, swap_id: str, directory: Path, new_label: str) -> str:
        """Loads and names the version; from here on an engine that does not answer leaves nothing certain."""
        try:
            try:
                self.engine.load_draft(swap_id, str(directory), self.ranks)
            finally:
                self.engine.end_update()
            answers = [r for r in receipts.read(self.run_dir, loader.RECEIPT) if r["swap"] == swap_id]
            failed = [r["error"] for r in answers if not r["ok"]]
            if failed and len(answers) == self.ranks and len(failed) == self.ranks:
                raise SwapError(failed[0])
            if len(answers) != self.ranks or failed:
                raise EngineBroken(f"{len(answers) - len(failed)} of {self.ranks} ranks loaded {new_label}")
            self.engine.set_version(new_label)
        except EngineError as error:
            raise EngineBroken(f"while loading {new_label}: {error}") from error
        return str(answers[0]["checksum"])

    def _target_checksum(self) -> str:
        for attempt in range(3):
            try:
                return self.engine.checksums("target")
            except EngineError as error:
                logger.warning("checksum of the target failed (%s), attempt %d", error, attempt + 1)
                time.sleep(0.5)
        raise EngineBroken("the target's checksum could not be read after a swap")

    def _resume(self) -> None:
        """A paused engine accepts requests and hangs them, so this is tried hard before giving up."""
        for attempt in range(5):
            try:
                self.engine.resume()
                return
            except EngineError as error:
                logger.warning("continue_generation failed (%s), attempt %d", error, attempt + 1)
                time.sleep(0.2 * 2**attempt)
        raise EngineBroken("the engine stayed paused")
