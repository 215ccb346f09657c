"""What positions beyond one grid cost an attention: python -m benchmarks.positions.

A forward and backward pass of one attention with K relative to SDPA on the same tensors, and what
the bucket maps of a batch take beside it where each image has its own. CPU time of one thread,
medians of interleaved rounds.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import irpe
from benchmarks.timing import interleaved_medians, write_report

BATCH, HEADS, DIM = 8, 6, 64
GRID = irpe.Grid((14, 14))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("-o", "--output", type=Path, help="write a report here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kept = torch.stack([torch.randperm(196)[:98] for _ in range(BATCH)])
    kinds: dict[str, Callable[[], irpe.Positions]] = {
        "one grid": lambda: irpe.Positions(GRID),
        "pooled keys": lambda: irpe.Positions(GRID, irpe.PooledGrid((7, 7), stride=2)),
        "half the tokens of each image": lambda: irpe.Positions(irpe.Subset(GRID, kept)),
        "points of each image": lambda: irpe.Positions(
            irpe.Points(torch.rand(BATCH, 98, 2), scale=14)
        ),
    }
    results = {name: measure(make, arguments.rounds) for name, make in kinds.items()}
    for name, found in results.items():
        print(f"{name:30s} attention {found['attention']:.2f}  maps {found['maps']:.2f}")
    write_report(arguments.output, results)


def measure(make: Callable[[], irpe.Positions], rounds: int) -> dict[str, float]:
    """Returns the time of the attention, and that of new maps, relative to SDPA's."""
    positions = make()
    maps = irpe.bucket_maps("product-contextual-k", positions)
    queries, keys = maps[0].ids.shape[-2:]
    q = torch.randn(BATCH, HEADS, queries, DIM, requires_grad=True)
    k, v = (torch.randn(BATCH, HEADS, keys, DIM, requires_grad=True) for _ in range(2))
    table = torch.randn(1, maps[0].num_buckets, DIM, requires_grad=True)

    def backward(out: Tensor) -> None:
        out.sum().backward()

    runs = {
        "plain": lambda: backward(F.scaled_dot_product_attention(q, k, v)),
        "attention": lambda: backward(irpe.rpe_attention(q, k, v, maps, key_tables=[table])),
        "maps": lambda: irpe.bucket_maps("product-contextual-k", make()),
    }
    medians = interleaved_medians(runs, rounds)
    plain = medians["plain"]["cpu"]
    return {name: round(medians[name]["cpu"] / plain, 2) for name in ("attention", "maps")}


main()
