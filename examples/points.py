"""Relative position encodings without a grid: Fashion-MNIST as sets of points.

Each image becomes 96 points, drawn where it is bright, at real coordinates; a small transformer
sees how bright each one is and must find the class. Five ways to tell it where the points are, on
the test images as they are, rotated by 15 degrees and shifted. Chance is 10 %.

    python examples/points.py                       # about 12 minutes on one core
    python examples/points.py --data DIRECTORY      # with the idx files of Fashion-MNIST
    python examples/points.py --epochs 1 --seeds 1 --images 200 --test-images 100   # a look
"""

import argparse
import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import irpe
from irpe.ablation.cells import CellResult
from irpe.ablation.costs import RowCost
from irpe.ablation.rows import AblationRow
from irpe.ablation.statistics import RowResult, compare
from irpe.adapters.effect import mean_effect, measure_effect
from irpe.profile.count import count_parameters
from irpe.tasks.classify.sources import EMBEDDED, IdxSource
from irpe.train.task import Measure, Score

ROWS = {
    "no position": None,
    "linear absolute": "absolute",
    "euclidean": "euclidean-contextual-kv",
    "cross": "cross-contextual-kv",
    "product": "product-contextual-kv",
}
CONDITIONS = ("as they are", "rotated 15 degrees", "shifted 4 pixels")
TOP1 = (Measure("top1", "top-1", "%"),)
NUM_POINTS, PIXELS, BATCH, LR, WEIGHT_DECAY = 96, 28, 32, 2e-3, 0.05
SCALE = 0.5  # a patch is 2 pixels: the image is as wide as the paper's grid, 14


class Attention(nn.Module):
    """Self-attention over points, with a relative encoding or without."""

    def __init__(self, dim: int, num_heads: int, spec: str | None) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        if spec is not None:
            self.rpe = irpe.RelativePositionEncoding(spec, num_heads, dim // num_heads)

    def forward(self, x: Tensor, positions: irpe.Positions) -> Tensor:
        """Returns the attended points."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if hasattr(self, "rpe"):
            z = self.rpe(q, k, v, grid=positions)
        else:
            z = F.scaled_dot_product_attention(q, k, v)
        return self.proj(z.transpose(1, 2).flatten(2))


class PointTransformer(nn.Module):
    """A classifier of sets of points: two blocks of dimension 64, then the mean of all points."""

    def __init__(self, row: str | None, dim: int = 64, num_heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(1, dim)
        self.absolute = nn.Linear(2, dim) if row == "absolute" else None
        spec = None if row == "absolute" else row
        self.attentions = nn.ModuleList(Attention(dim, num_heads, spec) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * depth + 1))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
            for _ in range(depth)
        )
        self.head = nn.Linear(dim, 10)

    def forward(self, coordinates: Tensor, brightness: Tensor) -> Tensor:
        """Returns the scores of the classes; coordinates are (batch, points, 2), in pixels."""
        x = self.embed(brightness.unsqueeze(-1))
        if self.absolute is not None:
            x = x + self.absolute(coordinates / (PIXELS / 2) - 1)
        positions = irpe.Positions(irpe.Points(coordinates, scale=SCALE))  # of each image
        for index, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * index](x), positions)
            x = x + mlp(self.norms[2 * index + 1](x))
        return self.head(self.norms[-1](x).mean(1))


def draw_points(images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns points of images: row and column with their fraction, and how bright they are."""
    flat = images.flatten(1)
    chosen = torch.multinomial(flat + 1e-6, NUM_POINTS, replacement=True, generator=generator)
    corner = torch.stack([chosen // PIXELS, chosen % PIXELS], dim=-1)
    return corner + torch.rand(corner.shape, generator=generator), flat.gather(1, chosen)


def move(coordinates: Tensor, condition: str) -> Tensor:
    """Returns points under one of the conditions."""
    if condition == "shifted 4 pixels":
        return coordinates + 4
    if condition == "rotated 15 degrees":
        cos, sin = math.cos(math.radians(15)), math.sin(math.radians(15))
        turn = torch.tensor([[cos, sin], [-sin, cos]])
        return (coordinates - PIXELS / 2) @ turn + PIXELS / 2
    return coordinates


def read_images(directory: Path, part: str, count: int) -> tuple[Tensor, Tensor]:
    """Returns the first images of a part of Fashion-MNIST, from 0 to 1, and their classes."""
    source = IdxSource(directory, part)
    images = torch.tensor(source.images[:count]).float() / 255
    return images, torch.tensor(source.labels[:count]).long()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Returns AdamW; tables learn at a rate of their own, 5 times that of the weights."""
    if any(isinstance(m, irpe.RelativePositionEncoding) for m in model.modules()):
        return torch.optim.AdamW(irpe.parameter_groups(model, WEIGHT_DECAY, lr=LR))
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": weights}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, weight_decay=WEIGHT_DECAY)


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, seed: int) -> None:
    """Trains a model; every epoch draws other points."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = make_optimizer(model)
    steps = epochs * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in optimizer.param_groups], max(steps, 2), pct_start=0.1
    )
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=generator)
        for batch in order.split(BATCH)[: len(images) // BATCH]:
            logits = model(*draw_points(images[batch], generator))
            loss = F.cross_entropy(logits, labels[batch], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


def classify(model: nn.Module, images: Tensor, labels: Tensor, condition: str) -> tuple[bool, ...]:
    """Returns whether each test image is classified correctly; all models see the same points."""
    coordinates, brightness = draw_points(images, torch.Generator().manual_seed(0))
    coordinates = move(coordinates, condition)
    with torch.no_grad():
        parts = zip(coordinates.split(256), brightness.split(256), strict=True)
        found = torch.cat([model(*part).argmax(1) for part in parts])
    return tuple((found == labels).tolist())


def run(name: str, seed: int, arguments: argparse.Namespace) -> CellResult:
    """Trains and tests one row with one seed, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    start = time.process_time()
    model = PointTransformer(ROWS[name])
    train(model, *read_images(arguments.data, "train", arguments.images), arguments.epochs, seed)
    test = read_images(arguments.data, "t10k", arguments.test_images)
    model.eval()
    correct = tuple(classify(model, *test, condition) for condition in CONDITIONS)
    effect = None
    if ROWS[name] not in (None, "absolute"):
        points = draw_points(test[0][:64], torch.Generator().manual_seed(0))
        effect = mean_effect(measure_effect(model, *points))
    found = tuple(
        Score(TOP1, {"top1": 100 * sum(of) / len(of)}, tuple(100.0 * each for each in of))
        for of in correct
    )
    result = CellResult(name, seed, found, tuple(range(len(CONDITIONS))), effect)
    scores = ", ".join(f"{score.value:.1f}" for score in found)
    seconds = time.process_time() - start
    print(f"seed {seed}, {name}: {scores} % in {seconds:.0f} s of CPU time", flush=True)
    return result


def report(results: list[CellResult]) -> str:
    """Returns a table, and which differences the seeds and the images support."""
    rows: list[RowResult] = []
    for name in ROWS:
        own = tuple(result for result in results if result.row == name)
        cost = RowCost(count_parameters(PointTransformer(ROWS[name])), 0, 0.0)
        rows += [RowResult(name, own, cost, AblationRow(name, "none", "none"))] if own else []
    lines = ["| position | parameters | effect | " + " | ".join(CONDITIONS) + " |"]
    lines.append("| --- " * (3 + len(CONDITIONS)) + "|")
    for row in rows:
        effect = "" if row.effect is None else f"{row.effect:.0%}"
        scores = " | ".join(row.text(shift) for shift in range(len(CONDITIONS)))
        lines.append(f"| {row.name} | {row.cost.parameters:,} | {effect} | {scores} |")
    for shift, condition in enumerate(CONDITIONS):
        for row in rows:
            for other in rows[: rows.index(row)]:
                found = compare(row, other, shift)
                lines.append(
                    f"{condition}: {row.name} against {other.name}: {found}, {found.verdict}"
                )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=EMBEDDED, help="directory with the idx files")
    parser.add_argument("--images", type=int, default=6000, help="training images")
    parser.add_argument("--test-images", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    arguments = parser.parse_args()
    cells = [(name, seed, arguments) for seed in range(arguments.seeds) for name in ROWS]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, context) as pool:
        results = list(pool.map(run, *zip(*cells, strict=True)))
    print(report(results))


if __name__ == "__main__":
    main()
