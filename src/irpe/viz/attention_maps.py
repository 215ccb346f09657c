"""Fig. 5, the extra weights b_ij of an encoding, and attention with it and without."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from irpe.core.grid import Grid
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

_TITLES = ("change", "with", "without", "image")  # from the right
_SIDE, _GAP = 5, 1  # reference patches a side, and the cells between two maps


@styled
def plot_weights(
    calls: Sequence[CapturedAttention], heads: Sequence[int] | None = None
) -> "Figure":
    """Returns Fig. 5: b_ij of 5 x 5 reference patches, for each head (down) and block (across).

    Each small map is the grid of keys as one reference patch, the star, weights it; all maps of a
    panel have the scale beside it.

    Args:
        calls: The attentions to draw, of `irpe.viz.capture`.
        heads: The heads to draw, one a line; `None` draws their mean.
    """
    lines: list[int | None] = [None] if heads is None else list(heads)
    if not calls or not lines:
        raise ValueError("nothing to draw: pass at least one attention and one head")
    shape = max(panel_shape(*check_image_grid(call.grid).shape) for call in calls)
    width = max(4.0 * len(calls), 6.0)
    figure = new_figure(width, (width / len(calls) * shape * 0.8 + 0.8) * len(lines))
    drawn = panels(figure, len(lines), len(calls))
    for axes_row, head in zip(drawn, lines, strict=True):
        for axes, call in zip(axes_row, calls, strict=True):
            _draw_mosaic(axes, pick_head(call.extra_weights(), head), call)
            axes.set_title(_title(call, head))
    return figure


@styled
def plot_attention(
    calls: Sequence[CapturedAttention],
    patch: tuple[int, int],
    image: Any = None,
    head: int | None = None,
) -> "Figure":
    """Returns how one patch attends to the others: without the encoding, with it, and the change.

    Args:
        calls: The attentions to draw, one a line, of `irpe.viz.capture`.
        patch: The row and column of the patch.
        image: The picture that the model was given, shown on the left; `None` leaves it out.
        head: The head to draw; `None` draws the mean of all.
    """
    if not calls:
        raise ValueError("nothing to draw: pass at least one attention")
    shape = max(panel_shape(*check_image_grid(call.grid).shape) for call in calls)
    columns = 3 if image is None else 4
    figure = new_figure(2.2 * columns, max(1.7 * shape, 1.5) * len(calls) + 0.7)
    for axes_row, call in zip(panels(figure, len(calls), columns), calls, strict=True):
        check_patch(patch, call.grid)
        if image is not None:
            _draw_image(axes_row[0], image, call.grid, patch)
        _draw_attention(axes_row[-3:], call, patch, head)
    for axes, title in zip(reversed(figure.axes[:columns]), _TITLES, strict=False):
        axes.set_title(title)
    return figure


def pick_head(weights: HeadPairs, head: int | None) -> Float[Tensor, "query key"]:
    """Returns the weights of one head, or the mean of all heads."""
    if head is None:
        return weights.mean(0)
    if not 0 <= head < len(weights):
        raise ValueError(f"head {head} does not exist: the attention has 0 to {len(weights) - 1}")
    return weights[head]


def reference_places(size: int) -> list[int]:
    """Returns up to five indices spread evenly over an axis, its ends included."""
    return sorted({round(index) for index in torch.linspace(0, size - 1, _SIDE).tolist()})


def _draw_mosaic(axes: "Axes", weights: Tensor, call: CapturedAttention) -> None:
    grid, first = call.grid, call.num_prefix_tokens
    rows, columns = grid.shape
    down, across = reference_places(rows), reference_places(columns)
    mosaic = torch.full(
        (len(down) * (rows + _GAP) - _GAP, len(across) * (columns + _GAP) - _GAP), torch.nan
    )
    maps = weights[first:, first:].view(rows, columns, rows, columns)
    for line, row in enumerate(down):
        for position, column in enumerate(across):
            top, left = line * (rows + _GAP), position * (columns + _GAP)
            mosaic[top : top + rows, left : left + columns] = maps[row, column]
    bound = float(mosaic.nan_to_num().abs().max()) or 1.0
    image = draw_map(axes, mosaic, cmap=DIVERGING, vmin=-bound, vmax=bound)
    for line, row in enumerate(down):
        for position, column in enumerate(across):
            draw_star(axes, line * (rows + _GAP) + row, position * (columns + _GAP) + column, 4)
    _scale_beside(axes, image, "$b_{ij}$")


def _draw_attention(
    drawn: "list[Axes]", call: CapturedAttention, patch: tuple[int, int], head: int | None
) -> None:
    first, query = call.num_prefix_tokens, patch[0] * call.grid.shape[1] + patch[1]
    maps = [
        pick_head(weights, head)[first + query, first:].view(call.grid.shape)
        for weights in (call.attention_without(), call.attention())
    ]
    top = float(torch.stack(maps).max())
    change = maps[1] - maps[0]
    bound = float(change.abs().max()) or 1.0
    draw_map(drawn[0], maps[0], cmap=SEQUENTIAL, vmin=0, vmax=top)
    with_it = draw_map(drawn[1], maps[1], cmap=SEQUENTIAL, vmin=0, vmax=top)
    _scale_beside(drawn[1], with_it, "")
    changed = draw_map(drawn[2], change, cmap=DIVERGING, vmin=-bound, vmax=bound)
    _scale_beside(drawn[2], changed, "")
    for axes in drawn:
        draw_star(axes, *patch, size=5)
    drawn[0].set_ylabel(_title(call, head), fontsize=6)


def _draw_image(axes: "Axes", image: Any, grid: Grid, patch: tuple[int, int]) -> None:
    from matplotlib.patches import Rectangle

    rows, columns = grid.shape
    arguments = {"cmap": "gray"} if getattr(image, "mode", "") == "L" else {}
    draw_map(axes, image, extent=(-0.5, columns - 0.5, rows - 0.5, -0.5), **arguments)
    corner = (patch[1] - 0.5, patch[0] - 0.5)
    axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=STAR, linewidth=1))


def _scale_beside(axes: "Axes", image: Any, label: str) -> None:
    figure: Any = axes.figure
    bar = figure.colorbar(image, ax=axes, shrink=0.8, aspect=25, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=5.5, length=1.5)
    bar.ax.set_title(label, fontsize=6.5)
    bar.ax.yaxis.get_offset_text().set_fontsize(5.5)


def _title(call: CapturedAttention, head: int | None) -> str:
    return f"{call.name}\n{'mean of heads' if head is None else f'head {head}'}"
