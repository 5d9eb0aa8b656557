"""Settings of `adaflash worker`."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from adaflash.config import ProcessConfig
from adaflash.connect import url_from_environment
from serving.sglang_plugin.settings import Mode, Rule, VerifySettings


class WorkerConfig(ProcessConfig):
    """One SGLang server and its agent. Environment: `ADAFLASH_WORKER_<NAME>`."""

    model_config = SettingsConfigDict(env_prefix="ADAFLASH_WORKER_")

    model: str = Field(description="target: a local HF directory or a hub id")
    name: str = Field("", description="served model name and Redis namespace; default: the model's last path part")
    versions: str = Field(
        "drafters",
        description="drafter version store, shared with the trainer: a folder or an fsspec URL such as s3://bucket/drafters",
    )
    drafter: Path | None = Field(None, description="drafter checkpoint to start with while nothing is released")
    route: Literal["dspark", "dflash", "none"] = Field(
        "dspark", description="SGLang's speculative algorithm; dflash is the safe mode, none serves without drafter"
    )
    verify: Mode = Field(
        "static",
        description="static verifies whole blocks; shadow too, but reports what the rule would choose; adaptive "
        "verifies only what the rule finds worth it",
    )
    verify_rule: Rule = Field(
        "survival",
        description="survival shares a budget by the confidence head and the cost table; length is AdaFlash's rule: "
        "the length head's ratio times the rate",
    )
    verify_rate: float = Field(1.3, gt=0, description="factor on the length head's ratio")
    cost_table: Path | None = Field(None, description="what steps cost here; `adaflash profile-verify` makes it")
    speculation: Literal["auto", "on"] = Field(
        "auto", description="auto: adaptive with a cost table stops drafting while it does not pay, and probes back"
    )
    strict: bool = Field(
        False, description="refuse to start on an SGLang whose internals differ, instead of a safer route"
    )
    redis_url: str = Field(default_factory=url_from_environment)
    host: str = "127.0.0.1"
    port: int = Field(30000, gt=0, lt=65536)
    ops_port: int = Field(30001, gt=0, lt=65536, description="the agent's /metrics, /healthz and /readyz")
    advertise_url: str = Field("", description="URL under which gateways reach the engine; default: http://host:port")
    worker_id: str = Field(default_factory=lambda: f"{socket.gethostname()}-{secrets.token_hex(3)}")
    admin_key: str = Field(default_factory=lambda: secrets.token_hex(24), repr=False, description="engine admin key")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_running_requests: int = Field(16, gt=0)
    max_total_tokens: int = Field(16384, gt=0, description="KV pool, tokens; on CPU the pool is zeroed at start")
    context_length: int | None = None
    overlap: bool = Field(True, description="SGLang's overlap scheduler")
    engine_args: list[str] = Field(default_factory=list, description="further SGLang arguments, passed on as they are")
    start_seconds: float = Field(600, gt=0, description="give up on the engine after this")
    drain_seconds: float = Field(120, gt=0, description="time for running requests on SIGTERM")
    stage_seconds: float = Field(600, gt=0, description="deadline for copying and proving a version")
    swap_seconds: float = Field(60, gt=0, description="deadline of each step of a swap")

    @model_validator(mode="after")
    def _verifies_as_it_can(self) -> Self:
        if self.verify != "static" and self.route != "dspark":
            raise ValueError(f"verify {self.verify} needs route dspark, not {self.route}")
        if self.verify != "static" and self.verify_rule == "survival" and self.cost_table is None:
            raise ValueError(
                "verify_rule survival needs a cost_table: run `adaflash profile-verify`, or choose verify_rule length"
            )
        return self

    @property
    def verify_settings(self) -> VerifySettings:
        """What the plugin is told."""
        table = self.cost_table.resolve() if self.cost_table is not None else None
        return VerifySettings(
            mode=self.verify,
            rule=self.verify_rule,
            rate=self.verify_rate,
            cost_table=table,
            switch=self.speculation == "auto",
        )

    @property
    def served_name(self) -> str:
        """The model name clients use."""
        return self.name or Path(self.model).name

    @property
    def url(self) -> str:
        """The engine's own address."""
        return f"http://{self.host}:{self.port}"
