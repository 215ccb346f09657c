"""What is checked and said before an ablation starts: every row can be trained."""

from collections.abc import Sequence

from accelerate import Accelerator

from irpe.ablation.cells import AblationTask, Cell, hold_out_of
from irpe.ablation.costs import tasks_of_rows
from irpe.ablation.tuning import FACTORS_TEXT, HELD_OUT
from irpe.errors import UserError
from irpe.progress import NO_PROGRESS
from irpe.train.engine import Trainer
from irpe.train.optim import learns_tables
from irpe.train.overview import describe_augmentation, describe_budget, describe_data
from irpe.train.processes import make_accelerator


def check_cells(
    cells: Sequence[Cell], task: AblationTask, trials: Sequence[Cell] = ()
) -> dict[str, str]:
    """Returns what will run, by the name of each fact, or raises an error for what cannot.

    Args:
        cells: The cells.
        task: A task with the images to train on, and those to evaluate on.
        trials: The cells of a search for rates, which run first.
    """
    accelerator = make_accelerator(cells[0].config.precision)
    if accelerator.num_processes > 1:
        raise UserError("an ablation starts processes of its own: start it without torchrun")
    tasks, directory = tasks_of_rows(cells, task), cells[0].directory
    counts, notes = list[int](), dict.fromkeys(task.notes)
    for each in tasks.values():
        trainer = Trainer(each, directory, accelerator, NO_PROGRESS)
        counts.append(sum(parameter.numel() for parameter in trainer.raw.parameters()))
        notes |= dict.fromkeys([trainer.note] if trainer.note else [])
    config, seeds = cells[0].config, len(cells) // len(tasks)
    has_tables = any(learns_tables(each.config.encoding) for each in tasks.values())
    rate = f"{config.table_lr:g}" if has_tables else ""
    budget = describe_budget(config, FACTORS_TEXT if trials else rate)
    facts = {
        "model": f"{task.model_name}, {min(counts):,} to {max(counts):,} parameters",
        "rows": ", ".join(tasks),
        **describe_data(task),
        "augmentation": describe_augmentation(config),
        "budget": f"{seeds} seed{'s' * (seeds > 1)}, {budget}",
    }
    if notes:
        facts["note"] = "; ".join(notes)
    if trials:
        facts["search"] = _plan_search(trials, task, accelerator)
    return facts


def _plan_search(trials: Sequence[Cell], task: AblationTask, accelerator: Accelerator) -> str:
    """Returns what is searched, in words, or raises an error if there are too few images."""
    held_out = hold_out_of(task, HELD_OUT)
    try:
        first = tasks_of_rows(trials[:1], held_out).popitem()[1]
        Trainer(first, trials[0].directory, accelerator, NO_PROGRESS)
    except ValueError as error:
        raise UserError(f"--tune holds out {len(held_out.val)} training images: {error}") from error
    return (
        f"first {len(trials)} cells, trained on {len(held_out.train):,} training images and "
        "evaluated on the others: the rate of tables, or of a learned absolute encoding"
    )
