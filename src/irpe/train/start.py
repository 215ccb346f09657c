"""`train`: a run from Python, as `irpe train` makes it."""

from pathlib import Path

from accelerate import Accelerator

from irpe.progress import NO_PROGRESS, Progress
from irpe.train.checkpoint import load_checkpoint
from irpe.train.config import RunConfig
from irpe.train.engine import FitResult, fit
from irpe.train.processes import make_accelerator
from irpe.train.runs import CHECKPOINT
from irpe.train.task import Task, open_task


def train(config: RunConfig, directory: str | Path, progress: Progress = NO_PROGRESS) -> FitResult:
    """Trains a model to the end and returns it; a run that stopped goes on where it was.

    Args:
        config: What is trained: a recipe of `irpe.recipes.RECIPES`, or one changed by `replace`.
        directory: The run's directory; what it holds is described in the guide to training.
        progress: Is told how it goes.

    Examples:
        >>> import irpe.recipes, irpe.train, tempfile
        >>> config = irpe.recipes.RECIPES["laptop"]().replace(epochs=1, warmup_epochs=0)
        >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +SKIP
        ...     fitted = irpe.train.train(config, folder)
    """
    accelerator = make_accelerator(config.precision)
    task = open_run(config, Path(directory), accelerator, progress)
    return fit(task, Path(directory), accelerator, progress)


def open_run(
    config: RunConfig, directory: Path, accelerator: Accelerator, progress: Progress
) -> Task:
    """Returns the task of a run, which starts from the weights of its checkpoint if there is one.

    Args:
        config: What is trained.
        directory: The run's directory.
        accelerator: The processes; the first of a node opens the data before the others.
        progress: Is told how it goes.
    """
    checkpoint = directory / CHECKPOINT
    with accelerator.local_main_process_first():  # it may download or compute features
        weights = load_checkpoint(checkpoint)["model"] if checkpoint.exists() else None
        return open_task(config, progress, weights)
