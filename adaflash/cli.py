"""The `adaflash` command: one entry point per process, plus the offline tools. Heavy imports happen inside commands."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from adaflash import cli_drafter, cli_offline, cli_release, cli_versions
from adaflash.errors import UserError

app = typer.Typer(
    help="Online adaptation of block-diffusion drafters for LLM serving.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(cli_drafter.app, name="drafter")
app.add_typer(cli_versions.app, name="versions")
app.command()(cli_offline.pretrain)
app.command("fit-length-head")(cli_offline.fit_length_head)
app.command("eval")(cli_offline.eval_command)
app.command()(cli_offline.rollouts)
app.command()(cli_release.status)
app.command()(cli_release.events)
for _verb, _command in cli_release.VERBS.items():
    app.command(_verb)(_command)

ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file with this process's settings.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any other setting as name=value; see docs/configuration.md.", metavar="NAME=VALUE"),
]


def main() -> None:
    """Runs the command; expected errors become one line on stderr and exit code 1."""
    # Explicitly: a shell that starts a command in the background leaves SIGINT ignored, and no Ctrl-C would end it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log_format = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=log_format, stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        app()
    except UserError as error:
        print(f"adaflash: {error}", file=sys.stderr)
        sys.exit(1)


def settings(pairs: list[str] | None) -> dict[str, Any]:
    """`--set` pairs as keyword arguments."""
    out: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"--set {pair}: expected NAME=VALUE")
        head, dot, tail = name.strip().replace("-", "_").partition(".")
        if dot:
            out.setdefault(head, {})[tail] = _value(pair, value)
        else:
            out[head] = _value(pair, value)
    return out


def _value(pair: str, text: str) -> Any:
    """Lists are written as in JSON; everything else is converted by the setting's own type."""
    if not text.startswith("["):
        return text
    try:
        return json.loads(text)
    except ValueError:
        raise UserError(f"--set {pair}: expected a JSON list") from None


@app.command()
def worker(
    config: ConfigFile = None,
    model: Annotated[str | None, typer.Option(help="Target: local HF directory or hub id.")] = None,
    name: Annotated[str | None, typer.Option(help="Served model name. Default: last part of the model's path.")] = None,
    versions: Annotated[str | None, typer.Option(help="Version store, shared with the trainer: folder or URL.")] = None,
    drafter: Annotated[Path | None, typer.Option(help="Drafter to start with while nothing is released.")] = None,
    route: Annotated[str | None, typer.Option(help="dspark (default), dflash (safe mode) or none.")] = None,
    verify: Annotated[str | None, typer.Option(help="static (default), shadow or adaptive verify lengths.")] = None,
    cost_table: Annotated[Path | None, typer.Option(help="From adaflash profile-verify, for adaptive.")] = None,
    host: Annotated[str | None, typer.Option(help="Address the engine listens on.")] = None,
    port: Annotated[int | None, typer.Option(help="Engine port.")] = None,
    ops_port: Annotated[int | None, typer.Option(help="Port of the agent's /metrics, /healthz, /readyz.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    redis_url: Annotated[str | None, typer.Option(help="Redis. Default: $REDIS_URL or the local one.")] = None,
    more: Set = None,
) -> None:
    """Serve a target with its drafter on stock SGLang, log rollouts, follow released drafter versions."""
    from adaflash.config import load
    from serving.worker.agent import Agent
    from serving.worker.config import WorkerConfig

    given = dict(model=model, name=name, versions=versions, drafter=drafter, route=route, host=host, port=port)
    given |= dict(ops_port=ops_port, dtype=dtype, redis_url=redis_url, verify=verify, cost_table=cost_table)
    Agent(load(WorkerConfig, config, **given, **settings(more))).run()


@app.command("profile-verify")
def profile_verify(
    out: Annotated[Path, typer.Option(help="Cost table to write, for the worker's --cost-table.")],
    config: ConfigFile = None,
    model: Annotated[str | None, typer.Option(help="Target: local HF directory or hub id.")] = None,
    drafter: Annotated[
        Path | None, typer.Option(help="Drafter whose shape counts. Default: --layers, --block.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Drafter layers, without --drafter.", min=1)] = 2,
    block: Annotated[int, typer.Option(help="Slots per block, without --drafter.", min=2)] = 8,
    requests: Annotated[
        str | None,
        typer.Option(
            help="Batch sizes to measure, comma separated. Default: powers of two up to max_running_requests."
        ),
    ] = None,
    context: Annotated[int, typer.Option(help="Prompt tokens per request.", min=1)] = 128,
    steps: Annotated[int, typer.Option(help="Steps counted per cell and pass.", min=2)] = 12,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    more: Set = None,
) -> None:
    """Measure what verify steps cost on this machine, for adaptive lengths. Takes the worker's settings; minutes."""
    from adaflash.bootstrap import drafter_config
    from adaflash.cli_offline import progress_bars
    from adaflash.config import load
    from serving.worker.config import WorkerConfig
    from serving.worker.profile import profile

    c = load(WorkerConfig, config, model=model, dtype=dtype, **settings(more))
    most = c.max_running_requests
    try:
        batches = (
            [int(r) for r in requests.split(",")] if requests else [*(2**k for k in range(9) if 2**k < most), most]
        )
    except ValueError:
        raise UserError(f"--requests {requests}: expected numbers with commas, such as 1,4,16") from None
    shape = drafter or drafter_config(c.model, layers=layers, block=block)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from None
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        raise UserError(f"--out {out}: not a file that can be written")  # better now than after minutes of measuring
    with progress_bars() as show:
        table = profile(c, shape, requests=batches, context=context, steps=steps, progress=show)
    table.save(out)
    print(f"{out}: block {table.block_size} on {table.machine}; milliseconds of a step")
    shares = " ".join(f"{f:>6.0%}" for f in table.fractions)
    print(f"  requests  plain  slots verified: {shares}")
    for r, plain, row in zip(table.requests, table.plain_seconds, table.seconds, strict=True):
        print(f"  {r:8} {plain * 1e3:6.1f}{' ' * 18}" + " ".join(f"{s * 1e3:6.1f}" for s in row))


@app.command()
def gateway(
    config: ConfigFile = None,
    name: Annotated[str | None, typer.Option(help="Served model name: whose workers to use.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; other than loopback needs API keys.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    redis_url: Annotated[str | None, typer.Option(help="Redis. Default: $REDIS_URL or the local one.")] = None,
    more: Set = None,
) -> None:
    """OpenAI-compatible front of the workers. API keys: $ADAFLASH_GATEWAY_API_KEYS='["key", ...]'."""
    from adaflash.config import load
    from serving.gateway.app import run
    from serving.gateway.config import GatewayConfig

    run(load(GatewayConfig, config, name=name, host=host, port=port, redis_url=redis_url, **settings(more)))


@app.command()
def trainer(
    config: ConfigFile = None,
    model: Annotated[str | None, typer.Option(help="Target: local HF directory or hub id.")] = None,
    name: Annotated[str | None, typer.Option(help="Served model name. Default: last part of the model's path.")] = None,
    versions: Annotated[str | None, typer.Option(help="Version store, shared with the workers: folder or URL.")] = None,
    drafter: Annotated[Path | None, typer.Option(help="Drafter to start from when nothing is released yet.")] = None,
    state: Annotated[Path | None, typer.Option(help="Folder of the trainer's own durable state.")] = None,
    ops_port: Annotated[int | None, typer.Option(help="Port of /metrics, /healthz, /readyz.")] = None,
    redis_url: Annotated[str | None, typer.Option(help="Redis. Default: $REDIS_URL or the local one.")] = None,
    more: Set = None,
) -> None:
    """Distil the drafter on logged rollouts and release better versions. $RAY_ADDRESS joins an existing Ray cluster."""
    from adaflash.config import load
    from trainer.config import TrainerConfig
    from trainer.loop import run

    given = dict(
        model=model, name=name, versions=versions, drafter=drafter, state=state, ops_port=ops_port, redis_url=redis_url
    )
    run(load(TrainerConfig, config, **given, **settings(more)))


@app.command()
def demo(
    minutes: Annotated[float, typer.Option(help="Bound on the whole run.", min=4)] = 12,
    model: Annotated[str | None, typer.Option(help="Target. Default: SmolLM2-135M-Instruct, converted once.")] = None,
    warm: Annotated[
        Path | None, typer.Option(help="Start from this drafter (see adaflash pretrain) instead of a random one.")
    ] = None,
    clients: Annotated[int, typer.Option(help="Concurrent clients.", min=1)] = 6,
    max_tokens: Annotated[int, typer.Option(help="Output tokens per request.", min=8)] = 48,
    json: Annotated[Path | None, typer.Option(help="Write the summary here.")] = None,
    plot: Annotated[Path, typer.Option(help="Write the plot here.")] = Path("build/demo.png"),
    seed: Annotated[int, typer.Option(help="Seed of prompts and weights.")] = 0,
) -> None:
    """The closed loop on this machine: serve, log, distil, swap, show acceptance rise. $REDIS_URL uses a real Redis."""
    from demo.run import Options, run

    run(Options(minutes, model, warm, clients, max_tokens, json, plot, seed))


@app.command("model")
def model_command() -> None:
    """Convert the demo's small LLM (SmolLM2-135M-Instruct) once and print its directory."""
    from demo.model import ensure_model

    print(ensure_model(lambda text: print(text, file=sys.stderr)))


if __name__ == "__main__":
    main()
