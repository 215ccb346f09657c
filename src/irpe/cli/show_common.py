"""What the commands of `irpe show` share."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from irpe.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from irpe.core.grid import Grid

Output = Annotated[
    Path, typer.Option("-o", "--output", metavar="FILE", help="The picture, .png or .svg.")
]

Labels = Annotated[
    list[str] | None,
    typer.Option(help="Name of a group; repeat it for each, in order [their encodings]."),
]

_CELL = re.compile(r"(.+)-\d+-[0-9a-f]{8}")  # the folder of an ablation's run: row, seed, key


def parse_patch(text: str) -> tuple[int, int]:
    """Returns the row and column in a text such as "3,5"."""
    try:
        row, column = (int(number) for number in text.split(","))
    except ValueError:
        raise UserError(f"patch {text!r} is not understood: write row,column, 3,5") from None
    return row, column


def parse_grid(text: str) -> "Grid":
    """Returns the grid in a text such as "7x28"."""
    from irpe.core.grid import Grid

    try:
        return Grid(tuple(int(size) for size in text.split("x")))
    except ValueError:
        raise UserError(f"grid {text!r} is not understood: write rows x columns, 7x28") from None


def label_of(run: Path) -> str:
    """Returns the name of a run: that of its row if it is one of an ablation, without the seed."""
    try:
        return str(json.loads((run / "result.json").read_text())["row"])
    except (OSError, ValueError, KeyError, TypeError):
        unfinished = _CELL.fullmatch(run.resolve().name)
        return unfinished[1] if unfinished else run.resolve().name


def write_figure(figure: "Figure", output: Path) -> None:
    """Writes a figure, and says so."""
    from irpe.viz import save_figure

    typer.echo(f"wrote {save_figure(figure, output)}")


def describe_runs(
    runs: Sequence[Any], labels: Sequence[str], scores: Callable[[int, Any], dict[str, Any]]
) -> str:
    """Returns the content of the JSON file beside a picture of runs, an entry for each.

    Args:
        runs: The runs, with their configurations and images.
        labels: The name of each one's group.
        scores: Returns the rest of an entry, from the index of a run and the run.
    """
    entries = [
        {
            "path": str(run.path),
            "label": label,
            "seed": run.config.seed,
            "data": run.config.data,
            "num_images": len(run.source),
            **scores(index, run),
        }
        for index, (run, label) in enumerate(zip(runs, labels, strict=True))
    ]
    return json.dumps({"runs": entries}, indent=2) + "\n"
