"""Settings of `adaflash gateway`."""

from __future__ import annotations

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from adaflash.config import ProcessConfig
from adaflash.connect import url_from_environment
from adaflash.fleet import ReleasePolicy


class GatewayConfig(ProcessConfig):
    """Environment: `ADAFLASH_GATEWAY_<NAME>`."""

    model_config = SettingsConfigDict(env_prefix="ADAFLASH_GATEWAY_")

    name: str = Field(description="served model name: the Redis namespace whose workers are used")
    redis_url: str = Field(default_factory=url_from_environment)
    host: str = "127.0.0.1"
    port: int = Field(8000, gt=0, lt=65536)
    api_keys: list[str] = Field(default_factory=list, repr=False, description="accepted bearer tokens; empty: open")
    admin_key: str = Field("", repr=False, description="bearer token of the admin API under /admin; empty: no such API")
    release: ReleasePolicy = ReleasePolicy()
    max_body_bytes: int = Field(8 << 20, gt=0)
    connect_seconds: float = Field(5, gt=0)
    first_byte_seconds: float = Field(
        600, gt=0, description="longest wait for a worker's first byte, and between bytes"
    )

    @model_validator(mode="after")
    def _admin_is_not_a_user(self) -> GatewayConfig:
        if self.admin_key and self.admin_key in self.api_keys:
            raise ValueError("admin_key: must differ from every API key")
        return self

    @model_validator(mode="after")
    def _open_only_locally(self) -> GatewayConfig:
        if not self.api_keys and self.host not in ("127.0.0.1", "localhost", "::1"):
            raise ValueError(
                f"api_keys: set at least one key to listen on {self.host}; without keys only loopback is allowed"
            )
        return self
