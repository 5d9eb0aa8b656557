"""Writes docs/configuration.md from the typed settings; run `python -m scripts.make_config_docs` after changing one."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from adaflash.config import ProcessConfig
from serving.gateway.config import GatewayConfig
from serving.worker.config import WorkerConfig
from trainer.config import TrainerConfig

OUT = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
INTRO = """# Configuration

Every process reads a TOML file (`--config FILE`), then the environment, then its command line; the later wins.
Settings without an option of their own are given as `--set name=value`, nested ones as `--set section.name=value`. An
unknown key is an error that names it. This page is generated from the typed settings.
"""


def rows(kind: type[BaseModel], prefix: str = "") -> list[str]:
    """One table row per setting, sections flattened."""
    out = []
    for name, f in kind.model_fields.items():
        if isinstance(f.annotation, type) and issubclass(f.annotation, BaseModel):
            out += rows(f.annotation, f"{prefix}{name}.")
            continue
        if f.is_required():
            default = "required"
        else:
            default = (
                "computed" if f.default is PydanticUndefined else f"`{f.default!s}`" if f.default != "" else "empty"
            )
        out.append(f"| `{prefix}{name}` | {default} | {f.description or ''} |")
    return out


def render() -> str:
    """The whole page."""
    parts = [INTRO]
    configs: list[tuple[str, type[ProcessConfig]]] = [
        ("worker", WorkerConfig),
        ("trainer", TrainerConfig),
        ("gateway", GatewayConfig),
    ]
    for command, kind in configs:
        env = kind.model_config.get("env_prefix")
        parts.append(f"## `adaflash {command}`\n\nEnvironment: `{env}<NAME>`, nested `{env}<SECTION>__<NAME>`.\n")
        parts.append("\n".join(["| setting | default | meaning |", "|---|---|---|", *rows(kind)]) + "\n")
    parts.append(
        "## Shared\n\n`REDIS_URL` is the default of every `redis_url`. `RAY_ADDRESS` makes the trainer join a Ray "
        "cluster.\n`ADAFLASH_CACHE` moves the folder of environments, models and demo runs, `~/.cache/adaflash`.\n"
    )
    return "\n".join(parts)


if __name__ == "__main__":
    OUT.write_text(render())
