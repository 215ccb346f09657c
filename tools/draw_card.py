"""Draws docs/card.png, the picture that a link to the site shows: python tools/draw_card.py."""

from pathlib import Path

import matplotlib.pyplot as plt

import irpe
from irpe.core.encodings.spec import RPESpec
from irpe.core.grid import Grid
from irpe.viz.offset_colours import bucket_colours

FILE = Path(__file__).parents[1] / "docs/card.png"
SPEC, GRID, STAR = RPESpec.parse("product-contextual-k"), Grid((14, 14)), (6, 5)
LINES = 'irpe.equip(model,\n  "product-contextual-k")'


def main() -> None:
    """Draws the name, one sentence and one line of code beside a bucket map."""
    figure = plt.figure(figsize=(12, 6.3), facecolor="#1f2029")
    figure.text(0.05, 0.74, "irpe", fontsize=72, weight="bold", color="white")
    sentence = "Relative position encodings\nfor any vision transformer"
    figure.text(0.05, 0.49, sentence, fontsize=25, color="white", linespacing=1.3)
    figure.text(0.05, 0.23, LINES, fontsize=21, family="monospace", color="#5ad0bf")
    axis = figure.add_axes((0.52, 0.06, 0.46, 0.88))
    axis.imshow(bucket_picture())
    axis.plot(STAR[1], STAR[0], "*", color="#d62728", mec="white", ms=34)
    axis.axis("off")
    figure.savefig(FILE, dpi=100, facecolor=figure.get_facecolor())


def bucket_picture() -> list[list[tuple[float, ...]]]:
    """The colour of each patch, by its bucket seen from the star."""
    (buckets,) = irpe.bucket_maps(SPEC, GRID)
    (colours,) = bucket_colours(SPEC, GRID)
    rows, columns = GRID.shape
    ids = buckets.ids[STAR[0] * columns + STAR[1]].view(rows, columns)
    return [[colours[bucket] for bucket in row] for row in ids.tolist()]


main()
