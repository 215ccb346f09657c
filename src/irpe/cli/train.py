"""`irpe train`: trains a recipe, or goes on with a run."""

import difflib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from irpe.cli.fields import with_fields
from irpe.extras import require
from irpe.recipes import RECIPES
from irpe.train.config import ClassifierConfig, Config, DetectorConfig

C = TypeVar("C")
STOPPED = 143  # what a shell reports for a program that SIGTERM ended

EPILOG = """
**Examples**

`irpe train --list` (the recipes)

`irpe train laptop --encoding product-contextual-k --absolute none`

`irpe train deit_small --data IMAGENET --encoding product-contextual-k --precision bf16`

`torchrun --nproc_per_node 8 -m irpe train deit_small --data IMAGENET` (many devices)

`irpe train detr_small --data FOLDER --encoding product-contextual-k@2.0` (find objects)

`irpe train --resume runs/laptop` (go on where it stopped)
"""


@with_fields(ClassifierConfig, DetectorConfig)
def train(
    recipe: Annotated[str | None, typer.Argument(help="The recipe; see --list.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Directory of the run [runs/RECIPE].")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in a directory.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the recipes and exit.")] = False,
    changes: dict[str, Any] | None = None,
) -> None:
    """Train an image classifier or a DETR, with or without a relative position encoding."""
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
    config = find_recipe(recipe, RECIPES).replace(**(changes or {}))
    directory = output or Path("runs") / str(recipe)
    _run(config, directory, is_new=True)


def find_recipe(name: str | None, recipes: Mapping[str, Callable[[], C]]) -> C:
    """Returns the configuration of a recipe."""
    if name is None:
        raise ValueError(f"name a recipe: {', '.join(recipes)}; irpe train --list tells of them")
    if name not in recipes:
        near = difflib.get_close_matches(name, recipes, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"recipe {name!r} is not one of {', '.join(recipes)}{hint}")
    return recipes[name]()


def _run(config: Config, directory: Path, is_new: bool) -> None:
    from irpe.cli.monitor import ProgressMonitor
    from irpe.train.engine import StoppedError, fit, make_accelerator
    from irpe.train.runs import CHECKPOINT

    accelerator = make_accelerator(config.precision)
    is_shown = accelerator.is_main_process
    if is_new and is_shown and any(directory.glob("[!.]*")):
        raise ValueError(
            f"{directory} is not empty: go on with --resume {directory}, or choose another --output"
        )
    with accelerator.local_main_process_first():  # which may fetch data or make feature maps
        task = _open_task(config, directory / CHECKPOINT, is_shown)
    try:
        with ProgressMonitor(is_shown) as monitor:
            fit(task, directory, monitor, accelerator)
    except StoppedError as stop:
        if is_shown:
            typer.echo(f"{stop}; go on with: irpe train --resume {directory}", err=True)
        sys.exit(STOPPED)
    if is_shown:
        typer.echo(f"trained model in {directory / 'model'}, table of epochs in metrics.csv")


def _open_task(config: Config, checkpoint: Path, is_shown: bool) -> Any:
    """Returns what a configuration is to learn, with its data; a checkpoint has the weights."""
    if isinstance(config, DetectorConfig):
        require("transformers", "transformers")
        from irpe.cli.monitor import track
        from irpe.train.checkpoint import load_checkpoint
        from irpe.train.detection.task import open_detection

        weights = load_checkpoint(checkpoint)["model"] if checkpoint.exists() else None
        task = open_detection(config, track, weights)
        for split, source in {config.train_split: task.train, config.val_split: task.val}.items():
            if is_shown and source.num_dropped:
                typer.echo(f"{split}: {source.num_dropped} invalid boxes are left out", err=True)
        return task
    if checkpoint.exists():
        config = config.replace(initial=None)
    from irpe.train.classification.sources import open_images
    from irpe.train.classification.task import Classification

    return Classification(config, *open_images(config.data, config.root, config.holdout))


def _print_recipes() -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    table.add_column("what it does, its command, cost and score")
    for name, recipe in RECIPES.items():
        table.add_row(name, inspect.getdoc(recipe) or "", end_section=True)
        table.add_row("", "")
    Console(highlight=False).print(table)
