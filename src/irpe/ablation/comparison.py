"""`ablate` and `read_report`: encodings compared from Python, as `irpe ablate` does it."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from irpe.ablation.cells import Cell, plan_cells, read_result
from irpe.ablation.costs import RowCost, configs_of_rows, measure_row_costs
from irpe.ablation.executors import Executor, LocalProcesses
from irpe.ablation.folder import claim_folder, read_claim
from irpe.ablation.machine import choose_jobs, gpus
from irpe.ablation.planning import check_cells
from irpe.ablation.report import AblationReport
from irpe.ablation.rows import AblationRow, check_rows
from irpe.ablation.running import Failure, Outcome, run_cells
from irpe.ablation.statistics import collect_rows
from irpe.ablation.tuning import (
    SearchResult,
    choose_rates,
    collect_searches,
    plan_searches,
    plan_trials,
)
from irpe.ablation.worker import read_state
from irpe.errors import UserError, UserStateError
from irpe.files import write_text
from irpe.progress import Event, Listener, silent
from irpe.train.config import RunConfig, find_task, make_task
from irpe.train.run import lock_run
from irpe.train.task import AS_TRAINED

_ABOUT = "about.json"  # what the report says beside the results


class CellGroup(NamedTuple):
    """Cells that run now: the `result` of an event of `ablate`.

    Args:
        title: What their scores are.
        cells: The cells.
    """

    title: str
    cells: Sequence[Cell]


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
    base: RunConfig
    folder: Path
    seeds: int = 2
    is_tuned: bool = False
    title: str = "Ablation"
    recipe: str = "laptop"

    def __post_init__(self) -> None:
        check_rows(self.rows, self.seeds)


def ablate(
    ablation: Ablation,
    executor: Executor | None = None,
    jobs: int | None = None,
    listen: Listener = silent,
) -> AblationReport:
    """Trains and evaluates each row with each seed, writes a report, and returns it.

    The same ablation goes on where it stopped.

    Args:
        ablation: What is compared.
        executor: Runs the cells: anything with `submit` in the sense of `concurrent.futures`, such
            as a Dask client, that has processes which see the folder; `None`: this machine.
        jobs: How many cells run at a time on this machine; `None`: as many as it can.
        listen: Hears how it goes: "facts" with what will run, "costs", "cells" with each
            `CellGroup`, and the steps and the result of each cell by its name.

    Examples:
        >>> import irpe.ablation, irpe.recipes
        >>> from pathlib import Path
        >>> rows, base = irpe.ablation.default_rows(), irpe.recipes.RECIPES["laptop"]()
        >>> ablation = irpe.ablation.Ablation(rows, base, Path("runs/ablation"))
        >>> print(irpe.ablation.ablate(ablation).answer())  # doctest: +SKIP
    """
    base, folder = ablation.base.with_absolute_paths(), ablation.folder.absolute()
    task = make_task(base)
    cells = plan_cells(ablation.rows, base, ablation.seeds, folder)
    searches = plan_searches(ablation.rows, base) if ablation.is_tuned else []
    trials = plan_trials(searches, base, folder)
    facts = check_cells(cells, task, trials)
    images = task.open("train", None, silent).source, task.open("val", AS_TRAINED, silent).source
    with ExitStack() as stack:
        if executor is None:
            devices = gpus()
            chosen = choose_jobs(jobs, max(len(cells), len(trials)), len(devices))
            executor = stack.enter_context(LocalProcesses(chosen, devices))
            one = "GPU" if devices else "CPU"
            where = f"{one}, {chosen} cell{'s' * (chosen > 1)} at a time, one thread each"
        else:
            is_ours = type(executor).__str__ is not object.__str__
            where = str(executor) if is_ours else type(executor).__name__
        claim_folder(folder, ablation.rows, base, images, ablation.is_tuned)
        facts |= {"device": where, "output": str(ablation.folder)}
        listen(Event("facts", result=facts))
        stack.enter_context(lock_run(folder))
        about = _read_about(folder) or {}
        if "costs" not in about:
            listen(Event("costs"))
            costs = measure_row_costs(configs_of_rows(cells, task.config), task)
            about["costs"] = {name: asdict(cost) for name, cost in costs.items()}
        about |= {"title": ablation.title, "recipe": ablation.recipe, "facts": facts}
        write_text(folder / _ABOUT, json.dumps({**about, "seeds": ablation.seeds}, indent=1) + "\n")
        name = find_task(base.task).measures[0].name
        failures: list[str] = []
        if trials:
            group = CellGroup(f"search: {name} on held-out training images", trials)
            failures += map(str, _run(group, executor, listen).failures)
        searched = _read_searches(ablation.rows, base, folder) if trials else []
        rows = choose_rates(ablation.rows, searched)
        cells = plan_cells(rows, base, ablation.seeds, folder)
        outcome = _run(CellGroup(name, cells), executor, listen)
        if not outcome.results:
            raise UserStateError(f"all cells failed: {outcome.failures[0]}")
    report = replace(read_report(folder), failures=[*failures, *map(str, outcome.failures)])
    report.write(folder / "report")
    return report


def read_report(folder: Path | str, *others: Path | str) -> AblationReport:
    """Returns the report of an ablation that has ended, or of what it has found so far.

    Args:
        folder: Its folder.
        *others: Folders of ablations with the same settings, whose rows and seeds are added.

    Examples:
        >>> import irpe.ablation
        >>> from pathlib import Path
        >>> report = irpe.ablation.read_report(Path("runs/ablation"))  # doctest: +SKIP
        >>> pandas.DataFrame(report.table())  # doctest: +SKIP
        >>> irpe.ablation.read_report(Path("nowhere"))
        Traceback (most recent call last):
        ...
        irpe.errors.UserError: nowhere is not the folder of an ablation: it has no ablation.json
    """
    parts = [_read_folder(Path(each)) for each in (folder, *others)]
    first = parts[0]
    for path, part in zip(others, parts[1:], strict=True):
        differs = [name for name in first.settings if first.settings[name] != part.settings[name]]
        if differs:
            raise UserError(
                f"{folder} and {path} differ in {', '.join(differs)}: only ablations of the same "
                "settings can be read together"
            )
    cells: dict[str, Cell] = {}
    for part in parts:
        for cell in part.cells:
            other = cells.setdefault(cell.name, cell)
            if other.config != cell.config:
                raise UserError(
                    f"{cell.row.name} is {other.row.encoding}, {other.row.absolute} in {folder} "
                    f"and {cell.row.encoding}, {cell.row.absolute} in another folder: rename one"
                )
            if read_result(other) is None:
                cells[cell.name] = cell
    found = {name: read_result(cell) for name, cell in cells.items()}
    results = [result for result in found.values() if result is not None]
    if not results:
        raise UserError(f"no cell of {folder} has ended yet: look again later")
    missing = [cell for name, cell in cells.items() if found[name] is None]
    states = [read_state(cell) for cell in missing]
    failures = [
        str(Failure(cell, state.failure))
        for cell, state in zip(missing, states, strict=True)
        if state is not None and state.failure
    ]
    if rest := len(missing) - len(failures):
        failures.append(f"{rest} of {len(cells)} cells have not ended yet.")
    rows = list({cell.row.name: cell.row for cell in cells.values()}.values())
    costs = {name: cost for part in reversed(parts) for name, cost in part.costs.items()}
    facts = {
        **first.facts,
        **({"folders": ", ".join(map(str, (folder, *others)))} if others else {}),
    }
    searches = [search for part in parts for search in part.searches]
    return AblationReport(
        first.title, first.recipe, collect_rows(rows, results, costs), list(cells.values()), facts,
        failures, searches,
    )  # fmt: skip


class _Folder(NamedTuple):
    """What the folder of an ablation says.

    Args:
        title: The heading of its report.
        recipe: The recipe that every cell trains.
        settings: What all cells have in common.
        facts: What was run, by the name of each fact.
        costs: What the rows cost.
        cells: The cells, each row with the rates that were chosen.
        searches: The search for rates, where there was one.
    """

    title: str
    recipe: str
    settings: dict[str, Any]
    facts: dict[str, str]
    costs: dict[str, RowCost]
    cells: list[Cell]
    searches: list[SearchResult]


def _read_folder(folder: Path) -> _Folder:
    claim, folder = read_claim(folder), folder.absolute()
    about = _read_about(folder)
    if about is None:
        raise UserError(
            f"{folder} is of an ablation that has not begun, or of an older release: start the "
            "same command again"
        )
    costs = {name: RowCost(**cost) for name, cost in about["costs"].items()}
    searches = _read_searches(claim.rows, claim.base, folder) if claim.is_tuned else []
    cells = plan_cells(choose_rates(claim.rows, searches), claim.base, about["seeds"], folder)
    values = (about["title"], about["recipe"], claim.settings, about["facts"])
    return _Folder(*values, costs, cells, searches)


def _read_searches(
    rows: Sequence[AblationRow], base: RunConfig, folder: Path
) -> list[SearchResult]:
    """Returns what the trials in a folder found."""
    searches = plan_searches(rows, base)
    trials = [read_result(cell) for cell in plan_trials(searches, base, folder)]
    return collect_searches(searches, [trial for trial in trials if trial is not None])


def _read_about(folder: Path) -> dict[str, Any] | None:
    """Returns what a folder's report says beside the results, if it has begun."""
    path = folder / _ABOUT
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): remove it, and start again") from error


def _run(group: CellGroup, executor: Executor, listen: Listener) -> Outcome:
    listen(Event("cells", result=group))
    return run_cells(group.cells, executor, listen)
