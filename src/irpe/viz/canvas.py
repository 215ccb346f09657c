"""What all figures share: size in centimetres, type, colours, and how they are written.

Figures are made without pyplot, so that no state outlives them and no display is needed.
"""

import functools
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from torch import Tensor

from irpe import files
from irpe.errors import UserError
from irpe.extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

COLUMN = 8.0  # centimetres: the width of a column of the paper
FORMATS = (".png", ".svg")
DPI = 200
STAR = "#E8000B"
SEQUENTIAL, DIVERGING = "cividis", "PuOr_r"
_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 7,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "figure.facecolor": "white",
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.5,
    "legend.fontsize": 6.5,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "svg.hashsalt": "irpe",
    "xtick.labelsize": 6.5,
    "xtick.major.width": 0.6,
    "ytick.labelsize": 6.5,
    "ytick.major.width": 0.6,
}

Arguments = ParamSpec("Arguments")
Drawn = TypeVar("Drawn")


def styled(plot: Callable[Arguments, Drawn]) -> Callable[Arguments, Drawn]:
    """Lets a function draw in the style of the figures, whatever the user's settings are."""

    @functools.wraps(plot)
    def plot_in_style(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Drawn:
        matplotlib = require("matplotlib", "viz")
        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(_STYLE)
            return plot(*args, **kwargs)

    return plot_in_style


def new_figure(width: float, height: float) -> "Figure":
    """Returns an empty figure of a width and a height in centimetres."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 2.54, height / 2.54), layout="constrained")
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.03, h_pad=0.03)
    FigureCanvasAgg(figure)
    return figure


def panel_shape(rows: int, columns: int) -> float:
    """Returns the height of a map over its width, within what leaves room for its title."""
    return min(max(rows / columns, 0.4), 3.0)


def panels(figure: "Figure", rows: int, columns: int, space: float = 0.02) -> "list[list[Axes]]":
    """Returns the axes of a figure, row by row; `space` lies between two, in widths of one."""
    engine: Any = figure.get_layout_engine()
    engine.set(wspace=space)
    axes: Any = figure.subplots(rows, columns, squeeze=False)
    return [list(row) for row in axes]


def whole_ticks(axis: Any) -> None:
    """Lets an axis have ticks at whole numbers only."""
    axis.get_major_locator().set_params(integer=True)


def draw_map(axes: "Axes", values: Any, **arguments: Any) -> "AxesImage":
    """Draws a matrix or a picture, one square per element, without ticks."""
    shown = values.numpy() if isinstance(values, Tensor) else values
    image = axes.imshow(shown, interpolation="nearest", **arguments)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    return image


def draw_star(axes: "Axes", row: float, column: float, size: float = 7) -> None:
    """Marks the reference patch."""
    axes.plot(column, row, "*", color=STAR, markersize=size, mec="white", mew=0.4)


def save_figure(figure: "Figure", path: str | os.PathLike[str]) -> Path:
    """Writes a figure, as PNG or SVG by the end of its name, and returns where it is.

    The file is complete or not there at all, and equal figures give equal files.

    Args:
        figure: The figure.
        path: The file; its folder must exist.

    Examples:
        >>> import irpe.viz
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = irpe.viz.save_figure(irpe.viz.plot_index(), f"{folder}/index.svg")
        >>> path.name
        'index.svg'
    """
    path = check_output(path, FORMATS)
    matplotlib = require("matplotlib", "viz")
    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": _STYLE["svg.hashsalt"]}):
        figure.savefig(
            file, format=path.suffix[1:], dpi=DPI, metadata=metadata, bbox_inches="tight",
            pad_inches=0.03,
        )  # fmt: skip
    files.write_bytes(path, file.getvalue())
    return path


def check_output(path: str | os.PathLike[str], endings: tuple[str, ...]) -> Path:
    """Returns a path that can be written to and has one of these endings, or raises an error."""
    path = Path(path)
    if path.suffix not in endings:
        raise UserError(f"{path} must end with {' or '.join(endings)}")
    files.check_writable(path)
    return path
