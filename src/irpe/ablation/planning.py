"""What is checked and said before an ablation starts: every row can be trained, memory suffices."""

from collections.abc import Sequence
from dataclasses import dataclass

from accelerate import Accelerator

from irpe.ablation.cells import Cell
from irpe.ablation.costs import first_cells, training_memory
from irpe.ablation.machine import choose_jobs, gpus, program_memory
from irpe.ablation.tuning import FACTORS_TEXT, HELD_OUT
from irpe.progress import NO_PROGRESS
from irpe.train.classification.sources import Source, hold_out
from irpe.train.classification.task import ClassificationTask
from irpe.train.engine import Trainer
from irpe.train.overview import describe_budget, describe_data
from irpe.train.processes import make_accelerator


@dataclass(frozen=True)
class RunPlan:
    """How an ablation will run.

    Args:
        jobs: How many cells run at a time.
        devices: The GPUs, one for each job; none: the CPU.
        facts: What will run, by the name of each fact.
    """

    jobs: int
    devices: tuple[str, ...]
    facts: dict[str, str]


def plan_runs(
    cells: Sequence[Cell],
    data: tuple[Source, Source],
    jobs: int | None,
    trials: Sequence[Cell] = (),
) -> RunPlan:
    """Returns how the cells will run, or raises an error for what could not be trained.

    Args:
        cells: The cells.
        data: The images to train on, and those to evaluate on.
        jobs: How many cells shall run at a time; `None`: as many as the machine can.
        trials: The cells of a search for rates, which run first.
    """
    accelerator = make_accelerator(cells[0].config.precision)
    if accelerator.num_processes > 1:
        raise ValueError("an ablation starts processes of its own: start it without torchrun")
    first = first_cells(cells)
    tasks = [ClassificationTask(cell.config, *data) for cell in first]
    counts: list[int] = []
    for task, cell in zip(tasks, first, strict=True):
        trainer = Trainer(task, cell.directory, accelerator, NO_PROGRESS)
        counts.append(sum(parameter.numel() for parameter in trainer.raw.parameters()))
    num_images, num_classes = sum(map(len, data)), len(data[0].classes)
    need = program_memory() + max(
        training_memory(cell.config, num_classes, num_images) for cell in first
    )
    devices = tuple(gpus())
    chosen = choose_jobs(jobs, len(cells), need, len(devices))
    where = "GPU" if devices else "CPU"
    seeds = len(cells) // len(first)
    budget = describe_budget(cells[0].config, FACTORS_TEXT if trials else None)
    facts = {
        "model": f"{tasks[0].model_name}, {min(counts):,} to {max(counts):,} parameters",
        "rows": ", ".join(cell.row.name for cell in first),
        **describe_data(tasks[0]),
        "device": f"{where}, {chosen} cells at a time, one thread each",
        "budget": f"{seeds} seed{'s' * (seeds > 1)}, {budget}",
    }
    if trials:
        facts["search"] = _plan_search(trials, data[0], accelerator)
    return RunPlan(chosen, devices, facts)


def _plan_search(trials: Sequence[Cell], images: Source, accelerator: Accelerator) -> str:
    """Returns what is searched, in words, or raises an error if there are too few images."""
    train, held_out = hold_out(images, HELD_OUT)
    try:
        task = ClassificationTask(trials[0].config, train, held_out)
        Trainer(task, trials[0].directory, accelerator, NO_PROGRESS)
    except ValueError as error:
        raise ValueError(f"--tune holds out {len(held_out)} training images: {error}") from error
    return (
        f"first {len(trials)} cells, trained on {len(train):,} training images and evaluated on "
        "the others: the rate of tables, or of a learned absolute encoding"
    )
