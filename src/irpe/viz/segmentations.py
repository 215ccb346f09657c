"""Pictures with the classes of their pixels: true, predicted, and where these differ."""

import colorsys
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from irpe.errors import UserError
from irpe.viz.canvas import COLOURS, draw_map, new_figure, panel_shape, panels, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_IGNORED = 255  # the class of pixels without one
_GREY = (90, 90, 90)  # of pixels without a class
_TITLES = ("image", "truth", "prediction", "right (pale) and wrong")
_PANEL = 6.0  # centimetres: the width of a picture
_ENTRY = 2.8  # centimetres: the width of an entry of the legend
_PALE = 0.25  # how much of the colour is left of what is predicted correctly
_LONGEST = 34  # letters of a title

LabelMap = UInt8[Tensor, "row column"]


@dataclass(frozen=True)
class SegmentedImage:
    """A picture with the classes of its pixels.

    Args:
        image: The picture, of Pillow's.
        truth: The true classes; 255 where there is none.
        predicted: The predicted classes.
        title: What stands beside the picture.

    Examples:
        >>> import torch, irpe.viz
        >>> labels = torch.zeros(224, 224, dtype=torch.uint8)
        >>> item = irpe.viz.SegmentedImage(irpe.viz.default_image(), labels, labels, "scene.png")
    """

    image: Any
    truth: LabelMap
    predicted: LabelMap
    title: str = ""

    def __post_init__(self) -> None:
        size = self.image.size[::-1]
        for name in ("truth", "predicted"):
            found = tuple(getattr(self, name).shape)
            if found != size:
                raise UserError(f"{name} has {found} pixels, the picture {size}")


@styled
def plot_segmentation(item: SegmentedImage, classes: Sequence[str]) -> "Figure":
    """Returns a picture beside its true and its predicted classes, and where they differ.

    Args:
        item: The picture.
        classes: The names of the classes.

    Examples:
        >>> import torch, irpe.viz
        >>> labels = torch.zeros(224, 224, dtype=torch.uint8)
        >>> item = irpe.viz.SegmentedImage(irpe.viz.default_image(), labels, labels, "scene.png")
        >>> figure = irpe.viz.plot_segmentation(item, classes=["sky", "road"])
    """
    return _draw([item], classes)


@styled
def plot_segmentation_sheet(items: Sequence[SegmentedImage], classes: Sequence[str]) -> "Figure":
    """Returns many pictures below each other, each beside its true and its predicted classes.

    Args:
        items: The pictures.
        classes: The names of the classes.

    Examples:
        >>> import torch, irpe.viz
        >>> labels = torch.zeros(224, 224, dtype=torch.uint8)
        >>> item = irpe.viz.SegmentedImage(irpe.viz.default_image(), labels, labels, "scene.png")
        >>> figure = irpe.viz.plot_segmentation_sheet([item, item], classes=["sky", "road"])
    """
    if not items:
        raise UserError("nothing to draw: pass at least one picture")
    return _draw(items, classes)


def class_colours(count: int) -> list[tuple[int, int, int]]:
    """Returns a colour for each class: of eight that all readers can distinguish, then by hue.

    Args:
        count: The number of classes.
    """
    first = [_to_rgb(colour) for colour in COLOURS[:7]]  # the eighth is grey
    others = count - len(first)
    hues = [(index * 0.618) % 1 for index in range(max(others, 0))]
    more = [colorsys.hsv_to_rgb(h, 0.45, 0.95 - 0.35 * (n % 2)) for n, h in enumerate(hues)]
    return [*first, *((round(255 * r), round(255 * g), round(255 * b)) for r, g, b in more)][:count]


def _draw(items: Sequence[SegmentedImage], classes: Sequence[str]) -> "Figure":
    shape = panel_shape(*items[0].truth.shape)
    shown = _shown_classes(items)
    width = _PANEL * len(_TITLES)
    columns = max(int(width / _ENTRY), 1)
    lines = math.ceil((len(shown) + 1) / columns)
    figure = new_figure(width, (_PANEL * shape + 0.3) * len(items) + 0.9 + 0.4 * lines)
    rows = panels(figure, len(items), len(_TITLES))
    palette = torch.tensor([*class_colours(len(classes)), _GREY])
    for axes, item in zip(rows, items, strict=True):
        pictures = [item.image.convert("RGB"), *_maps(item, palette)]
        for each, picture in zip(axes, pictures, strict=True):
            draw_map(each, picture)
        axes[0].set_ylabel(_shortened(item.title), parse_math=False)
    for axes, title in zip(rows[0], _TITLES, strict=True):
        axes.set_title(title)
    _add_legend(figure, {classes[index]: palette[index] for index in shown}, palette[-1], columns)
    return figure


def _maps(item: SegmentedImage, palette: Tensor) -> list[Tensor]:
    """Returns the colours of truth, prediction and errors; what has no class is grey."""
    has_class = item.truth != _IGNORED
    truth, predicted = (
        palette[torch.where(has_class, labels, torch.tensor(len(palette) - 1)).long()]
        for labels in (item.truth, item.predicted)
    )
    is_right = (item.truth == item.predicted)[..., None]
    pale = (255 - _PALE * (255 - predicted.float())).to(predicted.dtype)
    differences = torch.where(is_right, pale, predicted)
    return [each.to(torch.uint8) for each in (truth, predicted, differences)]


def _shown_classes(items: Sequence[SegmentedImage]) -> list[int]:
    """Returns the classes that are true or predicted anywhere in the pictures."""
    found: set[int] = set()
    for item in items:
        has_class = item.truth != _IGNORED
        for labels in (item.truth, item.predicted):
            found.update(labels[has_class].unique().tolist())
    return sorted(found)


def _add_legend(
    figure: "Figure", colours: dict[str, Tensor], ignored: Tensor, columns: int
) -> None:
    from matplotlib.patches import Patch

    entries = {**colours, "not scored": ignored}
    handles: list[Any] = []
    for name, colour in entries.items():
        red, green, blue = (colour / 255).tolist()
        handles.append(Patch(color=(red, green, blue), label=name))
    legend = figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _to_rgb(colour: str) -> tuple[int, int, int]:
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return red, green, blue


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"…{text[1 - _LONGEST :]}"
