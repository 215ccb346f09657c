"""Attention of one patch with the encoding and without, and the extra weights b_ij (Fig. 5)."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from irpe.core.grid import Grid
from irpe.errors import UserError
from irpe.viz.bucket_maps import check_image_grid, check_patch
from irpe.viz.canvas import (
    DIVERGING,
    SEQUENTIAL,
    STAR,
    draw_map,
    draw_star,
    new_figure,
    panel_shape,
    panels,
    styled,
)
from irpe.viz.capture import CapturedAttention, HeadPairs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Patch = tuple[int, int]
_TITLES = ("change", "with", "without", "image")  # from the right
_FLAT = 0.6  # height over width: flatter maps are made wider
_LEAST = 0.1  # of the largest attention: the scale of a change reaches so far at least
_SIDE, _GAP = 3, 1  # reference patches along an axis, and the cells between two maps
_LONG = 1.7  # one side of a grid over the other: its reference patches follow the longer one
_PANEL = 5.2  # centimetres: the width of a panel


@styled
def plot_attention(
    calls: Sequence[CapturedAttention],
    patch: Patch | None = None,
    image: Any = None,
    head: int | None = None,
) -> "Figure":
    """Returns how one patch attends to the others: without the encoding, with it, and the change.

    Args:
        calls: The attentions to draw, one a line, of `irpe.viz.capture`.
        patch: The row and column of the patch; `None` takes the centre of each grid.
        image: The picture that the model was given, shown on the left; `None` leaves it out.
        head: The head to draw; `None` draws the mean of all.

    Examples:
        >>> import irpe, irpe.viz, timm, torch
        >>> plain = timm.create_model("vit_tiny_patch16_224", depth=1)
        >>> model = irpe.equip(plain, "product-contextual-k")
        >>> calls = irpe.viz.capture(model, torch.randn(1, 3, 224, 224))
        >>> figure = irpe.viz.plot_attention(calls, patch=(3, 4))
    """
    if not calls:
        raise UserError("nothing to draw: pass at least one attention")
    shape = max(panel_shape(*check_image_grid(call.grids[0]).shape) for call in calls)
    columns = 3 if image is None else 4
    width = 2.2 if shape > _FLAT else 4.0
    figure = new_figure(width * columns, max(0.77 * width * shape, 1.5) * len(calls) + 0.7)
    for axes_row, call in zip(panels(figure, len(calls), columns), calls, strict=True):
        grid = call.grids[0]
        rows, across = check_image_grid(grid).shape
        query = (rows // 2, across // 2) if patch is None else patch
        check_patch(query, grid)
        if image is not None:
            from matplotlib.patches import Rectangle

            draw_picture(axes_row[0], image, grid)
            corner = (query[1] - 0.5, query[0] - 0.5)
            frame = Rectangle(corner, 1, 1, fill=False, edgecolor=STAR, linewidth=1)
            axes_row[0].add_patch(frame)
        _draw_attention(axes_row[-3:], call, query, head)
    for axes, title in zip(reversed(figure.axes[:columns]), _TITLES, strict=False):
        axes.set_title(title)
    return figure


def _draw_attention(
    drawn: "list[Axes]", call: CapturedAttention, patch: Patch, head: int | None
) -> None:
    queries, keys = call.grids
    first, query = call.num_prefix_tokens, patch[0] * queries.shape[1] + patch[1]
    maps = [
        pick_head(weights, head)[first + query, first:].view(keys.shape)
        for weights in (call.attention_without(), call.attention())
    ]
    top = float(torch.stack(maps).max())
    change = maps[1] - maps[0]
    bound = max(float(change.abs().max()), _LEAST * top) or 1.0
    draw_map(drawn[0], maps[0], cmap=SEQUENTIAL, vmin=0, vmax=top)
    with_it = draw_map(drawn[1], maps[1], cmap=SEQUENTIAL, vmin=0, vmax=top)
    scale_beside(drawn[1], with_it)
    changed = draw_map(drawn[2], change, cmap=DIVERGING, vmin=-bound, vmax=bound)
    scale_beside(drawn[2], changed)
    for axes in drawn:
        draw_star(axes, *on_keys(patch, call.grids), size=5)
    drawn[0].set_ylabel(title_of(call, head).replace(", ", "\n"), fontsize=6)


@styled
def plot_weights(
    calls: Sequence[CapturedAttention],
    heads: Sequence[int] | None = None,
    image: Any = None,
) -> "Figure":
    """Returns Fig. 5: b_ij of 3 x 3 reference patches, for each head (down) and block (across).

    Each small map is the grid of keys as one reference patch, the star, weights it. Colours are
    shares of the attention scores (`CapturedAttention.score_shares`), all on one scale that reaches
    100 % at least: an encoding that does little is pale.

    Args:
        calls: The attentions to draw, of `irpe.viz.capture`.
        heads: The heads to draw, one a line; `None` draws their mean.
        image: The picture that the model was given, shown on the left; `None` leaves it out.

    Examples:
        >>> import irpe, irpe.viz, timm, torch
        >>> plain = timm.create_model("vit_tiny_patch16_224", depth=1)
        >>> model = irpe.equip(plain, "product-contextual-k")
        >>> calls = irpe.viz.capture(model, torch.randn(1, 3, 224, 224))
        >>> figure = irpe.viz.plot_weights(calls)
    """
    lines: list[int | None] = [None] if heads is None else list(heads)
    if not calls or not lines:
        raise UserError("nothing to draw: pass at least one attention and one head")
    maps = [[pick_head(call.score_shares(), head) for call in calls] for head in lines]
    mosaics = [[_mosaic(w, c) for w, c in zip(row, calls, strict=True)] for row in maps]
    bound = max(1.0, *(float(m.nan_to_num().abs().max()) for row in mosaics for m in row))
    columns = len(calls) + (image is not None)
    shape = max(panel_shape(*mosaic.shape) for mosaic in mosaics[0])
    figure = new_figure(_PANEL * columns + 1.2, (_PANEL * shape + 1.0) * len(lines))
    drawn = panels(figure, len(lines), columns, space=0.08)
    for axes_row, head, row in zip(drawn, lines, mosaics, strict=True):
        if image is not None and axes_row is drawn[0]:
            draw_picture(axes_row[0], image, calls[0].grids[0])
            for patch in (patch for line in references(calls[0].grids[0]) for patch in line):
                draw_star(axes_row[0], *patch, 6)
            axes_row[0].set_title("image, with the\nreference patches")
        elif image is not None:
            axes_row[0].set_axis_off()
        for axes, call, mosaic in zip(axes_row[-len(calls) :], calls, row, strict=True):
            draw_map(axes, mosaic, cmap=DIVERGING, vmin=-bound, vmax=bound)
            rows, across = call.grids[1].shape
            for line, patches in enumerate(references(call.grids[0])):
                for position, patch in enumerate(patches):
                    row, column = on_keys(patch, call.grids)
                    left = position * (across + _GAP) + column
                    draw_star(axes, line * (rows + _GAP) + row, left, 5)
            share = f"{100 * call.encoding_share():.2g} % of the scores"
            axes.set_title(f"{title_of(call, head)}\nencoding: {share}")
    label = "$b_{ij}$, share of scores before softmax"
    scale_beside([axes for row in drawn for axes in row], drawn[0][-1].images[0], label)
    return figure


def references(grid: Grid) -> list[list[Patch]]:
    """Returns the reference patches of a grid, as their maps are laid out.

    Those of a long grid follow its longer side, their maps stand along the shorter one.
    """

    def middles_of_thirds(size: int) -> list[int]:
        return sorted({round((n + 0.5) * size / _SIDE - 0.5) for n in range(_SIDE)})

    rows, columns = check_image_grid(grid).shape
    down, across = middles_of_thirds(rows), middles_of_thirds(columns)
    if columns > _LONG * rows:
        return [[(rows // 2, column)] for column in across]
    if rows > _LONG * columns:
        return [[(row, columns // 2) for row in down]]
    return [[(row, column) for column in across] for row in down]


def _mosaic(weights: Tensor, call: CapturedAttention) -> Tensor:
    """Returns the maps of the reference patches as one matrix, with gaps between them."""
    queries, keys = (check_image_grid(grid) for grid in call.grids)
    first, (rows, columns) = call.num_prefix_tokens, keys.shape
    chosen = references(queries)
    height, width = len(chosen) * (rows + _GAP) - _GAP, len(chosen[0]) * (columns + _GAP) - _GAP
    mosaic = torch.full((height, width), torch.nan)
    maps = weights[first:, first:].view(*queries.shape, rows, columns)
    for line, patches in enumerate(chosen):
        for position, (row, column) in enumerate(patches):
            top, left = line * (rows + _GAP), position * (columns + _GAP)
            mosaic[top : top + rows, left : left + columns] = maps[row, column]
    return mosaic


def pick_head(weights: HeadPairs, head: int | None) -> Float[Tensor, "query key"]:
    """Returns the weights of one head, or the mean of all heads."""
    if head is None:
        return weights.mean(0)
    if not 0 <= head < len(weights):
        raise UserError(f"head {head} does not exist: the attention has 0 to {len(weights) - 1}")
    return weights[head]


def draw_picture(axes: "Axes", image: Any, grid: Grid) -> None:
    """Draws a picture in the coordinates of the patches."""
    rows, columns = grid.shape
    arguments = {"cmap": "gray"} if getattr(image, "mode", "") == "L" else {}
    draw_map(axes, image, extent=(-0.5, columns - 0.5, rows - 0.5, -0.5), **arguments)


def on_keys(patch: Patch, grids: tuple[Grid, Grid]) -> tuple[float, float]:
    """Returns where a patch of the queries' grid is in the coordinates of the keys' grid."""
    queries, keys = (grid.shape for grid in grids)
    row, column = (
        (place + 0.5) * cells / size - 0.5
        for place, size, cells in zip(patch, queries, keys, strict=True)
    )
    return row, column


def _per_cent(value: float, _: object) -> str:
    return f"{100 * value:.6g} %"


def scale_beside(drawn: "Axes | list[Axes]", image: Any, label: str = "") -> None:
    """Adds a colour scale in per cent."""
    from matplotlib.ticker import FuncFormatter

    axes: Any = drawn if isinstance(drawn, list) else [drawn]
    bar = axes[0].figure.colorbar(image, ax=drawn, shrink=0.8, aspect=25, pad=0.02, label=label)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(_per_cent))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=6, length=1.5)


def title_of(call: CapturedAttention, head: int | None) -> str:
    """Returns the heading of a map: its attention and its head."""
    return f"{short_name(call.name)}, {'mean of heads' if head is None else f'head {head}'}"


def short_name(name: str) -> str:
    """Returns an attention's path without what all paths of its model have: "blocks.0"."""
    parts = re.findall(r"[^.]+\.\d+", name)
    return ".".join(parts) or name
