"""`adaflash drafter ...`: make, look into and convert drafter checkpoints. Heavy imports happen inside commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Make, look into and convert drafter checkpoints.", no_args_is_help=True)


@app.command()
def init(
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
    length_head: Annotated[bool, typer.Option("--length-head", help="Add the length and confidence heads.")] = False,
    dtype: Annotated[str | None, typer.Option(help="Default: the target's.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """Make a random drafter for a target, with a checked config."""
    from adaflash.bootstrap import init_drafter
    from adaflash.errors import UserError

    try:
        chosen = [int(i) for i in layer_ids.split(",")] if layer_ids else None
    except ValueError:
        raise UserError(f"--layer-ids {layer_ids}: expected numbers with commas, such as 1,8,14") from None
    _check_dtype(dtype)
    c = init_drafter(
        target,
        out,
        layers=layers,
        block=block,
        layer_ids=chosen,
        mask_token_id=mask_token_id,
        length_head=length_head,
        dtype=dtype,
        seed=seed,
    )
    print(f"{out}: {c.num_hidden_layers} layers, block {c.block_size}, context layers {list(c.target_layer_ids)}")


@app.command()
def inspect(
    directory: Annotated[Path, typer.Argument(help="Drafter checkpoint, in any layout we read.")],
    target: Annotated[str | None, typer.Option(help="Check that it fits this target, too.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check a drafter and print what it is; one that cannot be used is refused with the key or tensor's name."""
    import json as to_json

    from rich.console import Console
    from rich.table import Table

    from adaflash.convert import inspect as look

    facts = look(directory, target)
    if json:
        print(to_json.dumps(facts, indent=1, default=list))
        return
    table = Table(title=str(directory), show_header=False)
    for key, value in facts.items():
        table.add_row(key, str(list(value) if isinstance(value, tuple) else value))
    Console().print(table)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Drafter checkpoint: DFlash's, AdaFlash's or ours.")],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    layout: Annotated[str, typer.Option(help="sglang (DFLASH and DSPARK), adaflash or dflash.")] = "sglang",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: the source's.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Check the fit; an embedding or head equal to the target's is dropped.")
    ] = None,
) -> None:
    """Rewrite a drafter in another layout; the tensors stay what they are."""
    from typing import cast, get_args

    from adaflash.convert import Layout
    from adaflash.convert import convert as rewrite
    from adaflash.errors import UserError

    if layout not in get_args(Layout):
        raise UserError(f"--layout {layout}: expected one of {', '.join(get_args(Layout))}")
    _check_dtype(dtype)
    c = rewrite(source, out, cast(Layout, layout), dtype=dtype, target=target)
    heads = " and ".join(n for n, has in (("length", c.length_head), ("confidence", c.confidence_head)) if has)
    print(f"{out}: {layout} layout, {c.num_hidden_layers} layers, block {c.block_size}, heads: {heads or 'none'}")


def _check_dtype(dtype: str | None) -> None:
    from adaflash.errors import UserError

    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise UserError(f"--dtype {dtype}: expected float32, bfloat16 or float16")
