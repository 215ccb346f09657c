"""Draws the pictures of docs/how-to/positions.md: python tools/draw_positions.py."""

from pathlib import Path

import torch

import irpe
from irpe import viz
from irpe.tasks.classify.sources import EMBEDDED, IdxSource

FOLDER = Path(__file__).parents[1] / "docs/figures"
SPECS = ("euclidean-contextual-k", "product-contextual-k")


def kept_tokens() -> irpe.Positions:
    """Half of the patches of 14 x 14, as patch dropout keeps them."""
    kept = torch.randperm(196, generator=torch.Generator().manual_seed(0))[:98]
    return irpe.Positions(irpe.Subset((14, 14), kept))


def points_of_an_image() -> irpe.Positions:
    """The first test image as points, in patches of 2 pixels."""
    image = torch.tensor(IdxSource(EMBEDDED, "t10k").images[0]).float().flatten()
    generator = torch.Generator().manual_seed(0)
    chosen = torch.multinomial(image, 96, replacement=True, generator=generator)
    corner = torch.stack([chosen // 28, chosen % 28], dim=-1)
    points = corner + torch.rand(corner.shape, generator=generator)
    return irpe.Positions(irpe.Points(points, scale=0.5))


def image_of_batch(shape: tuple[int, int], num_tokens: int) -> irpe.Positions:
    """One image of a batch of several shapes, without its padding."""
    points = irpe.Points.of_grids(torch.tensor([shape]), num_tokens)
    assert points.is_token is not None
    return irpe.Positions(irpe.Points(points.coordinates[points.is_token]))


def main() -> None:
    pictures = {
        "pooled": irpe.Positions((14, 14), irpe.PooledGrid((7, 7), stride=2)),
        "kept": kept_tokens(),
        "wide": image_of_batch((5, 12), 70),
        "tall": image_of_batch((10, 7), 70),
        "points": points_of_an_image(),
    }
    for name, positions in pictures.items():
        specs = SPECS[1:] if name in ("wide", "tall") else SPECS
        figure = viz.plot_positions(positions, specs, [(100, 0)] if name == "tall" else None)
        viz.save_figure(figure, FOLDER / f"positions-{name}.png")


main()
