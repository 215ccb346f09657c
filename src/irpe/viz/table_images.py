"""The learned tables as images."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from irpe.adapters.equipped import encoding_of, equipped_attentions
from irpe.nn.encoding import RelativePositionEncoding
from irpe.viz.canvas import COLUMN, DIVERGING, draw_map, new_figure, panels, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROLES = ("query", "key", "value", "bias")


@styled
def plot_tables(model: nn.Module, blocks: Sequence[int] | None = None) -> "Figure":
    """Returns the tables of a model: one image a table (down) and block (across).

    Rows are buckets, the last one that of the prefix tokens if there are any; columns are the head
    dimension (one for a bias), heads side by side. All images of one line have one scale, symmetric
    around zero.

    Args:
        model: An equipped model.
        blocks: The indices of the attentions to draw, counted from the input; `None` draws all.
    """
    named = list(equipped_attentions(model).items())
    chosen = range(len(named)) if blocks is None else blocks
    indices = [check_block(index, len(named)) for index in chosen]
    if not indices:
        raise ValueError("nothing to draw: pass at least one block")
    images = [table_images(encoding_of(named[index][1])) for index in indices]
    roles = list(dict.fromkeys(role for image in images for role in image))
    figure = new_figure(max(COLUMN, 1.5 * len(indices)), 5.0 * len(roles) + 0.8)
    for axes_row, role in zip(panels(figure, len(roles), len(indices)), roles, strict=True):
        bound = max(float(image[role].abs().max()) for image in images if role in image) or 1.0
        scale: dict[str, Any] = {"cmap": DIVERGING, "vmin": -bound, "vmax": bound}
        drawn: Any = None
        for axes, image, index in zip(axes_row, images, indices, strict=True):
            axes.set_title(f"block {index}")
            axes.set_axis_off()
            if role in image:
                drawn = draw_map(axes, image[role], aspect="auto", **scale)
        bar: Any = figure.colorbar(drawn, ax=axes_row, aspect=30, pad=0.02, label=f"table: {role}")
        bar.outline.set_visible(False)
    return figure


def check_block(index: int, count: int) -> int:
    """Returns the index of an equipped attention, or raises an error."""
    if not -count <= index < count:
        raise ValueError(f"block {index} does not exist: the model has 0 to {count - 1}")
    return index % count


def table_images(encoding: RelativePositionEncoding) -> dict[str, Tensor]:
    """Returns each table of an encoding as a matrix, by its role and, if it has several, its axis.

    Args:
        encoding: The encoding.
    """
    images: dict[str, Tensor] = {}
    for role in ROLES:
        tables = [table.detach().float().cpu() for table in getattr(encoding, f"{role}_tables")]
        for axis, table in enumerate(tables):
            name = f"{role}, axis {axis}" if len(tables) > 1 else role
            per_head = table if table.ndim == 3 else table.unsqueeze(-1)
            images[name] = torch.cat(list(per_head), dim=1)  # rows, heads x columns
    return images
