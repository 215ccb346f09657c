"""Attention of one patch, with the encoding and without."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from irpe.core.positions import Grid
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
from irpe.viz.capture import CapturedAttention
from irpe.viz.head_maps import Patch, draw_picture, on_keys, pick_head, scale_beside, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TITLES = ("change", "with", "without", "image")  # from the right
_FLAT = 0.6  # height over width: flatter maps are made wider
_LEAST = 0.1  # of the largest attention: the scale of a change reaches so far at least


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
        query = _centre(grid) if patch is None else patch
        check_patch(query, grid)
        if image is not None:
            _draw_image(axes_row[0], image, grid, query)
        _draw_attention(axes_row[-3:], call, query, head)
    for axes, title in zip(reversed(figure.axes[:columns]), _TITLES, strict=False):
        axes.set_title(title)
    return figure


def _centre(grid: Grid) -> Patch:
    rows, columns = check_image_grid(grid).shape
    return rows // 2, columns // 2


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


def _draw_image(axes: "Axes", image: Any, grid: Grid, patch: Patch) -> None:
    from matplotlib.patches import Rectangle

    draw_picture(axes, image, grid)
    corner = (patch[1] - 0.5, patch[0] - 0.5)
    axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=STAR, linewidth=1))
