"""Small files through which code inside SGLang proves to the worker's agent what really happened.

SGLang swallows plugin errors and answers 200 to updates that were refused, so nothing it says counts as proof. Both
sides use this module; the folder is private to one worker.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

ENV_DIR = "ADAFLASH_RUN_DIR"
STARTED = "started"  # written once by each rank when its speculative worker exists


def directory() -> Path | None:
    """The folder of this worker, None when SGLang was started without our launcher."""
    name = os.environ.get(ENV_DIR)
    return Path(name) if name else None


def write(kind: str, rank: int, **content: Any) -> None:
    """Replaces the receipt `kind` of one rank."""
    home = directory()
    if home is None:
        return
    path = home / f"{kind}-{rank}.json"
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps({"at": time.time(), "pid": os.getpid(), **content}))
    scratch.rename(path)


def read(home: Path, kind: str) -> list[dict[str, Any]]:
    """The receipts `kind` of all ranks."""
    return [json.loads(p.read_text()) for p in sorted(home.glob(f"{kind}-*.json"))]
