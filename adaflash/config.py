"""Typed configuration of every process: TOML file, then environment, then command line; unknown keys are errors."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from adaflash.errors import UserError, one_line


class ConfigError(UserError):
    """Configuration that cannot be used; the message names the key."""


class ProcessConfig(BaseSettings):
    """Base of a process's config; `env_prefix` of the subclass names its environment variables."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_nested_delimiter="__")


class Section(BaseModel):
    """Base of a nested part of a config."""

    model_config = ConfigDict(extra="forbid", frozen=True)


C = TypeVar("C", bound=ProcessConfig)


def load(kind: type[C], file: Path | None, **given: Any) -> C:
    """Builds `kind`. `given` are command line values; None means not given. Raises ConfigError in one line."""
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = tomllib.loads(file.read_text())
        except FileNotFoundError:
            raise ConfigError(f"config file {file} does not exist") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"config file {file}: {error}") from None
    prefix = str(kind.model_config.get("env_prefix") or "")
    known = {prefix + name.upper() for name in kind.model_fields}
    for name in os.environ:
        if prefix and name.startswith(prefix) and name.split("__")[0] not in known:
            raise ConfigError(f"environment variable {name} is not a setting of {kind.__name__}")
        if name in known:
            values.pop(name.removeprefix(prefix).lower(), None)  # the environment wins over the file
    values |= {k: v for k, v in given.items() if v is not None}
    try:
        return kind(**values)
    except ValidationError as error:
        raise ConfigError(one_line(error)) from None
