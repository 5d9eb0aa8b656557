"""Contract 1, the rollout record: what a worker writes to the Redis stream and the trainer reads back.

msgpack with the ids as packed little-endian int32, then zstd. Token ids only, never text.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgpack
import numpy as np
import zstandard
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

FIELD = b"r"  # the stream entry's only field
_MAX_BYTES = 64 << 20  # a record that claims to be larger is refused before it is unpacked

Ids = Annotated[list[int], Field(strict=False)]


class RolloutError(ValueError):
    """Bytes that are not a rollout record of a schema we read."""


class VersionSpan(BaseModel):
    """Output tokens [start, end) were emitted while drafter `version` was loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str
    start: int = Field(ge=0)
    end: int = Field(ge=0)


class Rollout(BaseModel):
    """One finished request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    request_id: str
    tenant: str = Field("", description="hash of the tenant's key, empty when there is none")
    domain: str = "other"
    target: str = Field(description="fingerprint of the target and its tokenizer")
    versions: list[VersionSpan]
    prompt_ids: Ids
    output_ids: Ids
    accepted: list[int] = Field(description="tokens each verify step added to the output, bonus included")
    verified: list[int] = Field(description="block rows each of these steps verified, anchor included")
    temperature: float
    top_p: float
    top_k: int
    finish_reason: str
    finished_at: float = Field(description="Unix time, seconds")

    @model_validator(mode="after")
    def _counts(self) -> Rollout:
        if len(self.accepted) != len(self.verified):
            raise ValueError("accepted and verified must have one entry per verify step")
        # The first output token comes from prefill.
        if self.output_ids and sum(self.accepted) != len(self.output_ids) - 1:
            raise ValueError(f"steps emitted {sum(self.accepted)} tokens but the output has {len(self.output_ids)}")
        return self

    @property
    def greedy(self) -> bool:
        """True if the target's argmax was served."""
        return self.temperature == 0 or self.top_k == 1

    def pack(self) -> bytes:
        """The record as bytes."""
        fields: dict[str, Any] = self.model_dump()
        for key in ("prompt_ids", "output_ids"):
            fields[key] = np.asarray(fields[key], dtype="<i4").tobytes()
        for key in ("accepted", "verified"):
            fields[key] = np.asarray(fields[key], dtype="<u2").tobytes()
        return _compressor().compress(msgpack.packb(fields))


def unusable(prompt_ids: Sequence[int], output_ids: Sequence[int], vocabulary: int, longest: int) -> str:
    """Why a sequence cannot be learnt from when cut at `longest` tokens, or "". One rule for traffic and for files."""
    if not prompt_ids or len(output_ids) < 2:
        return "too_short"  # the first response token comes from prefill; there must be one to draft after it
    if not 0 <= min(*prompt_ids, *output_ids) <= max(*prompt_ids, *output_ids) < vocabulary:
        return "ids_out_of_range"
    if len(prompt_ids) > longest - 2:
        return "prompt_too_long"
    return ""


def unpack(data: bytes) -> Rollout:
    """The record in `data`; raises RolloutError for anything else."""
    try:
        if zstandard.frame_content_size(data) > _MAX_BYTES:
            raise RolloutError("rollout record claims to be too long")
        fields = msgpack.unpackb(zstandard.ZstdDecompressor().decompress(data, max_output_size=_MAX_BYTES))
        for key in ("prompt_ids", "output_ids"):
            fields[key] = np.frombuffer(fields[key], dtype="<i4").tolist()
        for key in ("accepted", "verified"):
            fields[key] = np.frombuffer(fields[key], dtype="<u2").tolist()
        return Rollout(**fields)
    except ValidationError as error:
        raise RolloutError(f"rollout record has {error.error_count()} invalid fields") from None
    except (zstandard.ZstdError, ValueError, TypeError, KeyError) as error:
        raise RolloutError(f"not a rollout record: {type(error).__name__}") from None


@functools.cache
def _compressor() -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=3)
