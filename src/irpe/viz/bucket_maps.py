"""Fig. 6-9: which patches share a bucket, seen from a reference patch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from irpe.core.buckets import BucketMap, bucket_maps
from irpe.core.encodings.spec import RPESpec
from irpe.core.grid import Grid
from irpe.core.methods import METHODS
from irpe.viz.canvas import (
    COLUMN,
    SEQUENTIAL,
    draw_map,
    draw_star,
    new_figure,
    panel_shape,
    panels,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AXES = ("rows", "columns")
_NONE = -1  # neither a patch nor a prefix token


@styled
def plot_buckets(
    specs: Sequence[RPESpec | str] = tuple(f"{method}-contextual-k" for method in METHODS),
    grid: Grid | Sequence[int] = (14, 14),
    num_prefix_tokens: int = 1,
    references: Sequence[tuple[int, int]] | None = None,
) -> "Figure":
    """Returns a map for each reference patch and table, as in Fig. 6-9.

    Patches of one colour within lines share a bucket. Prefix tokens are drawn above the patches.

    Args:
        specs: The encodings; the paper's four methods by default.
        grid: Rows and columns of patches.
        num_prefix_tokens: The number of tokens before the patches.
        references: Rows and columns of the reference patches, marked with a star; `None` takes the
            top-left patch and the one in the centre.
    """
    grid = check_image_grid(grid)
    rows, columns = grid.shape
    references = [(0, 0), (rows // 2, columns // 2)] if references is None else references
    for reference in references:
        check_patch(reference, grid)
    tables = [
        (title, bucket_map)
        for spec in specs
        for title, bucket_map in _titled_maps(RPESpec.of(spec), grid, num_prefix_tokens)
    ]
    if not tables or not references:
        raise ValueError("nothing to draw: pass at least one encoding and one reference patch")
    lines = -(-num_prefix_tokens // columns)
    shape = panel_shape(rows + lines + (lines > 0), columns)
    figure, drawn = _panels(len(references), len(tables), shape)
    size = 7.5 if len(tables) < 3 else 10  # a wide figure is made smaller to fit a column
    for axes_row, reference in zip(drawn, references, strict=True):
        for axes, (title, bucket_map) in zip(axes_row, tables, strict=True):
            _draw(axes, bucket_map, grid, num_prefix_tokens, reference)
            _name_prefix(axes, grid, num_prefix_tokens, 0.85 * size)
            if axes_row is drawn[0] or len(tables) == 1:
                axes.set_title(title, fontsize=size)
    return figure


def _panels(references: int, tables: int, shape: float) -> "tuple[Figure, list[list[Axes]]]":
    """Returns axes for each reference and table; the maps of one table stand side by side.

    Args:
        references: How many reference patches there are.
        tables: How many tables there are.
        shape: The height of a map over its width.
    """
    is_turned = tables == 1 and shape > 0.5
    lines, across = (tables, references) if is_turned else (references, tables)
    side = 3.2 if across > 2 else COLUMN / across
    figure = new_figure(side * across, side * shape * lines + 1.2)
    drawn = panels(figure, lines, across)
    return figure, [[axes] for axes in drawn[0]] if is_turned else drawn


def check_image_grid(grid: Grid | Sequence[int]) -> Grid:
    """Returns a grid of rows and columns, or raises an error: only these can be drawn."""
    grid = Grid.of(grid)
    if grid.ndim != 2:
        raise ValueError(f"grid {grid} has {grid.ndim} axes: a picture needs rows and columns")
    return grid


def check_patch(patch: tuple[int, int], grid: Grid) -> None:
    """Raises an error unless a patch is on a grid."""
    if len(patch) != 2 or not all(0 <= p < size for p, size in zip(patch, grid.shape, strict=True)):
        raise ValueError(
            f"patch {tuple(patch)} is not on the grid {grid}: give a row of 0 to "
            f"{grid.shape[0] - 1} and a column of 0 to {grid.shape[1] - 1}"
        )


def _titled_maps(spec: RPESpec, grid: Grid, count: int) -> list[tuple[str, BucketMap]]:
    maps = bucket_maps(spec, grid, count)
    is_default = spec.index == RPESpec(spec.method).index
    name = spec.method if is_default else f"{spec.method} @{spec.index}"
    parts = [f", {axis}" for axis in _AXES] if len(maps) > 1 else [""]
    return [
        (f"{name}{part}\n{item.num_used_buckets} of {item.num_buckets} rows", item)
        for part, item in zip(parts, maps, strict=True)
    ]


def token_picture(values: Tensor, grid: Grid, num_prefix_tokens: int) -> Tensor:
    """Lays one value per token out as a picture: prefix tokens above the patches, a gap between.

    Args:
        values: A value for each token; where there is no token the picture has -1.
        grid: Rows and columns of patches.
        num_prefix_tokens: The number of tokens before the patches.
    """
    rows, columns = grid.shape
    patches = values[num_prefix_tokens:].view(rows, columns)
    if not num_prefix_tokens:
        return patches
    lines = -(-num_prefix_tokens // columns)
    above = torch.full(((lines + 1) * columns,), _NONE, dtype=values.dtype)
    above[:num_prefix_tokens] = values[:num_prefix_tokens]
    return torch.cat([above.view(lines + 1, columns), patches])


def _draw(
    axes: "Axes", bucket_map: BucketMap, grid: Grid, count: int, reference: tuple[int, int]
) -> None:
    query = count + reference[0] * grid.shape[1] + reference[1]
    buckets, colours = bucket_map.ids[query].long().unique(return_inverse=True)
    picture = token_picture(colours, grid, count)
    shown = picture.double().masked_fill(picture == _NONE, torch.nan)
    draw_map(axes, shown, cmap=SEQUENTIAL, vmin=0, vmax=max(len(buckets) - 1, 1))
    _draw_borders(axes, picture)
    above = len(picture) - grid.shape[0]
    draw_star(axes, reference[0] + above, reference[1])


def _name_prefix(axes: "Axes", grid: Grid, count: int, size: float) -> None:
    """Says what the cells above the patches are, where there is room for it."""
    if 0 < count < 0.6 * grid.shape[1]:
        axes.text(count, 0, "prefix", va="center", fontsize=size)


def _draw_borders(axes: "Axes", picture: Tensor) -> None:
    """Draws a line wherever two neighbours have different buckets."""
    from matplotlib.collections import LineCollection

    lines: list[list[tuple[float, float]]] = []
    for row, column in (picture[:, 1:] != picture[:, :-1]).nonzero().tolist():
        lines.append([(column + 0.5, row - 0.5), (column + 0.5, row + 0.5)])
    for row, column in (picture[1:] != picture[:-1]).nonzero().tolist():
        lines.append([(column - 0.5, row + 0.5), (column + 0.5, row + 0.5)])
    axes.add_collection(LineCollection(lines, colors="white", linewidths=0.6))
