"""Settings of `adaflash trainer`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from adaflash.config import ProcessConfig, Section
from adaflash.connect import url_from_environment
from adaflash.distill import DistillConfig


class RoundConfig(Section):
    """When a round starts and what it trains on."""

    rollouts: int = Field(128, gt=0, description="new rollouts that start a round")
    max_wait_seconds: float = Field(300, gt=0, description="start with fewer after this, if there is at least one")
    steps: int = Field(32, gt=0, description="optimiser steps per round")
    sequences: int = Field(8, gt=0, description="sequences per optimiser step")
    new_share: float = Field(
        0.5, ge=0, le=1, description="share of a step's sequences from the newest round; the rest is replay"
    )
    max_sequence: int = Field(2048, gt=1, description="tokens; longer rollouts are cut at the end")


class BufferConfig(Section):
    """What is kept between rounds."""

    per_domain: int = Field(256, gt=0, description="replay reservoir, sequences per domain")
    held_out: int = Field(24, gt=0, description="newest sequences used for evaluation only")
    held_out_share: float = Field(0.125, gt=0, lt=1, description="share of new sequences that is held out")
    feature_bytes: int = Field(1 << 30, ge=0, description="cache of target features")


class GateConfig(Section):
    """When a candidate may be released."""

    margin: float = Field(0.02, ge=0, description="replayed tau must gain at least this")
    confidence: float = Field(0.9, gt=0, lt=1, description="the gain's paired bootstrap interval has to lie above zero")
    worst_domain_loss: float = Field(0.03, ge=0, description="relative tau loss allowed in any domain")
    parity: float = Field(
        0.05, ge=0, description="relative difference allowed between the active drafter's replayed and served tau"
    )
    min_domain: int = Field(3, gt=0, description="held-out sequences a domain needs for a veto")
    min_held_out: int = Field(6, gt=0, description="held-out sequences needed for a verdict")


class TrainerConfig(ProcessConfig):
    """Environment: `ADAFLASH_TRAINER_<NAME>`, nested with a double underscore."""

    model_config = SettingsConfigDict(env_prefix="ADAFLASH_TRAINER_")

    model: str = Field(description="target: a local HF directory or a hub id")
    name: str = Field("", description="served model name and Redis namespace; default: the model's last path part")
    versions: str = Field(
        "drafters",
        description="drafter version store, shared with the workers: a folder or an fsspec URL such as s3://bucket/drafters",
    )
    drafter: Path | None = Field(None, description="drafter to start from when nothing is released; published as v0")
    state: Path = Field(Path("trainer-state"), description="the trainer's own durable state")
    redis_url: str = Field(default_factory=url_from_environment)
    host: str = "127.0.0.1"
    ops_port: int = Field(30002, gt=0, lt=65536)
    keep_versions: int = Field(8, ge=3, description="newest versions kept on disk, besides those in use")
    threads: int = Field(0, ge=0, description="torch threads of the learner; 0: torch's default")
    seed: int = 0
    round: RoundConfig = RoundConfig()
    buffer: BufferConfig = BufferConfig()
    gate: GateConfig = GateConfig()
    distill: DistillConfig = DistillConfig()

    @property
    def served_name(self) -> str:
        """The model name whose rollouts are read."""
        return self.name or Path(self.model).name
