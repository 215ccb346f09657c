"""When does equipping a pretrained model pay? Fine-tuning on few images, and what was trained.

python -m benchmarks.finetuning --weights WEIGHTS --data TINY_IMAGENET_29 [--only CELL ...]
    [--jobs 1] [--list] [--steps N]

WEIGHTS is that of benchmarks.relative. Every cell is a fine-tuning of its own on 20 images a class,
in a process of one thread, about 6 CPU minutes: the same steps, images and order for all. First the
cells "held-out ..." choose the learning rate of each row on training images that are not trained
on; then each row is trained at its best rate with three seeds and scored on validation images. The
results are in benchmarks/results/finetuning.json, and cells that it has are not repeated; a cell
that was interrupted begins again.
"""

import argparse
import json
import math
import multiprocessing
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import irpe
from benchmarks.relative import Place, read_images
from irpe.adapters.equipped import table_names
from irpe.files import write_text

RESULTS = Path(__file__).parent / "results" / "finetuning.json"
SEEDS, STEPS, BATCH = (0, 1, 2), 180, 16
SIZE, PER_CLASS, HELD_OUT, VALIDATION = (112, 112), 20, 10, 20
RATES = (3e-5, 1e-4)
BIAS, K = "product-bias-k+unshared", "product-contextual-k+unshared"


@dataclass(frozen=True)
class Row:
    """What is fine-tuned.

    Args:
        spec: The encoding, or "none".
        tables: Where tables start: "zero" beside the absolute encoding, "solved" in its place.
        trained: "all", the "head" alone, or "tables" and head.
        table_lr: The rate of tables, as a multiple of the model's.
    """

    spec: str = "none"
    tables: str = "zero"
    trained: str = "all"
    table_lr: float = 5.0


ROWS = {
    "plain": Row(),
    "head alone": Row(trained="head"),
    **{f"beside, x{factor}": Row(K, table_lr=factor) for factor in (1, 5, 50, 500)},
    "made relative": Row(K, "solved"),
    "made relative, bias": Row(BIAS, "solved"),
    "head and tables": Row(K, trained="tables", table_lr=500),
}


@dataclass(frozen=True)
class Cell:
    """One fine-tuning."""

    row: str
    seed: int
    lr: float
    is_held_out: bool

    @property
    def name(self) -> str:
        """The name in the results."""
        kind = "held-out" if self.is_held_out else f"seed {self.seed}"
        return f"{kind}: {self.row}, lr {self.lr:g}"


def cells(done: dict[str, Any]) -> list[Cell]:
    """Returns the choice of rates first, then three seeds at the rates that are chosen."""
    found = [Cell(row, 0, lr, True) for row in ROWS for lr in RATES]
    for row in ROWS:
        scores = {lr: done.get(Cell(row, 0, lr, True).name) for lr in RATES}
        if all(scores.values()):
            best = max(RATES, key=lambda lr: scores[lr]["accuracy"])
            found += [Cell(row, seed, best, False) for seed in SEEDS]
    return found


def build(place: Place, row: Row) -> nn.Module:
    """Returns the model with a head of zeros."""
    model = place.model()
    if row.tables == "solved":
        irpe.make_relative(model, place.unlabelled(64), row.spec)
    elif row.spec != "none":
        irpe.equip(model, row.spec)
    model.reset_classifier(29)
    nn.init.zeros_(model.head.weight)
    return model


def groups(model: nn.Module, row: Row, lr: float) -> list[dict[str, Any]]:
    """Returns what is trained; a head alone has a rate of its own, ten times that of weights."""
    head = list(model.head.parameters())
    of_head = {id(parameter) for parameter in head}
    if row.trained == "all":
        found = irpe.parameter_groups(model, 0.05, lr=lr, table_lr=row.table_lr)
        for group in found:
            group["params"] = [p for p in group["params"] if id(p) not in of_head]
        return [*found, {"params": head, "lr": 10 * lr, "weight_decay": 0.0}]
    tables = [model.get_parameter(name) for name in table_names(model)]
    model.requires_grad_(False)
    for parameter in (*head, *tables):
        parameter.requires_grad_(True)
    found = [{"params": head, "lr": 10 * lr, "weight_decay": 0.0}]
    if row.trained == "tables":
        found.append({"params": tables, "lr": row.table_lr * lr, "weight_decay": 0.0})
    return found


def run(place: Place, cell: Cell, steps: int) -> dict[str, Any]:
    """Returns the score of a fine-tuning, and what it took."""
    torch.set_num_threads(1)
    torch.manual_seed(cell.seed)
    row, start = ROWS[cell.row], time.process_time()
    images, labels = read_images(place.data, "train", 0, PER_CLASS, SIZE)
    model = build(place, row)
    optimizer = torch.optim.AdamW(groups(model, row, cell.lr), lr=cell.lr)
    rates = [group["lr"] for group in optimizer.param_groups]
    order = torch.Generator().manual_seed(cell.seed)
    batches: list[Tensor] = []
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            warm = min(1.0, (step + 1) / 20)
            group["lr"] = rate * warm * (1 + math.cos(math.pi * step / steps)) / 2
        if not batches:
            batches = list(torch.randperm(len(images), generator=order).split(BATCH))
        chosen = batches.pop()
        loss = nn.functional.cross_entropy(model(_flipped(images[chosen], order)), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
        optimizer.step()
    split = ("train", PER_CLASS, HELD_OUT) if cell.is_held_out else ("val", 0, VALIDATION)
    scored, true = read_images(place.data, *split, SIZE)
    with torch.no_grad():
        predicted = torch.cat([model(batch).argmax(1) for batch in scored.split(BATCH)])
    names = table_names(model)
    return {
        "accuracy": 100 * float((predicted == true).double().mean()),
        "loss": loss.item(),
        "trained parameters": sum(p.numel() for g in optimizer.param_groups for p in g["params"]),
        "largest element": max(
            (float(model.get_parameter(n).detach().abs().max()) for n in names), default=0
        ),
        "seconds": time.process_time() - start,
    }


def _flipped(images: Tensor, generator: torch.Generator) -> Tensor:
    is_flipped = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    return torch.where(is_flipped, images.flip(-1), images)


def _work(task: tuple[Place, Cell, int]) -> tuple[Cell, dict[str, Any]]:
    place, cell, steps = task
    return cell, run(place, cell, steps)


def read_results() -> dict[str, Any]:
    """Returns the results so far."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def main() -> None:
    """Makes the cells that are missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--only", nargs="+", metavar="CELL", help="these cells alone")
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--list", action="store_true", help="name the missing cells and leave")
    arguments = parser.parse_args()
    place = Place(arguments.weights, arguments.data)

    def missing() -> list[Cell]:
        done = read_results()
        left = [cell for cell in cells(done) if cell.name not in done]
        return [cell for cell in left if not arguments.only or cell.name in arguments.only]

    if arguments.list:
        print("\n".join(cell.name for cell in missing()))
        return
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        while left := missing():
            tasks = [(place, cell, arguments.steps) for cell in left]
            for cell, result in pool.imap_unordered(_work, tasks):
                result = {**result, "steps": arguments.steps}
                write_text(
                    RESULTS, json.dumps({**read_results(), cell.name: result}, indent=1) + "\n"
                )
                print(cell.name, result, flush=True)


if __name__ == "__main__":
    main()
