"""`ablate` and `read_report`: encodings compared from Python, as `irpe ablate` does it."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from irpe.ablation.cells import Cell, plan_cells, read_result, task_of
from irpe.ablation.costs import RowCost, configs_of_rows, measure_row_costs
from irpe.ablation.executors import (
    Executor,
    Failure,
    LocalProcesses,
    choose_jobs,
    gpus,
    run_cells,
)
from irpe.ablation.folder import claim_folder, read_about, read_claim, write_about
from irpe.ablation.report import AblationReport
from irpe.ablation.rows import AblationRow, check_rows
from irpe.ablation.statistics import collect_rows
from irpe.ablation.tuning import (
    FACTORS_TEXT,
    Search,
    choose_rates,
    collect_searches,
    plan_searches,
    plan_trials,
)
from irpe.ablation.worker import read_state
from irpe.errors import UserError, UserStateError
from irpe.progress import Event, Listener, silent
from irpe.train.config import RunConfig, find_task, make_task
from irpe.train.optim import build_optimizer, learns_tables
from irpe.train.overview import describe_augmentation, describe_budget, describe_data
from irpe.train.processes import make_accelerator, plan_batches
from irpe.train.run import lock_run
from irpe.train.task import AS_TRAINED, Condition, Images, Task

_BESIDE = ("images", "names of classes", "tune")  # beside the fields of a configuration


class CellGroup(NamedTuple):
    """Cells that run now: the `result` of an event of `ablate`."""

    title: str
    cells: Sequence[Cell]


class _Stored(NamedTuple):
    """What the folder of an ablation holds, beside the results of its cells.

    Args:
        settings: What all cells have in common.
        about: Title and recipe of the report, its facts, the costs of the rows, the seeds.
        cells: The cells, each row with the rates that were chosen.
        searches: The search for rates, where there was one.
    """

    settings: dict[str, Any]
    about: dict[str, Any]
    cells: list[Cell]
    searches: list[Search]


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
        sizes: Other rows and columns of the input, in pixels, that classifiers are evaluated at.

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
    sizes: Sequence[tuple[int, int]] = ()

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
    train, val = task.open("train", None, silent), task.open("val", AS_TRAINED, silent)
    facts = _check(cells, trials, task, train, val)
    for size in ablation.sizes:
        task.open("val", Condition(size=size), silent)
    with ExitStack() as stack:
        if executor is None:
            devices = gpus()
            chosen = choose_jobs(jobs, max(len(cells), len(trials)), len(devices))
            executor = stack.enter_context(LocalProcesses(chosen, devices))
        claim_folder(folder, ablation.rows, base, (train.source, val.source), ablation.is_tuned)
        is_named = type(executor).__str__ is not object.__str__
        facts["device"] = str(executor) if is_named else type(executor).__name__
        facts["output"] = str(ablation.folder)
        listen(Event("facts", result=facts))
        stack.enter_context(lock_run(folder))
        about = read_about(folder)
        if "costs" not in about:
            listen(Event("costs"))
            costs = measure_row_costs(configs_of_rows(cells, task.config), task)
            about["costs"] = {name: asdict(cost) for name, cost in costs.items()}
        about |= {"title": ablation.title, "recipe": ablation.recipe, "facts": facts}
        write_about(folder, {**about, "seeds": ablation.seeds})
        name, outcomes = task.measures[0].name, list[object]()
        rows = ablation.rows
        if trials:
            searched = f"search: {name} on held-out training images"
            listen(Event("cells", result=CellGroup(searched, trials)))
            outcomes += run_cells(trials, executor, listen)
            rows = choose_rates(rows, _read_searches(rows, base, folder))
        cells = plan_cells(rows, base, ablation.seeds, folder, sizes=ablation.sizes)
        listen(Event("cells", result=CellGroup(name, cells)))
        ended = run_cells(cells, executor, listen)
        failed = [each for each in ended if isinstance(each, Failure)]
        if len(failed) == len(ended):
            raise UserStateError(f"all cells failed: {failed[0]}")
    failures = [str(each) for each in (*outcomes, *failed) if isinstance(each, Failure)]
    report = replace(read_report(folder), failures=failures)
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
    states = [(cell, read_state(cell)) for cell in missing]
    failures = [str(Failure(cell, s.failure)) for cell, s in states if s is not None and s.failure]
    if rest := len(missing) - len(failures):
        failures.append(f"{rest} of {len(cells)} cells have not ended yet.")
    rows = list({cell.row.name: cell.row for cell in cells.values()}.values())
    costs = {n: RowCost(**c) for part in reversed(parts) for n, c in part.about["costs"].items()}
    facts: dict[str, str] = dict(first.about["facts"])
    if others:
        facts["folders"] = ", ".join(map(str, (folder, *others)))
    return AblationReport(
        first.about["title"], first.about["recipe"], collect_rows(rows, results, costs),
        list(cells.values()), facts, failures, [each for part in parts for each in part.searches],
    )  # fmt: skip


def _read_folder(directory: Path) -> _Stored:
    """Returns what the folder of an ablation holds."""
    content, about = read_claim(directory), read_about(directory)
    if not about:
        raise UserError(
            f"{directory} is of an ablation that has not begun, or of an older release: start the "
            "same command again"
        )
    rows = [AblationRow(*row) for row in content.pop("rows")]
    fields = {name: value for name, value in content.items() if name not in (*_BESIDE, "task")}
    base = find_task(content["task"]).Config(**fields, encoding="none", absolute="keep", seed=0)
    folder = directory.absolute()
    searches = _read_searches(rows, base, folder) if content.get("tune") else []
    cells = plan_cells(choose_rates(rows, searches), base, about["seeds"], folder)
    return _Stored({"tune": False, **content}, about, cells, searches)


def _read_searches(rows: Sequence[AblationRow], base: RunConfig, folder: Path) -> list[Search]:
    """Returns the searches of an ablation with what the trials in its folder found."""
    searches = plan_searches(rows, base)
    trials = [read_result(cell) for cell in plan_trials(searches, base, folder)]
    return collect_searches(searches, [trial for trial in trials if trial is not None])


def _check(
    cells: Sequence[Cell], trials: Sequence[Cell], task: Task, train: Images, val: Images
) -> dict[str, str]:
    """Returns what will run, by the name of each fact, or raises an error for what cannot."""
    if make_accelerator(cells[0].config.precision).num_processes > 1:
        raise UserError("an ablation starts processes of its own: start it without torchrun")
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
    rate = FACTORS_TEXT if trials else f"{config.table_lr:g}" if has_tables else ""
    facts = {
        "model": f"{config.title}, {min(counts):,} to {max(counts):,} parameters",
        "rows": ", ".join(configs),
        **describe_data(config, train, val),
        "augmentation": describe_augmentation(config),
        "budget": f"{seeds} seed{'s' * (seeds > 1)}, {describe_budget(config, rate)}",
    }
    if notes:
        facts["note"] = "; ".join(notes)
    if trials:
        facts["search"] = _check_trials(trials)
    return facts


def _check_trials(trials: Sequence[Cell]) -> str:
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
