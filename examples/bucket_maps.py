"""Draws which patches share a bucket, seen from the patch in the middle, for the four methods.

python examples/bucket_maps.py docs/buckets.png
"""

import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import irpe

GRID, REFERENCE = (14, 14), (7, 7)
METHODS = ["euclidean", "quantization", "cross", "product"]
TITLES = ["euclidean", "quantization", "cross, rows", "cross, columns", "product"]


def main(path: str) -> None:
    figure, axes = plt.subplots(1, 5, figsize=(10, 2.6))
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.02, top=0.82, wspace=0.06)
    maps = [m for method in METHODS for m in irpe.bucket_maps(f"{method}-bias-k", GRID)]
    query = REFERENCE[0] * GRID[1] + REFERENCE[1]
    for axis, title, bucket_map in zip(axes, TITLES, maps, strict=True):
        used, ids = bucket_map.ids[query].unique(return_inverse=True)
        draw(axis, ids.view(GRID))
        axis.set_title(f"{title}\n{len(used)} buckets", fontsize=10)
    figure.savefig(path, dpi=160)


def draw(axis: plt.Axes, ids) -> None:
    """Colours the buckets and draws a line wherever two neighbours differ."""
    axis.imshow(ids, cmap="cividis")
    for row in range(GRID[0]):
        for column in range(GRID[1]):
            if column and ids[row, column] != ids[row, column - 1]:
                axis.plot([column - 0.5] * 2, [row - 0.5, row + 0.5], "w-", linewidth=0.7)
            if row and ids[row, column] != ids[row - 1, column]:
                axis.plot([column - 0.5, column + 0.5], [row - 0.5] * 2, "w-", linewidth=0.7)
    axis.plot(REFERENCE[1], REFERENCE[0], "*", color="red", markersize=9)
    axis.set(xticks=[], yticks=[])


if __name__ == "__main__":
    main(sys.argv[1])
