"""What the maps of weights and of attention share: one head, the picture, names, scales."""

import re
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor

from irpe.core.positions import Grid
from irpe.errors import UserError
from irpe.viz.canvas import draw_map
from irpe.viz.capture import CapturedAttention, HeadPairs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Patch = tuple[int, int]


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
    """Returns where a patch of the queries' grid is in the coordinates of the keys' grid.

    Args:
        patch: Its row and column.
        grids: The grids of queries and keys, which cover the same image.
    """
    queries, keys = (grid.shape for grid in grids)
    row, column = (
        (place + 0.5) * cells / size - 0.5
        for place, size, cells in zip(patch, queries, keys, strict=True)
    )
    return row, column


def scale_beside(drawn: "Axes | list[Axes]", image: Any, label: str = "") -> None:
    """Adds a colour scale in per cent."""
    from matplotlib.ticker import FuncFormatter

    axes: Any = drawn if isinstance(drawn, list) else [drawn]
    bar = axes[0].figure.colorbar(image, ax=drawn, shrink=0.8, aspect=25, pad=0.02, label=label)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(_per_cent))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=6, length=1.5)


def _per_cent(value: float, _: object) -> str:
    return f"{100 * value:.6g} %"


def title_of(call: CapturedAttention, head: int | None) -> str:
    """Returns the heading of a map: its attention and its head."""
    return f"{short_name(call.name)}, {'mean of heads' if head is None else f'head {head}'}"


def short_name(name: str) -> str:
    """Returns an attention's path without what all paths of its model have: "blocks.0"."""
    parts = re.findall(r"[^.]+\.\d+", name)
    return ".".join(parts) or name
