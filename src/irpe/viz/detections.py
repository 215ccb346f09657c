"""Pictures with the boxes that a detector found, and the true ones."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from irpe.viz.canvas import COLOURS, DPI, draw_map, new_figure, panel_shape, panels, styled
from irpe.viz.labels import Box, place_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

_SIDE, _PANEL = 16.0, 6.0  # centimetres: the longer side of a picture, the width of one of many
_ENTRY = 2.8  # centimetres: the width of an entry of the legend
_COLUMNS = 4
_TITLE = 40  # letters
_DASHES = (0, (4, 2))


@dataclass(frozen=True)
class DetectedImage:
    """A picture with what was found in it.

    Args:
        image: The picture, of Pillow's.
        boxes: Left, top, width and height in pixels of each box that was found.
        labels: The name of its class.
        scores: Its score, between 0 and 1.
        truth: The true boxes, each with the name of its class.
        title: What stands above the picture.
    """

    image: Any
    boxes: Sequence[Box]
    labels: Sequence[str]
    scores: Sequence[float]
    truth: Sequence[tuple[Box, str]] = ()
    title: str = ""

    def __post_init__(self) -> None:
        if any(len(pair) != 2 for pair in self.truth):
            raise ValueError("a true box is a pair: the box, and the name of its class")
        if not len(self.boxes) == len(self.labels) == len(self.scores):
            raise ValueError(
                f"{len(self.boxes)} boxes have {len(self.labels)} labels and {len(self.scores)} "
                "scores: pass one for each box"
            )


@styled
def plot_detections(
    image: Any,
    boxes: Sequence[Box],
    labels: Sequence[str],
    scores: Sequence[float],
    truth: Sequence[tuple[Box, str]] | None = None,
    classes: Sequence[str] | None = None,
) -> "Figure":
    """Returns a picture with boxes, the names of their classes, and scores.

    Boxes with low scores go without a label where there is no room for it.

    Args:
        image: The picture, of Pillow's.
        boxes: Left, top, width and height in pixels of each box that was found.
        labels: The name of its class.
        scores: Its score, between 0 and 1.
        truth: The true boxes, each with the name of its class, drawn as dashed lines.
        classes: The classes in the order of their colours; `None` takes those in the picture.
    """
    item = DetectedImage(image, boxes, labels, scores, truth or ())
    width, height = _size(image)
    shape = panel_shape(height, width)
    figure = new_figure(_SIDE / max(shape, 1), _SIDE * min(shape, 1) + 0.6)
    return _draw(figure, [figure.subplots()], [item], classes, has_names=True, points=5.5)


@styled
def plot_contact_sheet(
    items: Sequence[DetectedImage], classes: Sequence[str] | None = None
) -> "Figure":
    """Returns many pictures with the boxes that were found, and the true ones dashed.

    Colours tell the classes, and boxes their scores; where there are more classes than colours,
    boxes have names as well. Boxes with low scores go without where there is no room.

    Args:
        items: The pictures.
        classes: The classes in the order of their colours; `None` takes those in the pictures.
    """
    if not items:
        raise ValueError("nothing to draw: pass at least one picture")
    columns = min(math.ceil(math.sqrt(len(items))), _COLUMNS)
    rows = math.ceil(len(items) / columns)
    shape = median(panel_shape(*reversed(_size(item.image))) for item in items)
    figure = new_figure(_PANEL * columns, (_PANEL * shape + 0.5) * rows + 0.7)
    drawn = [axes for row in panels(figure, rows, columns) for axes in row]
    for axes in drawn[len(items) :]:
        axes.remove()
    has_names = len(classes or _names(items)) > len(COLOURS)
    return _draw(figure, drawn[: len(items)], items, classes, has_names, points=4.5)


def _draw(
    figure: "Figure",
    drawn: "Sequence[Axes]",
    items: Sequence[DetectedImage],
    classes: Sequence[str] | None,
    has_names: bool,
    points: float,
) -> "Figure":
    colours = _colours(items, classes)
    for axes, item in zip(drawn, items, strict=True):
        _draw_boxes(axes, item, colours)
    _add_legend(figure, items, {} if has_names else colours)
    figure.set_dpi(DPI)  # the size of letters depends on it
    figure.draw_without_rendering()  # labels find their places once the pictures have theirs
    figure.set_layout_engine("none")
    for axes, item in zip(drawn, items, strict=True):
        names = [f"{name} " if has_names else "" for name in item.labels]
        texts = [
            _write(axes, f"{names[n]}{item.scores[n]:.2f}", colours[item.labels[n]], points)
            for n in _best_first(item.scores)
        ]
        _draw_labels(axes, item, texts)
    return figure


def _draw_boxes(axes: "Axes", item: DetectedImage, colours: dict[str, str]) -> None:
    width, height = _size(item.image)
    shown = draw_map(axes, item.image.convert("RGB"), extent=(0, width, height, 0))
    shown.set_interpolation("auto")
    axes.set_title(_shortened(item.title), parse_math=False)
    axes.set_anchor("N")
    for box, label in item.truth:
        _draw_box(axes, box, edgecolor="white", linewidth=0.7, alpha=0.8)
        _draw_box(axes, box, edgecolor=colours[label], linewidth=0.7, linestyle=_DASHES)
    for number in reversed(_best_first(item.scores)):
        box, label = item.boxes[number], item.labels[number]
        _draw_box(axes, box, edgecolor="white", linewidth=1.9, alpha=0.7)
        _draw_box(axes, box, edgecolor=colours[label], linewidth=1.1)


def _draw_box(axes: "Axes", box: Box, **style: Any) -> None:
    from matplotlib.patches import Rectangle

    left, top, width, height = box
    axes.add_patch(Rectangle((left, top), width, height, fill=False, **style))


def _draw_labels(axes: "Axes", item: DetectedImage, texts: "list[Text]") -> None:
    """Moves the labels, the best first, to their places; those without a place are left out."""
    extents = [_extent(axes, text) for text in texts]
    boxes = [item.boxes[number] for number in _best_first(item.scores)]
    corners = place_labels(boxes, [extent[2:] for extent in extents], _size(item.image))
    for rank, (text, corner, extent) in enumerate(zip(texts, corners, extents, strict=True)):
        if corner is None:
            text.remove()
            continue
        text.set_position((corner[0] - extent[0], corner[1] - extent[1]))
        text.set_zorder(5 - rank / len(texts))


def _write(axes: "Axes", text: str, colour: str, points: float) -> "Text":
    return axes.text(
        0,
        0,
        text,
        fontsize=points,
        parse_math=False,
        color=_readable_on(colour),
        bbox={
            "boxstyle": "square,pad=0.12",
            "facecolor": colour,
            "edgecolor": "white",
            "linewidth": 0.3,
        },
    )


def _extent(axes: "Axes", text: Any) -> tuple[float, float, float, float]:
    """Returns left, top, width and height of a label with its background, in pixels."""
    text.update_bbox_position_size(text.figure.canvas.get_renderer())
    extent = text.get_bbox_patch().get_window_extent().transformed(axes.transData.inverted())
    return extent.xmin, extent.ymin, abs(extent.width), abs(extent.height)


def _add_legend(figure: "Figure", items: Sequence[DetectedImage], colours: dict[str, str]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, label=name) for name, colour in colours.items()]
    if any(item.truth for item in items):
        grey = "#555555"
        handles.append(Line2D([], [], color=grey, linewidth=1.1, label="found"))
        handles.append(Line2D([], [], color=grey, linewidth=0.7, linestyle=_DASHES, label="true"))
    if handles:
        columns = max(int(figure.get_figwidth() * 2.54 / _ENTRY), 1)
        columns = min(columns, len(handles))
        legend = figure.legend(handles=handles, loc="outside lower center", ncols=columns)
        for text in legend.get_texts():
            text.set_parse_math(False)


def _colours(items: Iterable[DetectedImage], classes: Sequence[str] | None) -> dict[str, str]:
    names = _names(items)
    if classes is None:
        classes = names
    unknown = [name for name in names if name not in classes]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is none of the classes: {', '.join(classes)}")
    return {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(classes)}


def _names(items: Iterable[DetectedImage]) -> list[str]:
    return sorted({name for i in items for name in (*i.labels, *(label for _, label in i.truth))})


def _best_first(scores: Sequence[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda number: -scores[number])


def _size(image: Any) -> tuple[int, int]:
    """Returns the width and height of a picture."""
    return image.size


def _readable_on(colour: str) -> str:
    """Returns white, or black on a light colour."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"


def _shortened(text: str) -> str:
    if len(text) <= _TITLE:
        return text
    return f"{text[: _TITLE // 2]}…{text[-_TITLE // 2 + 1 :]}"
