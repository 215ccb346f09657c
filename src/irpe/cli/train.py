"""`irpe train`: trains a recipe, or goes on with a run."""

import difflib
import inspect
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from irpe.cli.fields import with_fields
from irpe.extras import require
from irpe.recipes.classification import RECIPES
from irpe.train.config import TrainConfig

STOPPED = 143  # what a shell reports for a program that SIGTERM ended

EPILOG = """
**Examples**

`irpe train --list` (the recipes)

`irpe train laptop --encoding product-contextual-k --absolute none`

`irpe train deit_small --data IMAGENET --encoding product-contextual-k --precision bf16`

`torchrun --nproc_per_node 8 -m irpe train deit_small --data IMAGENET` (many devices)

`irpe train --resume runs/laptop` (go on where it stopped)
"""


@with_fields()
def train(
    recipe: Annotated[str | None, typer.Argument(help="The recipe; see --list.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Directory of the run [runs/RECIPE].")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in a directory.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the recipes and exit.")] = False,
    changes: dict[str, Any] | None = None,
) -> None:
    """Train an image classifier with or without a relative position encoding."""
    if show_list:
        _print_recipes()
        return
    require("accelerate", "train")
    require("timm", "train")
    if resume is not None:
        from irpe.train.runs import read_config

        if recipe or changes or output:
            raise ValueError("--resume takes everything from the run: give nothing beside it")
        _run(read_config(resume), resume, is_new=False)
        return
    config = find_recipe(recipe).replace(**(changes or {}))
    directory = output or Path("runs") / str(recipe)
    _run(config, directory, is_new=True)


def find_recipe(name: str | None) -> TrainConfig:
    """Returns the configuration of a recipe."""
    if name is None:
        raise ValueError(f"name a recipe: {', '.join(RECIPES)}; irpe train --list tells of them")
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"recipe {name!r} is not one of {', '.join(RECIPES)}{hint}")
    return RECIPES[name]()


def _run(config: TrainConfig, directory: Path, is_new: bool) -> None:
    from irpe.cli.monitor import ProgressMonitor
    from irpe.train.classify import Classification
    from irpe.train.engine import StoppedError, fit, make_accelerator
    from irpe.train.images import open_images
    from irpe.train.runs import CHECKPOINT

    accelerator = make_accelerator(config.precision)
    is_shown = accelerator.is_main_process
    if is_new and is_shown and any(directory.glob("[!.]*")):
        raise ValueError(
            f"{directory} is not empty: go on with --resume {directory}, or choose another --output"
        )
    if (directory / CHECKPOINT).exists():
        config = config.replace(initial=None)  # the checkpoint has them
    with accelerator.local_main_process_first():  # which may fetch the data
        data = open_images(config.data, config.root, config.holdout)
    task = Classification(config, *data)
    try:
        with ProgressMonitor(is_shown) as monitor:
            fit(task, directory, monitor, accelerator)
    except StoppedError as stop:
        if is_shown:
            typer.echo(f"{stop}; go on with: irpe train --resume {directory}", err=True)
        sys.exit(STOPPED)
    if is_shown:
        typer.echo(f"trained model in {directory / 'model'}, table of epochs in metrics.csv")


def _print_recipes() -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    table.add_column("what it does, its command, cost and score")
    for name, recipe in RECIPES.items():
        table.add_row(name, inspect.getdoc(recipe) or "", end_section=True)
        table.add_row("", "")
    Console(highlight=False).print(table)
