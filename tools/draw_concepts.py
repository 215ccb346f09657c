"""Draws the picture of docs/explanation/concepts.md: python tools/draw_concepts.py."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle

import irpe
from irpe.core.encodings.spec import RPESpec
from irpe.core.grid import Grid
from irpe.viz.offset_colours import PREFIX, bucket_colours

FILE = Path(__file__).parents[1] / "docs/figures/concepts.png"
SPEC = RPESpec.parse("product-contextual-k@clip1")
GRID = Grid((4, 5))
QUERY = (1, 2)


def main() -> None:
    """Draws four panels, from tokens to scores."""
    (buckets,) = irpe.bucket_maps(SPEC, GRID, num_prefix_tokens=1)
    (patch_colours,) = bucket_colours(SPEC, GRID)
    colours: dict[int, Any] = {**patch_colours, buckets.num_buckets - 1: PREFIX}
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.4), width_ratios=[1.15, 1.15, 1.1])
    query = 1 + QUERY[0] * GRID.shape[1] + QUERY[1]
    ids = buckets.ids[query].tolist()
    tokens = range(1 + GRID.num_positions)
    draw_tokens(axes[0], {t: str(t) for t in tokens}, dict.fromkeys(tokens, "#dbe9ee"))
    draw_tokens(axes[1], dict(enumerate(map(str, ids))), {t: colours[ids[t]] for t in tokens})
    for axis in axes[:2]:
        axis.plot(QUERY[1] + 0.5, QUERY[0] + 0.5, "*", color="white", mec="black", ms=17)
    draw_table(axes[2], buckets.num_buckets, colours)
    titles = (
        "tokens: a prefix token, then\na grid of 4 x 5 patches",
        "buckets: the row of the table for\neach key, seen from the query ★",
        "table: one vector for each bucket,\nthe last for the prefix token",
    )
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(FILE, dpi=150)


def draw_tokens(axis: Any, texts: dict[int, str], colours: dict[int, Any]) -> None:
    """Draws the prefix token above the grid, each token with its text and colour."""
    rows, columns = GRID.shape
    for token, text in texts.items():
        row, column = divmod(token - 1, columns) if token else (-1.4, 0)
        axis.add_patch(Rectangle((column, row), 1, 1, fc=colours[token], ec="white", lw=2))
        axis.text(column + 0.14, row + 0.3, text, fontsize=9, color=readable_on(colours[token]))
    axis.set(xlim=(0, columns), ylim=(rows, -1.5), aspect="equal")
    axis.axis("off")


def draw_table(axis: Any, rows: int, colours: dict[int, Any]) -> None:
    """Draws the rows of a table, each beside the colour of its bucket."""
    values = torch.randn(rows, 8, generator=torch.Generator().manual_seed(0))
    axis.imshow(values, cmap="Greys", extent=(1, 9, rows, 0), aspect="auto", vmin=-3, vmax=5)
    for row in range(rows):
        axis.add_patch(Rectangle((0, row), 0.9, 1, fc=colours[row], ec="white", lw=1))
        axis.text(0.45, row + 0.5, str(row), va="center", ha="center", fontsize=8,
                  color=readable_on(colours[row]))  # fmt: skip
    axis.set(xlim=(0, 9), ylim=(rows, 0), yticks=[], xticks=[])
    axis.set_xlabel("head dimension", fontsize=10)
    for side in axis.spines.values():
        side.set_visible(False)


def readable_on(colour: Any) -> str:
    """Returns black or white, whichever can be read on a colour."""
    red, green, blue, _ = to_rgba(colour)
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"


main()
