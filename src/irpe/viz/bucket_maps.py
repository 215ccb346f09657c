"""Fig. 6-9: which patches share a bucket, seen from a reference patch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from irpe.core.buckets import BucketMap, bucket_maps
from irpe.core.encodings import RPESpec, spec_of
from irpe.core.grid import Grid
from irpe.core.methods import METHODS
from irpe.errors import UserError
from irpe.viz.canvas import COLUMN, draw_map, draw_star, new_figure, panels, styled
from irpe.viz.offset_colours import (
    DIRECTED,
    DIRECTIONS,
    PREFIX,
    bucket_colours,
    directed_colour,
    grey,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NONE = -1  # neither a patch nor a prefix token
_FLAT = 0.6  # height over width: flatter maps stand below each other
_WIDE = 4.0  # inches: a wider figure is shown smaller
_POINTS = 72 / 2.54  # in a centimetre


@dataclass(frozen=True)
class BucketTable:
    """A table to draw: its name, its bucket map, and the colour of each bucket."""

    name: str
    bucket_map: BucketMap
    colours: dict[int, Any]


@styled
def plot_buckets(
    specs: Sequence[RPESpec | str] = tuple(f"{method}-contextual-k" for method in METHODS),
    grid: Grid | Sequence[int] = (14, 14),
    num_prefix_tokens: int = 1,
    references: Sequence[tuple[int, int]] | None = None,
) -> "Figure":
    """Returns a map for each reference patch and table, as in Fig. 6-9.

    Patches within lines share a bucket. Its colour says where its patches lie, seen from the star:
    the hue is the direction, darker is farther, in all maps alike. Prefix tokens are drawn above
    the patches.

    Args:
        specs: The encodings; the paper's four methods by default.
        grid: Rows and columns of patches.
        num_prefix_tokens: The number of tokens before the patches.
        references: Rows and columns of the reference patches, marked with a star; `None` takes the
            top-left patch and the one in the centre.

    Examples:
        >>> import irpe.viz
        >>> figure = irpe.viz.plot_buckets(["product-contextual-k"], grid=(7, 7))
    """
    grid = check_image_grid(grid)
    rows, columns = grid.shape
    references = [(0, 0), (rows // 2, columns // 2)] if references is None else references
    for reference in references:
        check_patch(reference, grid)
    parsed = [spec_of(spec) for spec in specs]
    tables = [table for spec in parsed for table in bucket_tables(spec, grid, num_prefix_tokens)]
    if not tables or not references:
        raise UserError("nothing to draw: pass at least one encoding and one reference patch")
    lines = -(-num_prefix_tokens // columns)
    shape = (rows + lines + (lines > 0)) / columns
    figure, drawn, side = _panels(len(references), len(tables), shape)
    cell = side / columns * _POINTS
    size = 7.5 if figure.get_figwidth() < _WIDE else 9  # a wide figure is shown smaller
    for position, (axes_row, reference) in enumerate(zip(drawn, references, strict=True)):
        for axes, table in zip(axes_row, tables, strict=True):
            draw_buckets(axes, table, grid, num_prefix_tokens, reference, cell)
            used = f"{table.bucket_map.num_used_buckets} buckets in use"
            if not position and shape < _FLAT:
                axes.set_title(f"{table.name}: {used}", fontsize=size, loc="left")
            elif not position:
                axes.set_title(f"{table.name}\n{used}", fontsize=size)
    _add_legend(figure, parsed, num_prefix_tokens, size)
    return figure


def _panels(references: int, tables: int, shape: float) -> "tuple[Figure, list[list[Axes]], float]":
    """Returns axes for each reference and table, and the width of a map in centimetres.

    Flat maps, and those of a single table, stand below each other table by table.
    """
    is_turned = shape < _FLAT or tables == 1
    lines, across = (tables, references) if is_turned else (references, tables)
    side = 3.2 if across > 2 else COLUMN / min(across, 1 if shape < _FLAT else 2)
    height = max(side * min(shape, 3.0), 0.3)
    titles = 0.6 * lines if is_turned else 0.9
    figure = new_figure(side * across, height * lines + titles + 1.3)
    drawn = panels(figure, lines, across)
    return figure, [list(c) for c in zip(*drawn, strict=True)] if is_turned else drawn, side


def _add_legend(figure: "Figure", specs: Sequence[RPESpec], count: int, size: float) -> None:
    """Says what the colours mean: directions, distance alone, prefix tokens."""
    from matplotlib.patches import Patch

    methods = {spec.method for spec in specs}
    colours: dict[str, Any] = {}
    if methods & set(DIRECTED):
        colours |= {
            name: directed_colour(0.35 * y, 0.35 * x) for name, (y, x) in DIRECTIONS.items()
        }
    if methods - set(DIRECTED):
        colours["any direction"] = grey(0.35)
    if count:
        colours["prefix token" if count == 1 else "prefix tokens"] = PREFIX
    figure.legend(
        handles=[Patch(facecolor=colour, label=name) for name, colour in colours.items()],
        loc="outside lower center", ncols=3 if figure.get_figwidth() < _WIDE else len(colours),
        title="where patches lie, seen from the star; darker is farther",
        title_fontsize=0.9 * size, fontsize=0.9 * size, handlelength=1.0, columnspacing=1.2,
    )  # fmt: skip


def check_image_grid(grid: Grid | Sequence[int]) -> Grid:
    """Returns a grid of rows and columns, or raises an error: only these can be drawn."""
    grid = Grid.of(grid)
    if grid.ndim != 2:
        raise UserError(f"grid {grid} has {grid.ndim} axes: a picture needs rows and columns")
    return grid


def check_patch(patch: tuple[int, int], grid: Grid) -> None:
    """Raises an error unless a patch is on a grid."""
    if len(patch) != 2 or not all(0 <= p < size for p, size in zip(patch, grid.shape, strict=True)):
        raise UserError(
            f"patch {tuple(patch)} is not on the grid {grid}: give a row of 0 to "
            f"{grid.shape[0] - 1} and a column of 0 to {grid.shape[1] - 1}"
        )


def bucket_tables(spec: RPESpec, grid: Grid, count: int) -> list[BucketTable]:
    """Returns what there is to draw of an encoding, with `count` prefix tokens."""
    maps, colours = bucket_maps(spec, grid, count), bucket_colours(spec, grid)
    return [BucketTable(*each) for each in zip(table_names(spec), maps, colours, strict=True)]


def table_names(spec: RPESpec) -> list[str]:
    """Returns what to call the tables of an encoding: its method, index and axes."""
    is_default = spec.index == RPESpec(spec.method).index
    name = spec.method if is_default else f"{spec.method} @{spec.index}"
    return [f"{name}, rows", f"{name}, columns"] if spec.method == "cross" else [name]


def token_picture(values: Tensor, grid: Grid, num_prefix_tokens: int) -> Tensor:
    """Lays one value per token out as a picture: prefix tokens above the patches; -1: no token."""
    rows, columns = grid.shape
    patches = values[num_prefix_tokens:].view(rows, columns)
    if not num_prefix_tokens:
        return patches
    lines = -(-num_prefix_tokens // columns)
    above = torch.full(((lines + 1) * columns,), _NONE, dtype=values.dtype)
    above[:num_prefix_tokens] = values[:num_prefix_tokens]
    return torch.cat([above.view(lines + 1, columns), patches])


def draw_buckets(
    axes: "Axes",
    table: BucketTable,
    grid: Grid,
    count: int,
    reference: tuple[int, int],
    cell: float,
) -> None:
    """Draws which patches share a bucket, seen from a reference patch; `cell` in points."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import ListedColormap

    query = count + reference[0] * grid.shape[1] + reference[1]
    buckets, order = table.bucket_map.ids[query].long().unique(return_inverse=True)
    picture = token_picture(order, grid, count)
    shown = picture.double().masked_fill(picture == _NONE, torch.nan)
    colours = ListedColormap([table.colours.get(bucket, PREFIX) for bucket in buckets.tolist()])
    draw_map(axes, shown, cmap=colours, vmin=-0.5, vmax=len(buckets) - 0.5)
    lines: list[list[tuple[float, float]]] = []  # wherever two neighbours have different buckets
    for row, column in (picture[:, 1:] != picture[:, :-1]).nonzero().tolist():
        lines.append([(column + 0.5, row - 0.5), (column + 0.5, row + 0.5)])
    for row, column in (picture[1:] != picture[:-1]).nonzero().tolist():
        lines.append([(column - 0.5, row + 0.5), (column + 0.5, row + 0.5)])
    axes.add_collection(LineCollection(lines, colors="white", linewidths=0.6))
    above = len(picture) - grid.shape[0]
    draw_star(axes, reference[0] + above, reference[1], min(max(1.1 * cell, 3.0), 9.0))
