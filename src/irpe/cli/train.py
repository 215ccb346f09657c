"""`irpe train`: trains a recipe, or goes on with a run."""

import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from irpe.cli.fields import with_fields
from irpe.cli.formats import format_facts
from irpe.core.choices import check_choice
from irpe.extras import require
from irpe.recipes import RECIPES
from irpe.train.config import RunConfig
from irpe.train.configs import CONFIGS
from irpe.train.detection.config import DetectorConfig

if TYPE_CHECKING:
    from irpe.train.engine import Trainer

C = TypeVar("C")
STOPPED = 143  # what a shell reports for a program that SIGTERM ended

EPILOG = """
**Examples**

`irpe train --list` (the recipes)

`irpe train laptop --encoding product-contextual-k --absolute none`

`irpe train deit_small --data IMAGENET --encoding product-contextual-k --precision bf16`

`torchrun --nproc_per_node 8 -m irpe train deit_small --data IMAGENET` (many devices)

`irpe train detr_small --data FOLDER --encoding product-contextual-k@2.0` (detect objects)

`irpe train --resume runs/laptop` (go on where it stopped)
"""


@with_fields(*CONFIGS.values())
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
            raise ValueError("--resume cannot be combined with a recipe or other options")
        _run(read_config(resume), resume, is_new=False)
        return
    config = find_recipe(recipe, RECIPES).replace(**(changes or {}))
    directory = output or Path("runs") / str(recipe)
    _run(config, directory, is_new=True)


def find_recipe(name: str | None, recipes: Mapping[str, Callable[[], C]]) -> C:
    """Returns the configuration of a recipe."""
    if name is None:
        raise ValueError(f"name a recipe: {', '.join(recipes)}; irpe train --list describes them")
    check_choice("recipe", name, recipes)
    return recipes[name]()


def _run(config: RunConfig, directory: Path, is_new: bool) -> None:
    from irpe.adapters.effect import warn_of_effect
    from irpe.cli.bars import ProgressBar
    from irpe.train.checkpoint import load_checkpoint
    from irpe.train.engine import Trainer, run_to_end
    from irpe.train.processes import make_accelerator
    from irpe.train.runs import CHECKPOINT
    from irpe.train.signals import StoppedError
    from irpe.train.task import open_task

    accelerator = make_accelerator(config.precision)
    is_shown, checkpoint = accelerator.is_main_process, directory / CHECKPOINT
    if is_new and is_shown and any(directory.glob("[!.]*")):
        raise ValueError(
            f"{directory} is not empty: go on with --resume {directory}, or choose another --output"
        )
    if isinstance(config, DetectorConfig):
        require("transformers", "transformers")
    try:
        with ProgressBar() as bar:
            with accelerator.local_main_process_first():  # it may download or compute features
                weights = load_checkpoint(checkpoint)["model"] if checkpoint.exists() else None
                task = open_task(config, bar, weights)
            trainer = Trainer(task, directory, accelerator, bar)
            for line in _begin(trainer) if is_shown else ():
                typer.echo(line, err=True)
            fitted = run_to_end(trainer)
    except StoppedError as stop:
        if is_shown:
            typer.echo(f"{stop}; go on with: irpe train --resume {directory}", err=True)
        sys.exit(STOPPED)
    if is_shown:
        for line in warn_of_effect(1.0 if fitted.effect is None else fitted.effect):
            typer.echo(line, err=True)
        typer.echo(f"trained model in {directory / 'model'}, table of epochs in metrics.csv")


def _begin(trainer: "Trainer") -> list[str]:
    """Returns what is trained, in lines, and what the user should know about the data."""
    from irpe.train.overview import describe_run

    count = sum(p.numel() for p in trainer.raw.parameters() if p.requires_grad)
    facts = describe_run(trainer.task, count, trainer.accelerator.device)
    facts["output"] = str(trainer.directory)
    return [*format_facts(facts), *trainer.task.notes]


def _print_recipes() -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    table.add_column("what it does, its command, cost and score")
    for name, recipe in RECIPES.items():
        table.add_row(name, inspect.getdoc(recipe) or "", end_section=True)
        table.add_row("", "")
    Console(highlight=False).print(table)
