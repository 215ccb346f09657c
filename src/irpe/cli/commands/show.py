"""`irpe show`, what it draws of encodings: figures of the paper, written to files."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from irpe.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from irpe.core.grid import Grid
    from irpe.core.positions import Positions
    from irpe.core.token_sets import Points

_MOST_BUCKETS = 2**53
_PICTURE = "The picture, .png or .svg."


def index(
    *,
    index: Annotated[str, "RATIO or ALPHA:BETA:GAMMA of the piecewise function.", "INDEX"] = "4",
    clip: Annotated[float | None, "Beta of the clip function [as many buckets].", "BETA"] = None,
    output: Annotated[Path, _PICTURE, "FILE"] = Path("index.png"),
) -> None:
    """From distance to bucket: piecewise and clip function (Fig. 2).

    Examples:
        irpe show index --index 1.9:3.8:15.2 -o index.svg
    """
    from irpe.core.index import Clip, Piecewise, parse_index
    from irpe.viz import plot_index

    function = parse_index(index)
    if not isinstance(function, Piecewise):
        raise UserError(f"index {index!r} is not a piecewise function: pass it with --clip")
    write_figure(plot_index(function, None if clip is None else Clip(clip)), output)


def buckets(
    specs: Annotated[list[str] | None, "Encodings [the four methods].", "ENCODING"] = None,
    *,
    grid: Annotated[str, "The grid of patches.", "ROWSxCOLUMNS"] = "14x14",
    at: Annotated[
        list[str] | None, "A reference patch; repeat it [corner and centre].", "ROW,COLUMN"
    ] = None,
    keys: Annotated[
        str | None, "The grid of the keys, whose cells cover --grid.", "ROWSxCOLUMNS"
    ] = None,
    points: Annotated[
        Path | None, "Points in place of grids: a row and a column on each line.", "FILE"
    ] = None,
    output: Annotated[Path, _PICTURE, "FILE"] = Path("buckets.png"),
) -> None:
    """Which patches share a bucket, seen from a patch (Fig. 6-9).

    With --keys, a coarser grid of keys is seen from the queries; with --points, points from points.

    Examples:
        irpe show buckets product-contextual-k@1.9 --grid 7x28 --at 3,14
        irpe show buckets cross-bias-k --grid 14x14 --keys 7x7
    """
    from irpe.core.encodings import RPESpec, parse_encoding
    from irpe.viz import plot_buckets, plot_positions

    for text in specs or []:
        spec = parse_encoding(text)
        counts = spec.num_buckets(2, 1) if isinstance(spec, RPESpec) else ()
        if any(count > _MOST_BUCKETS for count in counts):  # more than integers can count
            raise UserError(
                f"{text} has more than {_MOST_BUCKETS:,} buckets: write a smaller ratio or beta"
            )
    references = [parse_patch(text) for text in at] if at else None
    chosen: dict[str, Any] = {"specs": specs} if specs else {}
    if keys or points:
        positions = _parse_positions(parse_grid(grid), keys, points)
        figure = plot_positions(positions, references=references, **chosen)
    else:
        shape = parse_grid(grid)
        figure = plot_buckets(**chosen, grid=shape, references=references)
    write_figure(figure, output)


def cost(
    model: Annotated[
        str, "A model of timm or transformers [deit_small_patch16_224].", "MODEL"
    ] = "deit_small_patch16_224",
    *,
    encoding: Annotated[list[str] | None, "An encoding; repeat it [product-contextual-k]."] = None,
    resolutions: Annotated[str, "Sides of the images.", "PIXELS,..."] = "224,384,512,768,1024",
    compare: Annotated[bool, "Extra time and memory instead (Fig. 10)."] = False,
    output: Annotated[Path, _PICTURE, "FILE"] = Path("cost.png"),
) -> None:
    """Extra MACs by resolution (Fig. 4), or time and memory (Fig. 10).

    MACs are in per cent of those of the model without an encoding, on a logarithmic axis, and
    those of `irpe profile --resolutions` and `irpe profile --compare`.

    Examples:
        irpe show cost --compare --encoding K --encoding shaw
    """
    from irpe.cli.commands.profile import parse_sizes
    from irpe.profile.cost import extra_macs_by_resolution, measure_costs
    from irpe.viz import plot_cost_bars, plot_cost_curves
    from irpe.viz.canvas import FORMATS, check_output

    check_output(output, FORMATS)
    encodings = encoding or ["product-contextual-k"]
    if compare:
        costs, plain = measure_costs(model, encodings), "the plain model"
        named = {plain if cost is costs[0] else cost.encoding: cost for cost in costs}
        times = {name: cost.time_ratio or 0.0 for name, cost in named.items()}
        memory = {name: float(cost.memory or 0) for name, cost in named.items()}
        write_figure(plot_cost_bars(times, memory, reference=plain), output)
        return
    sizes, macs = parse_sizes(resolutions), dict[str, list[int]]()
    found = {each: extra_macs_by_resolution(model, each, sizes) for each in encodings}
    for each, rows in found.items():
        macs[f"{each}, direct"] = [row.direct for row in rows]
        macs[f"{each}, efficient"] = [row.efficient for row in rows]
    plain_macs = [row.plain for row in found[encodings[0]]]
    write_figure(plot_cost_curves(sizes, macs, plain_macs), output)


def write_figure(figure: "Figure", output: Path) -> None:
    """Writes a figure, and says so."""
    from irpe.cli.console import print_lines
    from irpe.viz import save_figure

    print_lines(f"wrote {save_figure(figure, output)}")


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


def _parse_positions(queries: "Grid", keys: str | None, points: Path | None) -> "Positions":
    """Returns positions of cells of the queries' grid, or of points in a file."""
    from irpe.core.grid import PooledGrid
    from irpe.core.positions import Positions

    if points is not None:
        if keys is not None:
            raise UserError("--points cannot be combined with --keys: points are both")
        return Positions(_read_points(points))
    cells = parse_grid(keys or "")
    if cells.ndim != queries.ndim:
        raise UserError(f"--keys {cells} has {cells.ndim} axes, the queries {queries.ndim}")
    sizes = zip(queries.shape, cells.shape, strict=True)
    return Positions(queries, PooledGrid(cells.shape, tuple(q / k for q, k in sizes)))


def _read_points(path: Path) -> "Points":
    """Returns the points of a text file: a row and a column on each line, in patches."""
    import torch

    from irpe.core.token_sets import Points

    if not path.is_file():
        raise UserError(f"--points {path} does not exist: pass a text file, a point on each line")
    rows: list[list[float]] = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        try:
            row, column = map(float, line.replace(",", " ").split())
        except ValueError:
            raise UserError(
                f"{path}, line {number}: {line[:40]!r} is not a row and a column, such as 3.5, 7"
            ) from None
        rows.append([row, column])
    if not rows:
        raise UserError(f"{path} is empty: a point on each line, a row and a column")
    return Points(torch.tensor(rows))
