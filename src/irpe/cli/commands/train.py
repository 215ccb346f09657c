"""`irpe train`: trains a recipe, or goes on with a run."""

import inspect
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from irpe.cli.parse import change_config, wrap
from irpe.errors import UserError, check_choice
from irpe.extras import require_installed
from irpe.recipes import RECIPES
from irpe.train.config import RUN_FILE, RunConfig

if TYPE_CHECKING:
    from irpe.train.engine import FitResult, Trainer

_WITHOUT_ENCODING = "no relative encoding: --encoding product-contextual-k would give it one"


def train(
    recipe: Annotated[str | None, "The recipe.", "RECIPE"] = None,
    *,
    output: Annotated[Path | None, "Folder of the run [runs/RECIPE].", "DIR"] = None,
    resume: Annotated[Path | None, "Go on with the run in a folder.", "DIR"] = None,
    config_file: Annotated[
        Path | None, "A configuration in place of a recipe: a run's run.json.", "FILE"
    ] = None,
    show: Annotated[bool, "Print all settings as JSON, for --config, and exit."] = False,
    device: Annotated[str, "auto, cpu, cuda or another kind of accelerator."] = "auto",
    log: Annotated[str | None, "Log to a service, too: wandb (extra wandb)."] = None,
    config: RunConfig | None = None,
    changes: dict[str, Any] | None = None,
) -> None:
    """Train a classifier, a DETR or a segmenter, with or without a relative position encoding.

    Examples:
        irpe train laptop --encoding K --absolute none
        irpe train laptop --data FOLDER --holdout 0.2 --set flip=0
        irpe train detr_small --data FOLDER --encoding product-contextual-k@2.0
        irpe train seg_small --data FOLDER --encoding K --set ignore_label=11
        torchrun --nproc_per_node 8 -m irpe train deit_small --data IMAGENET
        irpe train --resume runs/laptop
    """
    if resume is not None:
        if recipe or changes or output or config_file:
            raise UserError("--resume cannot be combined with a recipe or its settings")
        require_installed("train", "accelerate", "timm")
        from irpe.train.run import Run

        _train(Run(resume).config, resume, device, log, notes=None)
        return
    if config is None:
        raise UserError("name a recipe, such as laptop: irpe train --help lists them")
    changed, notes = change_config(config, changes or {})
    if show:
        print(changed.to_json(), end="")
        return
    if config_file is None and changed.encoding == "none" and "encoding" not in (changes or {}):
        notes.append(_WITHOUT_ENCODING)
    directory = output or Path("runs") / (recipe or _name_of(config_file))
    require_installed("train", "accelerate", "timm")
    changed.check_data()
    _check_encoding(changed.encoding)
    from irpe.train.run import Run

    Run(directory).check_free(changed)
    _train(changed, directory, device, log, notes)


def configure(
    recipe: str | None, resume: Path | None, config_file: Path | None, **_: Any
) -> tuple[RunConfig | None, str]:
    """Returns the configuration of a recipe or of a file, and what the help says of it."""
    if recipe is not None and config_file is not None and resume is None:
        raise UserError(f"--config {config_file} cannot be combined with the recipe {recipe}")
    if resume is not None or (recipe is None and config_file is None):
        return None, _list_recipes()
    if recipe is not None:
        check_choice("recipe", recipe, RECIPES)
        text = f"{recipe}: {inspect.getdoc(RECIPES[recipe])}"
        return RECIPES[recipe](), "\n".join(
            each for line in text.split("\n") for each in wrap(line) or [""]
        )
    assert config_file is not None
    from irpe.train.config import parse_config

    return parse_config(config_file.read_text(), config_file).replace(classes=()), ""


def _list_recipes() -> str:
    """Returns the help without a recipe: a line for each, those that a laptop can run first."""
    texts = {name: (inspect.getdoc(recipe) or "").splitlines() for name, recipe in RECIPES.items()}
    is_small = {name: "GPU" not in " ".join(lines) for name, lines in texts.items()}
    lines: list[str] = [*wrap((inspect.getdoc(train) or "").partition("\n")[0]), ""]
    for title, wanted in (("recipes for a laptop:", True), ("recipes for GPUs:", False)):
        lines.append(title)
        for name, text in texts.items():
            if is_small[name] == wanted:
                lines += wrap(text[0], f"  {name:<16}", " " * 18)
    return "\n".join([*lines, "", "irpe train RECIPE --help describes one, with its settings."])


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


def _train(
    config: RunConfig, directory: Path, device: str, log: str | None, notes: list[str] | None
) -> None:
    """Trains, and prints what and how well; a run that is resumed has no notes."""
    from irpe.cli.console import ProgressBar, print_lines, print_notes
    from irpe.train.engine import train as run_training
    from irpe.train.processes import StoppedError, make_accelerator

    accelerator = make_accelerator(config.precision, device, log)
    is_shown = accelerator.is_main_process
    try:
        with ProgressBar() as bar:
            begin = partial(_begin, notes=notes)
            fitted = run_training(config, directory, bar, accelerator, begin)
    except StoppedError as stop:
        if is_shown:
            print(stop, file=sys.stderr)
            print(f"go on with: irpe train --resume {shlex.quote(str(directory))}", file=sys.stderr)
        sys.exit(128 + stop.number)
    if is_shown:
        print_notes(*_warn(fitted, config))
        print_lines(*_end(fitted, config, directory))


def _warn(fitted: "FitResult", config: RunConfig) -> list[str]:
    """Returns what to say of an encoding that did next to nothing; without tables, not of them."""
    from irpe.adapters.effect import warn_of_effect
    from irpe.train.optim import learns_tables

    effect = 1.0 if fitted.effect is None else fitted.effect
    return warn_of_effect(effect, learns_tables(config.encoding))


def _end(fitted: "FitResult", config: RunConfig, directory: Path) -> list[str]:
    """Returns what was reached, where it is, and what to do next."""
    reached = "the run had ended before" if fitted.score is None else fitted.score.line()
    broken = 0 if fitted.score is None else fitted.score.num_broken
    reached += f", {broken} unreadable" if broken else ""
    shown = shlex.quote(str(directory))
    change = f"the attention's output changes by {fitted.effect or 0.0:.1%} without the encoding"
    lines = [
        *wrap(reached, "reached: ", " " * 9),
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
    from irpe.adapters.effect import warn_of_reach
    from irpe.cli.console import facts_of, print_notes
    from irpe.train.overview import describe_run

    count = sum(p.numel() for p in trainer.raw.parameters() if p.requires_grad)
    data, device = (trainer.images, trainer.val_images), trainer.accelerator.device
    facts = {**describe_run(trainer.config, *data, count, device), "output": str(trainer.run)}
    config, plan = trainer.config, trainer.plan
    said = [*(notes or []), *([] if notes is None or plan.note is None else [plan.note])]
    if config.optimizer.startswith("adam"):
        left = config.epochs * plan.steps - trainer.done
        said += warn_of_reach(trainer.raw, config.lr * config.table_lr, left)
    of_data = [note for images in data for note in images.notes]
    print("\n".join(facts_of(facts)), file=sys.stderr)
    print_notes(*said, *dict.fromkeys(of_data))
