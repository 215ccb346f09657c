"""Fig. 5: the extra weights b_ij of an encoding, as shares of the attention scores."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from irpe.core.positions import Grid
from irpe.errors import UserError
from irpe.viz.bucket_maps import check_image_grid
from irpe.viz.canvas import DIVERGING, draw_map, draw_star, new_figure, panel_shape, panels, styled
from irpe.viz.capture import CapturedAttention
from irpe.viz.head_maps import Patch, draw_picture, on_keys, pick_head, scale_beside, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIDE, _GAP = 3, 1  # reference patches along an axis, and the cells between two maps
_LONG = 1.7  # one side of a grid over the other: its reference patches follow the longer one
_PANEL = 5.2  # centimetres: the width of a panel


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
            _draw_references(axes_row[0], image, calls[0].grids[0])
        elif image is not None:
            axes_row[0].set_axis_off()
        for axes, call, mosaic in zip(axes_row[-len(calls) :], calls, row, strict=True):
            draw_map(axes, mosaic, cmap=DIVERGING, vmin=-bound, vmax=bound)
            _star_mosaic(axes, call.grids)
            share = f"{100 * call.encoding_share():.2g} % of the scores"
            axes.set_title(f"{title_of(call, head)}\nencoding: {share}")
    label = "$b_{ij}$, share of scores before softmax"
    scale_beside([axes for row in drawn for axes in row], drawn[0][-1].images[0], label)
    return figure


def reference_places(size: int) -> list[int]:
    """Returns up to three indices spread over an axis: the middles of its thirds."""
    return sorted({round((n + 0.5) * size / _SIDE - 0.5) for n in range(_SIDE)})


def references(grid: Grid) -> list[list[Patch]]:
    """Returns the reference patches of a grid, as their maps are laid out.

    Those of a long grid follow its longer side, their maps stand along the shorter one.
    """
    rows, columns = check_image_grid(grid).shape
    down, across = reference_places(rows), reference_places(columns)
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


def _star_mosaic(axes: "Axes", grids: tuple[Grid, Grid]) -> None:
    queries, (rows, columns) = grids[0], grids[1].shape
    for line, patches in enumerate(references(queries)):
        for position, patch in enumerate(patches):
            row, column = on_keys(patch, grids)
            draw_star(axes, line * (rows + _GAP) + row, position * (columns + _GAP) + column, 5)


def _draw_references(axes: "Axes", image: Any, grid: Grid) -> None:
    draw_picture(axes, image, grid)
    for patches in references(grid):
        for row, column in patches:
            draw_star(axes, row, column, 6)
    axes.set_title("image, with the\nreference patches")
