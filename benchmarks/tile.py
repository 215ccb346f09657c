"""A picture of one tile of the Triton kernels, and how many table rows tiles hold.

python -m benchmarks.tile    # writes docs/figures/tile.png, prints the table of rows in a tile
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Rectangle

import irpe
from irpe.ops.impl.triton.buckets import pack_ids
from irpe.ops.impl.triton.configuration import tile_of

GRIDS = [((14, 14), 1), ((25, 34), 0), ((32, 32), 0), ((64, 64), 0)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("docs/figures/tile.png"))
    path = parser.parse_args().output
    for method in ("product", "cross", "euclidean"):
        for grid, prefix in GRIDS:
            print(describe(method, grid, prefix))
    draw(path)
    print(f"written to {path}")


def describe(method: str, grid: tuple[int, int], prefix: int) -> str:
    """Returns how many rows a tile of the kernel over queries holds, on average."""
    maps = irpe.bucket_maps(f"{method}-contextual-k", grid, prefix)
    rows = [m.num_used_buckets for m in maps]
    tile = tile_of("query", torch.float16, 64, num_terms=1)
    packed = pack_ids([m.compact_ids for m in maps], rows)
    ends = packed.rows_of_tiles(tile.queries, tile.keys).ends[..., -1].float()
    size = packed.ids.element_size()
    return (
        f"{method}, {grid[0]} x {grid[1]} + {prefix}: {ends.mean():.1f} of {sum(rows)} rows in a "
        f"tile of {tile.queries} x {tile.keys}, {size} bytes a pair"
    )


def draw(path: Path) -> None:
    """Draws the bucket ids, one tile of them, and what the tile looks up."""
    (bucket_map,) = irpe.bucket_maps("product-contextual-k", (14, 14), 1)
    ids, tile = bucket_map.compact_ids, tile_of("forward", torch.float16, 64, num_terms=1)
    first, left = 64, 96
    part = ids[first : first + tile.queries, left : left + tile.keys]
    figure, (whole, near, z) = plt.subplots(1, 3, figsize=(11, 4.2), layout="constrained")
    whole.imshow(ids, cmap="turbo", interpolation="nearest")
    whole.add_patch(
        Rectangle(
            (left, first), tile.keys, tile.queries, fill=False, edgecolor="black", linewidth=2
        )
    )
    whole.set(title="I(i, j): one byte for each pair", xlabel="key j", ylabel="query i")
    near.imshow(
        part, cmap="turbo", vmin=0, vmax=ids.max(), aspect="auto", interpolation="nearest",
        extent=(left, left + tile.keys, first + tile.queries, first),
    )  # fmt: skip
    near.set(title=f"a tile: {len(part.unique())} of {ids.max() + 1} rows occur", xlabel="key j")
    looked_up = torch.zeros(tile.queries, bucket_map.num_used_buckets)
    looked_up.scatter_add_(1, part.long(), torch.ones(part.shape))
    image = z.imshow(
        looked_up, cmap="Greys", aspect="auto", interpolation="nearest",
        extent=(0, looked_up.shape[1], first + tile.queries, first),
    )  # fmt: skip
    z.set(title="z of its queries: keys per row", xlabel="table row")
    figure.colorbar(image, ax=z)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
