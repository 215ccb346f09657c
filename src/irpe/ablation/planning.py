"""What is checked and said before an ablation starts: every row can be trained."""

from collections.abc import Sequence

from irpe.ablation.cells import Cell, task_of
from irpe.ablation.costs import configs_of_rows
from irpe.ablation.tuning import FACTORS_TEXT
from irpe.errors import UserError
from irpe.progress import silent
from irpe.train.config import RunConfig, make_task
from irpe.train.optim import build_optimizer, learns_tables
from irpe.train.overview import describe_augmentation, describe_budget, describe_data
from irpe.train.processes import make_accelerator, plan_batches
from irpe.train.task import AS_TRAINED, Task


def check_cells(cells: Sequence[Cell], task: Task, trials: Sequence[Cell] = ()) -> dict[str, str]:
    """Returns what will run, by the name of each fact, or raises an error for what cannot.

    Args:
        cells: The cells.
        task: A task with the images to train on, and those to evaluate on.
        trials: The cells of a search for rates, which run first.
    """
    accelerator = make_accelerator(cells[0].config.precision)
    if accelerator.num_processes > 1:
        raise UserError("an ablation starts processes of its own: start it without torchrun")
    train, val = task.open("train", None, silent), task.open("val", AS_TRAINED, silent)
    config: RunConfig = task.config
    counts, notes = list[int](), dict.fromkeys((*train.notes, *val.notes))
    configs = configs_of_rows(cells, config)
    for each in configs.values():
        plan, own = plan_batches(each, len(train), 1), make_task(each)
        model = own.build()
        build_optimizer(own.groups(model), each)
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
        notes |= dict.fromkeys([plan.note] if plan.note else [])
    seeds = len(cells) // len(configs)
    has_tables = any(learns_tables(each.encoding) for each in configs.values())
    rate = f"{config.table_lr:g}" if has_tables else ""
    budget = describe_budget(config, FACTORS_TEXT if trials else rate)
    facts = {
        "model": f"{config.title}, {min(counts):,} to {max(counts):,} parameters",
        "rows": ", ".join(configs),
        **describe_data(config, train, val),
        "augmentation": describe_augmentation(config),
        "budget": f"{seeds} seed{'s' * (seeds > 1)}, {budget}",
    }
    if notes:
        facts["note"] = "; ".join(notes)
    if trials:
        facts["search"] = _plan_search(trials)
    return facts


def _plan_search(trials: Sequence[Cell]) -> str:
    """Returns what is searched, in words, or raises an error if there are too few images."""
    task = task_of(trials[0])
    train, held_out = task.open("train", None, silent), task.open("val", AS_TRAINED, silent)
    try:
        plan_batches(trials[0].config, len(train), 1)
    except ValueError as error:
        raise UserError(f"--tune holds out {len(held_out)} training images: {error}") from error
    return (
        f"first {len(trials)} cells, trained on {len(train):,} training images and "
        "evaluated on the others: the rate of tables, or of a learned absolute encoding"
    )
