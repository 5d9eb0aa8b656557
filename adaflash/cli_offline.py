"""The offline commands: pretrain, fit-length-head, eval, rollouts. Heavy imports happen inside commands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

Model = Annotated[str | None, typer.Option(help="Target. Default: SmolLM2-135M-Instruct, converted once.")]
Samples = Annotated[Path, typer.Option(help="JSONL with 'prompt_ids' and 'output_ids' (see adaflash rollouts).")]
Restart = Annotated[bool, typer.Option("--restart", help="Discard what an earlier run for --out left behind.")]


@contextlib.contextmanager
def progress_bars() -> Iterator[Any]:
    """Yields `show(what, done, total)`, which draws one bar per `what`, and the console."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bars:
        tasks: dict[str, Any] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        show.console = bars.console  # type: ignore[attr-defined]
        yield show


def _target(model: str | None, show: Any) -> str:
    from demo.model import ensure_model

    return model or str(ensure_model(show.console.print))


def pretrain(
    out: Annotated[Path, typer.Option(help="Directory to write the drafter to.")],
    model: Model = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL with 'messages' or 'prompt', and 'domain' if you like. Default: demo prompts."),
    ] = None,
    regenerate: Annotated[
        bool, typer.Option("--regenerate", help="Let the target answer also where the file has a response.")
    ] = False,
    drafter: Annotated[Path | None, typer.Option(help="Drafter to start from. Default: a random one.")] = None,
    count: Annotated[int, typer.Option(help="Conversations to use.", min=2)] = 96,
    steps: Annotated[int, typer.Option(help="Optimiser steps.", min=1)] = 120,
    max_tokens: Annotated[int, typer.Option(help="Response tokens per conversation.", min=8)] = 48,
    layers: Annotated[int, typer.Option(help="Layers of a new drafter.", min=1)] = 2,
    block: Annotated[int, typer.Option(help="Block of a new drafter.", min=2)] = 8,
    length_head: Annotated[bool, typer.Option("--length-head", help="Give a new drafter its length heads.")] = False,
    loss: Annotated[str | None, typer.Option(help="adaflash, dflash, sft, dpace, tv or draft_opd.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, order and demo prompts.")] = 0,
    restart: Restart = False,
) -> None:
    """Distil a drafter offline, so that serving starts with a useful one; run it again to go on where it stopped."""
    import shutil
    from itertools import islice

    from pydantic import ValidationError

    from adaflash.distill import DistillConfig
    from adaflash.errors import UserError, one_line
    from adaflash.pretrain import PretrainOptions, work_folder
    from adaflash.pretrain import pretrain as distil
    from adaflash.samples import Conversation, read_conversations
    from demo.prompts import prompts as demo_prompts

    if prompts:
        found = read_conversations(prompts)[:count]
        found = [c.question() for c in found] if regenerate else found
    else:
        found = [Conversation(p.messages, p.domain) for p in islice(demo_prompts(seed + 7), count)]
    try:
        config = DistillConfig(**({"loss": loss} if loss else {}))
    except ValidationError as error:
        raise UserError(one_line(error)) from None
    if restart:
        shutil.rmtree(work_folder(out), ignore_errors=True)
    with progress_bars() as show:
        options = PretrainOptions(
            _target(model, show), steps, max_tokens, str(drafter or ""), layers, block, seed, length_head, config
        )
        r = distil(options, found, out, show)
    gone_on = f"went on at step {r.resumed_at}; " if r.resumed_at else ""
    skipped = f", {r.skipped} unusable" if r.skipped else ""
    print(
        f"{out}: {gone_on}replayed tau {r.before.tau:.2f} -> {r.after.tau:.2f} on {len(r.domains)} held-out samples"
        f"{skipped}, {r.steps} steps, {r.seconds:.0f} s"
    )
    for domain, tau in r.after.by(r.domains).items():
        print(f"  {domain}: tau {tau:.2f}")


def fit_length_head(
    drafter: Annotated[Path, typer.Option(help="Drafter to give heads to, or whose heads to refit.")],
    out: Annotated[Path, typer.Option(help="Directory to write; may be the drafter's own.")],
    samples: Samples,
    model: Model = None,
    count: Annotated[int, typer.Option(help="Samples to use; their features are held in memory.", min=2)] = 256,
    steps: Annotated[int, typer.Option(help="Optimiser steps.", min=1)] = 300,
    rate: Annotated[float, typer.Option(help="AdamW learning rate.", min=0)] = 1e-3,
    seed: Annotated[int, typer.Option(help="Seed of order and anchors.")] = 0,
    restart: Restart = False,
) -> None:
    """Fit and calibrate the length and confidence heads on samples of current traffic; the drafter itself stays."""
    from adaflash.bootstrap import target_dtype
    from adaflash.checkpoint import checkpoint_dtype, load_drafter, save_drafter
    from adaflash.fit_heads import LEAST_SURVIVAL, RATE, fit_heads, with_heads
    from adaflash.pretrain import LONGEST
    from adaflash.samples import featurize, read_samples
    from adaflash.target import Target, target_shape

    half_done = out.absolute().with_name(out.absolute().name + ".fitting")
    if restart:
        half_done.unlink(missing_ok=True)
    fitted = with_heads(load_drafter(drafter), seed)
    with progress_bars() as show:
        path = _target(model, show)
        fitted.config.check_target(target_shape(path))
        found, skipped = read_samples(samples, target_shape(path).vocab_size, LONGEST)
        target = Target(path, fitted.config.target_layer_ids, target_dtype(path))
        features = featurize(target, found[:count], LONGEST, show)
        fitted.to(target.device)
        half_done.parent.mkdir(parents=True, exist_ok=True)
        r = fit_heads(fitted, target, features, half_done, steps=steps, rate=rate, seed=seed, progress=show)
    save_drafter(fitted, out, checkpoint_dtype(drafter))
    half_done.unlink(missing_ok=True)
    print(f"{out}: calibration error {r.error_before:.3f} -> {r.error_after:.3f} on held-out samples")
    if skipped:
        print("  unusable samples: " + ", ".join(f"{n} {reason}" for reason, n in sorted(skipped.items())))
    rules = {
        "everything verified": r.static,
        f"length head, rate {RATE}": r.by_length,
        f"survival of at least {LEAST_SURVIVAL}": r.by_survival,
    }
    for rule, a in rules.items():
        print(f"  {rule + ':':28} {a.verified:.2f} rows a step, tau {a.tau:.2f}")


def eval_command(
    drafter: Annotated[list[Path], typer.Option(help="Drafter directory; give it several times to compare.")],
    samples: Samples,
    model: Model = None,
    count: Annotated[int, typer.Option(help="Samples to use.", min=1)] = 64,
    bucket: Annotated[int, typer.Option(help="Output tokens per position bucket.", min=1)] = 32,
    png: Annotated[Path | None, typer.Option(help="Write the plot here.")] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the results here; known results in it are not measured again.")
    ] = None,
) -> None:
    """Replay stored samples: the acceptance length that each drafter would reach, by domain, slot and position."""
    from rich.console import Console

    from adaflash.evaluate import evaluate, plot, table
    from adaflash.pretrain import LONGEST
    from adaflash.samples import read_samples
    from adaflash.target import target_shape

    with progress_bars() as show:
        path = _target(model, show)
        found, skipped = read_samples(samples, target_shape(path).vocab_size, LONGEST)
        rows = evaluate(path, drafter, found[:count], json, bucket=bucket, longest=LONGEST, progress=show)
    Console().print(table(rows))
    print(f"{min(count, len(found))} samples" + "".join(f", {n} {reason}" for reason, n in sorted(skipped.items())))
    if png is not None:
        plot(rows, png)
        print(f"plot: {png}")


def rollouts(
    name: Annotated[str, typer.Option(help="Served model name whose rollouts to read.")],
    out: Annotated[Path, typer.Option(help="JSONL file to write.")],
    count: Annotated[int, typer.Option(help="Newest rollouts to take.", min=1)] = 256,
    redis_url: Annotated[str | None, typer.Option(help="Redis. Default: $REDIS_URL or the local one.")] = None,
) -> None:
    """Save the newest logged rollouts as samples for eval and fit-length-head. Token ids only."""
    from adaflash.connect import require, url_from_environment
    from adaflash.export import export

    written, skipped = export(require(redis_url or url_from_environment()), name, out, count)
    print(f"{out}: {written} rollouts" + (f", {skipped} unreadable" if skipped else ""))
