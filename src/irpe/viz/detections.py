"""Pictures with the boxes that a detector found, and the true ones.

A label stands above the corner of its box that is nearer to the middle of the picture, that of a
true box below; those of higher scores cover the others.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from irpe.errors import UserError
from irpe.viz.canvas import COLOURS, draw_map, new_figure, panel_shape, panels, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Box = Sequence[float]  # left, top, width, height
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
        threshold: The least score of a box that is shown, which is said if there is none.

    Examples:
        >>> import irpe.viz
        >>> image = irpe.viz.default_image()
        >>> found = irpe.viz.DetectedImage(image, [(10, 20, 80, 60)], ["car"], [0.9])
    """

    image: Any
    boxes: Sequence[Box]
    labels: Sequence[str]
    scores: Sequence[float]
    truth: Sequence[tuple[Box, str]] = ()
    title: str = ""
    threshold: float | None = None

    def __post_init__(self) -> None:
        if any(len(pair) != 2 for pair in self.truth):
            raise UserError("a true box is a pair: the box, and the name of its class")
        if not len(self.boxes) == len(self.labels) == len(self.scores):
            raise UserError(
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
    threshold: float | None = None,
) -> "Figure":
    """Returns a picture with boxes, the names of their classes, and scores.

    Args:
        image: The picture, of Pillow's.
        boxes: Left, top, width and height in pixels of each box that was found.
        labels: The name of its class.
        scores: Its score, between 0 and 1.
        truth: The true boxes, each with the name of its class, drawn as dashed lines.
        classes: The classes in the order of their colours; `None` takes those in the picture.
        threshold: The least score of a box that is shown, which is said if there is none.

    Examples:
        >>> import irpe.viz
        >>> image = irpe.viz.default_image()
        >>> figure = irpe.viz.plot_detections(image, [(10, 20, 80, 60)], ["car"], [0.9])
    """
    item = DetectedImage(image, boxes, labels, scores, truth or (), threshold=threshold)
    width, height = _size(image)
    shape = panel_shape(height, width)
    figure = new_figure(_SIDE / max(shape, 1), _SIDE * min(shape, 1) + 0.6)
    return _draw(figure, [figure.subplots()], [item], classes, has_names=True, points=5.5)


@styled
def plot_contact_sheet(
    items: Sequence[DetectedImage], classes: Sequence[str] | None = None
) -> "Figure":
    """Returns many pictures with the boxes that were found, and the true ones dashed.

    Colours stand for classes, labels are scores; where there are more classes than colours, labels
    have the names of the classes as well.

    Args:
        items: The pictures.
        classes: The classes in the order of their colours; `None` takes those in the pictures.

    Examples:
        >>> import irpe.viz
        >>> image = irpe.viz.default_image()
        >>> found = irpe.viz.DetectedImage(image, [(10, 20, 80, 60)], ["car"], [0.9])
        >>> figure = irpe.viz.plot_contact_sheet([found])
    """
    if not items:
        raise UserError("nothing to draw: pass at least one picture")
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
        _draw_picture(axes, item)
        for box, label in item.truth:
            _draw_box(axes, box, colours[label], 0.7, linestyle=_DASHES)
            _name_truth(axes, item, box, label, colours[label], points)
        for index in sorted(range(len(item.scores)), key=lambda i: item.scores[i]):
            box, label, score = item.boxes[index], item.labels[index], item.scores[index]
            _draw_box(axes, box, colours[label], 1.1)
            name = f"{label} " if has_names else ""
            _write(axes, item, box, f"{name}{score:.2f}", colours[label], points)
        if not item.boxes and item.threshold is not None:
            _say_nothing(axes, f"nothing above {item.threshold:g}", 1.6 * points)
    _add_legend(figure, items, {} if has_names else colours)
    return figure


def _say_nothing(axes: "Axes", text: str, points: float) -> None:
    background = {"boxstyle": "square,pad=0.3", "facecolor": "white", "alpha": 0.85, "linewidth": 0}
    place: dict[str, Any] = {"transform": axes.transAxes, "ha": "center", "va": "bottom"}
    axes.text(0.5, 0.02, text, fontsize=points, bbox=background, **place)


def _name_truth(
    axes: "Axes", item: DetectedImage, box: Box, label: str, colour: str, points: float
) -> None:
    """Writes the class of a true box inside its lower edge, without a background."""
    from matplotlib.patheffects import withStroke

    left, top, width, height = box
    is_left = left + width / 2 < _size(item.image)[0] / 2
    text = axes.text(
        left if is_left else left + width,
        top + height,
        f" {label} ",
        ha="left" if is_left else "right",
        va="bottom",
        fontsize=0.9 * points,
        parse_math=False,
        color=colour,
    )
    text.set_path_effects([withStroke(linewidth=1.2, foreground="white")])


def _draw_picture(axes: "Axes", item: DetectedImage) -> None:
    width, height = _size(item.image)
    shown = draw_map(axes, item.image.convert("RGB"), extent=(0, width, height, 0))
    shown.set_interpolation("auto")
    axes.set_title(_shortened(item.title), parse_math=False)
    axes.set_anchor("N")


def _draw_box(axes: "Axes", box: Box, colour: str, linewidth: float, **style: Any) -> None:
    from matplotlib.patches import Rectangle

    left, top, width, height = box
    arguments: dict[str, Any] = {"xy": (left, top), "width": width, "height": height, "fill": False}
    axes.add_patch(Rectangle(**arguments, edgecolor="white", linewidth=linewidth + 0.8, alpha=0.7))
    axes.add_patch(Rectangle(**arguments, edgecolor=colour, linewidth=linewidth, **style))


def _write(
    axes: "Axes", item: DetectedImage, box: Box, text: str, colour: str, points: float
) -> None:
    left, top, width, _ = box
    is_left = left + width / 2 < _size(item.image)[0] / 2
    background = {"boxstyle": "square,pad=0.12", "facecolor": colour, "edgecolor": "white"}
    axes.text(
        left if is_left else left + width,
        top,
        text,
        ha="left" if is_left else "right",
        va="bottom" if top > 0.1 * _size(item.image)[1] else "top",
        fontsize=points,
        parse_math=False,
        color=readable_on(colour),
        bbox={**background, "linewidth": 0.3},
    )


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
        raise UserError(f"{unknown[0]!r} is not one of the classes: {', '.join(classes)}")
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(classes)}


def _names(items: Iterable[DetectedImage]) -> list[str]:
    return sorted({name for i in items for name in (*i.labels, *(label for _, label in i.truth))})


def _size(image: Any) -> tuple[int, int]:
    """Returns the width and height of a picture."""
    return image.size


def readable_on(colour: str) -> str:
    """Returns the colour of letters on a background: white, or black on a light one."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"


def _shortened(text: str) -> str:
    if len(text) <= _TITLE:
        return text
    return f"{text[: _TITLE // 2]}…{text[-_TITLE // 2 + 1 :]}"
