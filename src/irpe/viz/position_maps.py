"""Which keys share a bucket, seen from a query, where tokens are not one whole grid."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from irpe.core.buckets import bucket_maps
from irpe.core.encodings import RPESpec, spec_of
from irpe.core.grid import Grid, PooledGrid
from irpe.core.methods import METHODS
from irpe.core.positions import Places, Positions
from irpe.errors import UserError
from irpe.viz.bucket_maps import table_names
from irpe.viz.canvas import draw_star, new_figure, panels, styled
from irpe.viz.offset_colours import Colour, colours_of_offsets

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIDE = 4.2  # centimetres: the width of a map
_QUERY = "#444444"
_REAL = tuple(f"{method}-contextual-k" for method in METHODS if method != "quantization")

Place = tuple[float, float]


@styled
def plot_positions(
    positions: Positions,
    specs: Sequence[RPESpec | str] = _REAL,
    references: Sequence[Place] | None = None,
) -> "Figure":
    """Returns a map for each table and reference: the keys, coloured by their bucket.

    Keys of one colour share a bucket, or nearly so: the hue is the direction from the star, darker
    is farther, as in `plot_buckets`. Cells are drawn as squares, points as dots; small dots are
    queries that are not keys. Prefix tokens have no position and are not drawn.

    Args:
        positions: Where queries and keys are, the same for all images, on two axes.
        specs: The encodings; the paper's methods for real offsets by default.
        references: Rows and columns; the query nearest to each is marked with a star. `None` takes
            the first corner and the centre.

    Examples:
        >>> import irpe, irpe.viz
        >>> pooled = irpe.Positions((14, 14), irpe.PooledGrid((7, 7), stride=2))
        >>> figure = irpe.viz.plot_positions(pooled, ["product-contextual-k"])
    """
    _check_can_be_drawn(positions)
    queries, keys = (places.double() for places in positions.places())
    first, last = _bounds(queries)
    corner_and_centre: Any = (first.tolist(), ((first + last) / 2).tolist())
    stars = [_nearest(queries, place) for place in references or corner_and_centre]
    parsed = [spec_of(spec) for spec in specs]
    titles = [title for spec in parsed for title in table_names(spec)]
    if not parsed:
        raise UserError("nothing to draw: pass at least one encoding")
    lowest, highest = _bounds(queries, keys)
    shape = float(((highest - lowest)[0] + 1) / ((highest - lowest)[1] + 1))
    figure = new_figure(_SIDE * len(titles), (_SIDE * min(max(shape, 0.3), 3) + 0.5) * len(stars))
    drawn = panels(figure, len(stars), len(titles))
    for axes_row, star in zip(drawn, stars, strict=True):
        tables = [table for spec in parsed for table in _colours(spec, positions, star)]
        for axes, colours in zip(axes_row, tables, strict=True):
            _draw(axes, positions, colours, queries[star].tolist())
    for axes, title in zip(drawn[0], titles, strict=True):
        axes.set_title(title)
    return figure


def _check_can_be_drawn(positions: Positions) -> None:
    if positions.ndim != 2 or positions.batch is not None:
        of = "for each image" if positions.batch is not None else f"of {positions.ndim} axes"
        raise UserError(
            f"positions {of} cannot be drawn: {positions}; pass those of one image, on rows and "
            "columns"
        )


def _nearest(queries: Float[Tensor, "query 2"], place: Place) -> int:
    return int((queries - torch.tensor(place).double()).norm(dim=1).argmin())


def _bounds(*places: Float[Tensor, "tokens 2"]) -> tuple[Tensor, Tensor]:
    every = torch.cat(places)
    return every.min(0).values, every.max(0).values


def _colours(spec: RPESpec, positions: Positions, star: int) -> list[list[Colour]]:
    """Returns the colour of every key for each table, seen from a query."""
    queries, keys = (places.double() for places in positions.places())
    offsets = (queries[:, None] - keys).flatten(0, 1)
    before_queries, before_keys = positions.prefixes
    found: list[list[Colour]] = []
    maps = bucket_maps(spec, positions)
    for table, bucket_map in zip(colours_of_offsets(spec, offsets), maps, strict=True):
        ids = bucket_map.ids[before_queries + star, before_keys:]
        found.append([table[bucket] for bucket in ids.tolist()])
    return found


def _draw(axes: "Axes", positions: Positions, colours: list[Colour], star: list[float]) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Circle, Rectangle

    of_queries, of_keys = positions.sides
    queries, keys = positions.places()
    size = _cell(of_keys)
    shapes: list[Any] = []
    for row, column in keys.tolist():
        if size is None:
            shapes.append(Circle((column, row), 0.3))
        else:
            height, width = size
            corner = (column - width / 2, row - height / 2)
            shapes.append(Rectangle(corner, width, height))
    axes.add_collection(PatchCollection(shapes, facecolor=colours, edgecolor="white", lw=0.5))
    if of_queries != of_keys:
        rows, columns = queries.double().T.tolist()
        axes.plot(columns, rows, ".", color=_QUERY, markersize=2.5, markeredgecolor="none")
    draw_star(axes, star[0], star[1])
    lowest, highest = _bounds(queries.double(), keys.double())
    margin = 0.6 if size is None else max(size) / 2
    (top, left), (bottom, right) = (lowest - margin).tolist(), (highest + margin).tolist()
    axes.set(xlim=(left, right), ylim=(bottom, top), aspect="equal", xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def _cell(places: Places) -> tuple[float, float] | None:
    """Returns the height and width of a key's cell; `None` for points."""
    if isinstance(places, PooledGrid):
        (height, width) = places.stride if isinstance(places.stride, tuple) else (1.0, 1.0)
        return height, width
    return (1.0, 1.0) if isinstance(places, Grid) or hasattr(places, "tokens") else None
