"""One short way to say that two things are the same: sha256 over parts, so that no part can run into the next."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def fingerprint(parts: Iterable[bytes]) -> str:
    """Hex sha256 over the digests of all parts."""
    h = hashlib.sha256()
    for part in parts:
        h.update(hashlib.sha256(part).digest())
    return h.hexdigest()
