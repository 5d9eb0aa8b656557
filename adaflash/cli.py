"""The `adaflash` command: one entry point per process, plus the offline tools. Heavy imports happen inside commands."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from adaflash.errors import UserError

app = typer.Typer(
    help="Online adaptation of block-diffusion drafters for LLM serving.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
drafter_app = typer.Typer(help="Make and look at drafter checkpoints.", no_args_is_help=True)
app.add_typer(drafter_app, name="drafter")

ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file with this process's settings.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any other setting as name=value; see docs/configuration.md.", metavar="NAME=VALUE"),
]


def main() -> None:
    """Runs the command; expected errors become one line on stderr and exit code 1."""
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
            out.setdefault(head, {})[tail] = value
        else:
            out[head] = value
    return out


@app.command()
def worker(
    config: ConfigFile = None,
    model: Annotated[str | None, typer.Option(help="Target: local HF directory or hub id.")] = None,
    name: Annotated[str | None, typer.Option(help="Served model name. Default: last part of the model's path.")] = None,
    versions: Annotated[Path | None, typer.Option(help="Drafter version store, shared with the trainer.")] = None,
    drafter: Annotated[Path | None, typer.Option(help="Drafter to start with while nothing is released.")] = None,
    route: Annotated[str | None, typer.Option(help="dspark (default), dflash (safe mode) or none.")] = None,
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
    given |= dict(ops_port=ops_port, dtype=dtype, redis_url=redis_url)
    Agent(load(WorkerConfig, config, **given, **settings(more))).run()


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
    versions: Annotated[Path | None, typer.Option(help="Drafter version store, shared with the workers.")] = None,
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


@app.command()
def pretrain(
    out: Annotated[Path, typer.Option(help="Directory to write the drafter to.")],
    model: Annotated[str | None, typer.Option(help="Target. Default: SmolLM2-135M-Instruct, converted once.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL with 'messages' or 'prompt'. Default: demo prompts.")
    ] = None,
    drafter: Annotated[Path | None, typer.Option(help="Drafter to start from. Default: a random one.")] = None,
    count: Annotated[int, typer.Option(help="Prompts to use.", min=2)] = 96,
    steps: Annotated[int, typer.Option(help="Optimiser steps.", min=1)] = 120,
    max_tokens: Annotated[int, typer.Option(help="Answer tokens per prompt.", min=8)] = 48,
    layers: Annotated[int, typer.Option(help="Layers of a new drafter.", min=1)] = 2,
    block: Annotated[int, typer.Option(help="Block of a new drafter.", min=2)] = 8,
    seed: Annotated[int, typer.Option(help="Seed of weights, order and demo prompts.")] = 0,
) -> None:
    """Distil a drafter offline on the target's own answers, so that serving starts with a useful one."""
    from itertools import islice

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from adaflash.pretrain import pretrain as distil
    from adaflash.pretrain import read_prompts
    from demo.model import ensure_model
    from demo.prompts import prompts as demo_prompts

    messages = read_prompts(prompts)[:count] if prompts else [p.messages for p in islice(demo_prompts(seed + 7), count)]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bars:
        tasks: dict[str, Any] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        target = model or str(ensure_model(bars.console.print))
        shape = dict(layers=layers, block=block, seed=seed)
        r = distil(target, messages, out, steps=steps, max_tokens=max_tokens, start=drafter, progress=show, **shape)
    print(
        f"{out}: replayed tau {r.tau_before:.2f} -> {r.tau_after:.2f} on {r.held_out} held-out answers, "
        f"{r.steps} steps in {r.seconds:.0f} s"
    )


@app.command("model")
def model_command() -> None:
    """Convert the demo's small LLM (SmolLM2-135M-Instruct) once and print its directory."""
    from demo.model import ensure_model

    print(ensure_model(lambda text: print(text, file=sys.stderr)))


@drafter_app.command("init")
def drafter_init(
    target: Annotated[str, typer.Option(help="Target: local HF directory or hub id.")],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    layers: Annotated[int, typer.Option(help="Drafter layers.", min=1)] = 2,
    block: Annotated[int, typer.Option(help="Slots per block, the anchor included.", min=2)] = 8,
    layer_ids: Annotated[
        str | None, typer.Option(help="Target layers to read, comma separated. Default: 5, spread.")
    ] = None,
    mask_token_id: Annotated[
        int | None, typer.Option(help="Token of undrafted slots. Default: an unused special one.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Default: the target's.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """Make a random drafter for a target, with a checked config."""
    from adaflash.bootstrap import init_drafter

    ids = [int(i) for i in layer_ids.split(",")] if layer_ids else None
    c = init_drafter(
        target, out, layers=layers, block=block, layer_ids=ids, mask_token_id=mask_token_id, dtype=dtype, seed=seed
    )
    print(f"{out}: {c.num_hidden_layers} layers, block {c.block_size}, context layers {list(c.target_layer_ids)}")


if __name__ == "__main__":
    main()
