"""`ablate`: compares encodings, from Python as `irpe ablate` does it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from irpe.ablation.cells import AblationConfig, Cell, plan_cells
from irpe.ablation.costs import measure_row_costs, tasks_of_rows
from irpe.ablation.folder import claim_folder
from irpe.ablation.planning import RunPlan, plan_runs
from irpe.ablation.report import AblationReport
from irpe.ablation.results import MEASURES
from irpe.ablation.rows import AblationRow
from irpe.ablation.running import Board, NoBoard, Outcome, run_cells
from irpe.ablation.statistics import collect_rows
from irpe.ablation.tuning import choose_rates, collect_searches, plan_searches, plan_trials
from irpe.errors import UserStateError
from irpe.progress import NO_PROGRESS, Progress
from irpe.train.locks import lock_run
from irpe.train.task import open_task


@dataclass(frozen=True)
class Ablation:
    """What is compared, and at what budget.

    Args:
        rows: The encodings: `default_rows()`, or `AblationRow` of one's own.
        base: What every run trains: a recipe of `irpe.recipes.RECIPES`, or a changed one.
        folder: Where the runs and the report are.
        seeds: How many runs each row has, with different seeds.
        is_tuned: Whether the rate of each row's tables is searched first, on held-out training
            images.
        title: The heading of the report.
        recipe: The name of the recipe, for the command that the report ends with.

    Examples:
        >>> import irpe.ablation, irpe.recipes
        >>> from pathlib import Path
        >>> rows, base = irpe.ablation.default_rows(), irpe.recipes.RECIPES["laptop"]()
        >>> ablation = irpe.ablation.Ablation(rows, base, Path("runs/ablation"), seeds=3)
    """

    rows: Sequence[AblationRow]
    base: AblationConfig
    folder: Path
    seeds: int = 2
    is_tuned: bool = False
    title: str = "Ablation"
    recipe: str = "laptop"


class Display(Protocol):
    """Shows how an ablation goes."""

    def progress(self) -> AbstractContextManager[Progress]:
        """Returns what is told how the data are opened."""
        ...

    def begin(self, facts: dict[str, str]) -> None:
        """It begins; `facts` is what will run, by the name of each fact."""
        ...

    def board(self, cells: Sequence[Cell], title: str) -> AbstractContextManager[Board]:
        """Returns what is told how cells go; `title` says what their scores are."""
        ...

    def measuring(self) -> AbstractContextManager[object]:
        """The costs are measured while this is entered."""
        ...


class NoDisplay:
    """Shows nothing."""

    def progress(self) -> AbstractContextManager[Progress]:
        """Shows nothing."""
        return nullcontext(NO_PROGRESS)

    def begin(self, facts: dict[str, str]) -> None:
        """Shows nothing."""

    def board(self, cells: Sequence[Cell], title: str) -> AbstractContextManager[Board]:
        """Shows nothing."""
        return nullcontext(NoBoard())

    def measuring(self) -> AbstractContextManager[object]:
        """Shows nothing."""
        return nullcontext()


NO_DISPLAY = NoDisplay()


def ablate(
    ablation: Ablation, jobs: int | None = None, display: Display = NO_DISPLAY
) -> AblationReport:
    """Trains and evaluates each row with each seed, writes a report, and returns it.

    The same ablation goes on where it stopped. In a script, call it below `if __name__ ==
    "__main__":`, for its cells are processes of their own.

    Args:
        ablation: What is compared.
        jobs: How many cells run at a time; `None`: as many as the machine can.
        display: Is told how it goes.

    Examples:
        >>> import irpe.ablation, irpe.recipes
        >>> from pathlib import Path
        >>> rows, base = irpe.ablation.default_rows(), irpe.recipes.RECIPES["laptop"]()
        >>> ablation = irpe.ablation.Ablation(rows, base, Path("runs/ablation"))
        >>> print(irpe.ablation.ablate(ablation).answer())  # doctest: +SKIP
    """
    base, folder = ablation.base.with_absolute_paths(), ablation.folder
    with display.progress() as progress:
        task: Any = open_task(base, progress, None)
    rows = list(ablation.rows)
    cells = plan_cells(rows, base, ablation.seeds, folder)
    searches = plan_searches(rows, base) if ablation.is_tuned else []
    trials = plan_trials(searches, base, folder)
    plan = plan_runs(cells, task, jobs, trials)
    claim_folder(folder, rows, base, (task.train, task.val), ablation.is_tuned)
    display.begin({**plan.facts, "output": str(folder)})
    score = MEASURES[base.task].name
    with lock_run(folder):
        title = f"search: {score} on held-out training images (%)"
        tried = _run_shown(trials, plan, title, display)
        searched = collect_searches(searches, tried.results)
        rows = choose_rates(rows, searched)
        cells = plan_cells(rows, base, ablation.seeds, folder)
        outcome = _run_shown(cells, plan, f"{score} (%)", display)
        if not outcome.results:
            raise UserStateError(f"all cells failed: {outcome.failures[0]}")
        with display.measuring():
            costs = measure_row_costs(tasks_of_rows(cells, task))
    found = collect_rows(rows, outcome.results, costs)
    failures = [str(failure) for failure in (*tried.failures, *outcome.failures)]
    report = AblationReport(
        ablation.title, ablation.recipe, found, cells, plan.facts, failures, searched
    )
    report.write(folder / "report")
    return report


def _run_shown(cells: Sequence[Cell], plan: RunPlan, title: str, display: Display) -> Outcome:
    if not cells:
        return Outcome()
    with display.board(cells, title) as board:
        return run_cells(cells, plan.jobs, plan.devices, board)
