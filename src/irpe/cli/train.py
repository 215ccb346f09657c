"""`irpe train`: trains a recipe, or goes on with a run."""

import inspect
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from irpe.cli.bars import format_results
from irpe.cli.devices import RUN_PANEL, Device, Threads, use_threads
from irpe.cli.fields import change_config, with_fields
from irpe.cli.formats import format_facts, wrap
from irpe.cli.outputs import check_output
from irpe.core.choices import check_choice
from irpe.errors import UserError
from irpe.extras import require_installed
from irpe.recipes import RECIPES
from irpe.tasks.detect.config import DetectorConfig
from irpe.train.config import RUN_FILE, RunConfig, find_run_file
from irpe.train.configs import CONFIGS

if TYPE_CHECKING:
    from irpe.train.engine import FitResult, Trainer

C = TypeVar("C")
_WITHOUT_ENCODING = "no relative encoding: --encoding product-contextual-k would give it one"

EPILOG = """
**Examples**

`irpe train --list` (the recipes)

`irpe train laptop --encoding product-contextual-k --absolute none`

`irpe train deit_small --data IMAGENET --encoding product-contextual-k --precision bf16`

`torchrun --nproc_per_node 8 -m irpe train deit_small --data IMAGENET` (many devices)

`irpe train detr_small --data FOLDER --encoding product-contextual-k@2.0` (detect objects)

`irpe train seg_small --data FOLDER --encoding product-contextual-k` (a class for each pixel)

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
    show_settings: Annotated[
        bool, typer.Option("--show", help="Print all settings as JSON, for --config, and exit.")
    ] = False,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="A configuration in place of a recipe: a run's run.json.",
            rich_help_panel=RUN_PANEL,
        ),
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
    log: Annotated[
        str | None,
        typer.Option(
            help="Log to a service, too: wandb (needs the extra wandb).", rich_help_panel=RUN_PANEL
        ),
    ] = None,
    changes: dict[str, Any] | None = None,
) -> None:
    """Train a classifier, a DETR or a segmenter, with or without a relative position encoding."""
    if show_list:
        _print_recipes()
        return
    if show_settings:
        typer.echo(_configure(recipe, config_file, changes or {})[0].to_json(), nl=False)
        return
    if resume is not None:
        if recipe or changes or output or config_file:
            raise UserError("--resume cannot be combined with a recipe or its settings")
        find_run_file(resume)
        require_installed("train", "accelerate", "timm")
        from irpe.train.runs import read_config

        use_threads(threads)
        _run(read_config(resume), resume, device, log, notes=None)
        return
    config, notes = _configure(recipe, config_file, changes or {})
    directory = output or Path("runs") / (recipe or _name_of(config_file))
    require_installed("train", "accelerate", "timm")
    from irpe.train.data_check import check_data

    check_data(config)
    _check_encoding(config.encoding)
    check_output(directory, config)
    use_threads(threads)
    _run(config, directory, device, log, notes)


def _configure(
    recipe: str | None, file: Path | None, changes: dict[str, Any]
) -> tuple[RunConfig, list[str]]:
    """Returns the settings of a recipe or of a file, with those that were given, and notes."""
    if file is None:
        config, notes = change_config(find_recipe(recipe, RECIPES), changes)
        has_none = config.encoding == "none" and "encoding" not in changes
        return config, [*notes, *([_WITHOUT_ENCODING] if has_none else [])]
    if recipe is not None:
        raise UserError(f"--config {file} cannot be combined with the recipe {recipe}")
    from irpe.train.task import parse_config

    try:
        config = parse_config(file.read_text(), file)
    except ValueError as error:
        raise UserError(f"{file}: {error}") from error
    return change_config(config.replace(classes=()), changes)


def _check_encoding(text: str) -> None:
    """Raises an error for a text that is not an encoding; torch is not needed to see none."""
    if text != "none":
        from irpe.core.encodings import parse_encoding

        parse_encoding(text)


def _name_of(file: Path | None) -> str:
    """Returns what a run is called whose configuration is in a file: run.json is in a run."""
    if file is None or file.name == RUN_FILE:
        return file.parent.resolve().name if file else ""
    return file.stem


def find_recipe(name: str | None, recipes: Mapping[str, Callable[[], C]]) -> C:
    """Returns the configuration of a recipe."""
    if name is None:
        raise UserError("name a recipe, such as laptop: irpe train --list describes all")
    check_choice("recipe", name, recipes)
    return recipes[name]()


def _run(
    config: RunConfig, directory: Path, device: str, log: str | None, notes: list[str] | None
) -> None:
    """Trains, and prints what and how well; a run that is resumed has no notes."""
    from irpe.cli.bars import ProgressBar
    from irpe.train.engine import Trainer, run_to_end
    from irpe.train.processes import make_accelerator
    from irpe.train.signals import StoppedError
    from irpe.train.start import open_run

    accelerator = make_accelerator(config.precision, device, log)
    is_shown = accelerator.is_main_process
    if isinstance(config, DetectorConfig):
        require_installed("transformers", "transformers")
    try:
        with ProgressBar() as bar:
            task = open_run(config, directory, accelerator, bar)
            trainer = Trainer(task, directory, accelerator, bar)
            fitted = run_to_end(trainer, partial(_begin, trainer, notes) if is_shown else None)
    except StoppedError as stop:
        if is_shown:
            typer.echo(str(stop), err=True)
            typer.echo(f"go on with: irpe train --resume {shlex.quote(str(directory))}", err=True)
        sys.exit(128 + stop.number)
    if is_shown:
        for line in _warn(fitted, config):
            typer.echo(line, err=True)
        typer.echo("\n".join(_end(fitted, trainer.config, directory)))


def _warn(fitted: "FitResult", config: RunConfig) -> list[str]:
    """Returns what to say of an encoding that did next to nothing; without tables, not of them."""
    from irpe.adapters.effect import warn_of_effect
    from irpe.train.optim import learns_tables

    effect = 1.0 if fitted.effect is None else fitted.effect
    warnings = warn_of_effect(effect, learns_tables(config.encoding))
    return [line for warning in warnings for line in wrap(warning)]


def _end(fitted: "FitResult", config: RunConfig, directory: Path) -> list[str]:
    """Returns what was reached, where it is, and what to do next."""
    from irpe.tasks.classify.scores import TOP

    scores = {} if fitted.score is None else fitted.score.row()
    if len(config.classes) <= TOP:
        scores.pop("top5", None)
    shown = shlex.quote(str(directory))
    change = f"the attention's output changes by {fitted.effect or 0.0:.1%} without the encoding"
    lines = [
        *(wrap(format_results(scores), "reached: ", " " * 9) or ["the run had ended before"]),
        *([] if fitted.effect is None else [f"effect: {change}"]),
        f"model: {directory / 'model'}",
        f"table of epochs: {directory / 'metrics.csv'}",
        f"next: irpe eval {shown}",
    ]
    if config.encoding != "none":
        lines.append(f"      irpe show weights {shown}")
    return lines


def _begin(trainer: "Trainer", notes: list[str] | None) -> None:
    """Prints what is trained, and what the user should know about the data."""
    from irpe.train.overview import describe_run

    count = sum(p.numel() for p in trainer.raw.parameters() if p.requires_grad)
    facts = describe_run(trainer.task, count, trainer.accelerator.device)
    facts["output"] = str(trainer.directory)
    of_steps = [] if notes is None or trainer.note is None else [trainer.note]
    said = [
        line for note in (*(notes or []), *of_steps, *trainer.task.notes) for line in wrap(note)
    ]
    typer.echo("\n".join([*format_facts(facts), *said]), err=True)


def _print_recipes() -> None:
    """Prints a line for each recipe, those that a laptop can run first."""
    texts = {name: (inspect.getdoc(recipe) or "").splitlines() for name, recipe in RECIPES.items()}
    is_small = {name: "GPU" not in " ".join(lines) for name, lines in texts.items()}
    for title, wanted in (("For a laptop", True), ("For GPUs", False)):
        typer.echo(f"{title}:")
        table = Table(box=None, show_header=False)
        table.add_column(no_wrap=True)
        for name, lines in texts.items():
            if is_small[name] == wanted:
                table.add_row(name, lines[0])
        Console(highlight=False).print(table)
    typer.echo("irpe train RECIPE --show prints the settings of one.")
