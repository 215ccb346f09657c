"""Pictures of many images, as a task has drawn its predictions into them."""

import math
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from irpe.errors import UserError
from irpe.viz.canvas import draw_map, new_figure, panel_shape, panels, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANEL = 6.0  # centimetres: the width of an image
_COLUMNS, _MOST = 4, 24
_TITLE = 40  # letters


@styled
def plot_images(images: Mapping[str, Any]) -> "Figure":
    """Returns many images on one page, the first 24 of them.

    Args:
        images: Pillow images by their names.

    Examples:
        >>> import irpe.viz
        >>> figure = irpe.viz.plot_images({"scene": irpe.viz.default_image()})
    """
    shown = dict(list(images.items())[:_MOST])
    if not shown:
        raise UserError("nothing to draw: pass at least one image")
    shape = median(panel_shape(image.height, image.width) for image in shown.values())
    most = _COLUMNS if shape > 1 / 2 else 1  # wide ones lie below each other
    columns = min(math.ceil(math.sqrt(len(shown))), most)
    rows, width = math.ceil(len(shown) / columns), _PANEL * (1 if most > 1 else 3)
    figure = new_figure(width * columns, (width * shape + 0.5) * rows)
    drawn = [axes for row in panels(figure, rows, columns) for axes in row]
    for axes in drawn[len(shown) :]:
        axes.remove()
    for axes, (name, image) in zip(drawn, shown.items(), strict=False):
        picture = draw_map(axes, image, extent=(0, image.width, image.height, 0))
        picture.set_interpolation("auto")
        axes.set_title(_shortened(name), parse_math=False)
        axes.set_anchor("N")
    return figure


def _shortened(text: str) -> str:
    if len(text) <= _TITLE:
        return text
    return f"{text[: _TITLE // 2]}…{text[-_TITLE // 2 + 1 :]}"
