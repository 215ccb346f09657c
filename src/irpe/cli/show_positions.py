"""Where tokens are, as `irpe show buckets` is told."""

from pathlib import Path
from typing import TYPE_CHECKING

from irpe.cli.show_common import parse_grid
from irpe.errors import UserError

if TYPE_CHECKING:
    from irpe.core.grid import Grid
    from irpe.core.places import Points
    from irpe.core.positions import Positions


def parse_positions(queries: "Grid", keys: str | None, points: Path | None) -> "Positions":
    """Returns positions of cells of the queries' grid, or of points in a file.

    Args:
        queries: The grid of the queries.
        keys: The grid of the keys, whose cells cover that of the queries; `None`: the same.
        points: A file with a row and a column on each line, in the place of both.
    """
    from irpe.core.places import PooledGrid
    from irpe.core.positions import Positions

    if points is not None:
        if keys is not None:
            raise UserError("--points cannot be combined with --keys: points are both")
        return Positions(read_points(points))
    if keys is None:
        return Positions(queries)
    cells = parse_grid(keys)
    if cells.ndim != queries.ndim:
        raise UserError(f"--keys {cells} has {cells.ndim} axes, the queries {queries.ndim}")
    sizes = zip(queries.shape, cells.shape, strict=True)
    return Positions(queries, PooledGrid(cells.shape, tuple(q / k for q, k in sizes)))


def read_points(path: Path) -> "Points":
    """Returns the points of a text file: a row and a column on each line, in patches."""
    import torch

    from irpe.core.places import Points

    if not path.is_file():
        raise UserError(f"--points {path} does not exist: pass a text file, a point on each line")
    rows: list[list[float]] = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        words = line.replace(",", " ").split()
        try:
            row, column = map(float, words)
        except ValueError:
            raise UserError(
                f"{path}, line {number}: {line[:40]!r} is not a row and a column, such as 3.5, 7"
            ) from None
        rows.append([row, column])
    if not rows:
        raise UserError(f"{path} is empty: a point on each line, a row and a column")
    return Points(torch.tensor(rows))
