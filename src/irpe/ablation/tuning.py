"""The learning rate of each row's tables, searched on held-out training images.

Tables start at zero, so how far a short training gets them depends on their rate; the best one
differs between encodings, and one rate for all would favour some. A trial is a cell that trains on
four fifths of the training images and is evaluated on the others; no test image is read.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from irpe.ablation.cells import Cell, CellResult, plan_cells
from irpe.ablation.rows import AblationRow
from irpe.errors import UserError
from irpe.train.config import RunConfig, make_task
from irpe.train.optim import rate_fields

FACTORS = (1.0, 5.0, 20.0)  # multiples of the model's rate
SEEDS = 2
HELD_OUT = 0.2  # of the training images
FACTORS_TEXT = "{:g}, {:g} or {:g}".format(*FACTORS)
_RATES = {"table_lr": "tables", "absolute_lr": "absolute encoding"}


@dataclass(frozen=True)
class Search:
    """The rate that is searched for a row, and what was found."""

    row: AblationRow
    field: str  # of the configuration: "table_lr" or "absolute_lr"
    tried: Mapping[float, Sequence[CellResult]] = dataclasses.field(
        default_factory=dict[float, Any]
    )

    def candidates(self) -> dict[float, AblationRow]:
        """Returns the row at each factor, under a name of its own."""
        names = {factor: f"{self.row.name} x{factor:g}" for factor in FACTORS}
        return {f: replace(self.row, name=names[f], rates={self.field: f}) for f in FACTORS}

    def mean(self, factor: float, shift: int = 0) -> float:
        """Returns the mean score of a factor on the held-out images."""
        return fmean(result.score(shift).value for result in self.tried[factor])

    @property
    def chosen(self) -> float | None:
        """The factor with the best mean; `None` if none has been tried with every seed."""
        complete = [factor for factor, found in self.tried.items() if len(found) == SEEDS]
        if not complete:
            return None
        higher = self.tried[complete[0]][0].scores[0].measure.higher_is_better
        return (max if higher else min)(complete, key=self.mean)

    def as_json(self) -> dict[str, Any]:
        """Returns what was tried, for json."""
        tried = [
            {"factor": factor, "seed": trial.seed,
             trial.scores[0].measure.key: [score.value for score in trial.scores]}
            for factor, of_seeds in self.tried.items() for trial in of_seeds
        ]  # fmt: skip
        return {"row": self.row.name, "rate": self.field, "chosen": self.chosen, "tried": tried}


def plan_searches(rows: Sequence[AblationRow], base: RunConfig) -> list[Search]:
    """Returns a search for each row that has something to search a rate for.

    That is the tables, or what else the encoding learns; a learned absolute encoding where there is
    no such thing. Beside tables it keeps the rate of the recipe.
    """
    found: list[Search] = []
    for row in rows:
        config = base.replace(encoding=row.encoding, absolute=row.absolute, initial=None)
        config = config if config.classes else config.replace(classes=("0", "1"))
        with torch.device("meta"):
            model = make_task(config, {}).build()
        fields = set(rate_fields(model).values())
        found += [Search(row, field) for field in _RATES if field in fields][:1]
    if not found:
        names = ", ".join(row.name for row in rows)
        raise UserError(
            f"--tune: none of the rows {names} has tables or a learned absolute encoding whose "
            "rate could be searched: leave it out"
        )
    return found


def plan_trials(searches: Sequence[Search], base: RunConfig, folder: Path) -> list[Cell]:
    """Returns the cells of all searches, one seed after the other."""
    rows = [row for search in searches for row in search.candidates().values()]
    return plan_cells(rows, base, SEEDS, folder, HELD_OUT)


def collect_searches(searches: Sequence[Search], results: Sequence[CellResult]) -> list[Search]:
    """Returns the searches with what their trials found."""
    return [
        replace(search, tried={
            factor: [result for result in results if result.row == row.name]
            for factor, row in search.candidates().items()
        })
        for search in searches
    ]  # fmt: skip


def choose_rates(rows: Sequence[AblationRow], found: Sequence[Search]) -> list[AblationRow]:
    """Returns the rows, those that were searched with their best rate."""
    rates = {each.row.name: {each.field: each.chosen} for each in found if each.chosen is not None}
    return [replace(row, rates=rates.get(row.name, row.rates)) for row in rows]


def tuning_table(found: Sequence[Search]) -> str:
    """Returns what was tried, as a table in Markdown: scores as they are / moved by 1 / by 2."""
    factors = [f"x{factor:g}" for factor in FACTORS]
    lines = [["rate of", *factors, "chosen"], ["---"] * (len(factors) + 2)]
    for search in found:
        scores = [
            " / ".join(f"{search.mean(factor, shift):.1f}" for shift in of_seeds[0].shifts)
            if of_seeds else ""
            for factor, of_seeds in search.tried.items()
        ]  # fmt: skip
        chosen = "as in the recipe" if search.chosen is None else f"x{search.chosen:g}"
        lines.append([f"{search.row.name} ({_RATES[search.field]})", *scores, chosen])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
