"""What the commands of `irpe show` share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Output = Annotated[Path, typer.Option("-o", "--output", help="The file, .png or .svg.")]


def parse_patch(text: str) -> tuple[int, int]:
    """Returns the row and column in a text such as "3,5"."""
    try:
        row, column = (int(number) for number in text.split(","))
    except ValueError:
        raise ValueError(f"patch {text!r} is not understood: write row,column, 3,5") from None
    return row, column


def write_figure(figure: "Figure", output: Path) -> None:
    """Writes a figure, and says so."""
    from irpe.viz import save_figure

    typer.echo(f"wrote {save_figure(figure, output)}")
