"""Which learning rate for tables: held-out training images, as they are and moved.

python -m benchmarks.table_rates [--jobs 2] [--data TINY_IMAGENET_29]

Trains on part of the training images and scores on the rest; no test image is read. Each kind of
position is tried at several multiples of the model's learning rate, the absolute encoding too. Runs
are processes of one thread each. The results are in benchmarks/results/table_rates.json; runs that
it has are not repeated.
"""

import argparse
import json
import multiprocessing
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from irpe.files import write_text
from irpe.recipes.classification import laptop, laptop_64
from irpe.tasks.classify.config import ClassifierConfig
from irpe.tasks.classify.sources import Subset, open_split
from irpe.tasks.classify.task import ClassificationTask
from irpe.train.engine import Trainer
from irpe.train.evaluation import evaluate
from irpe.train.processes import make_accelerator
from irpe.train.run import Run
from irpe.train.task import Condition

RESULTS = Path(__file__).parent / "results" / "table_rates.json"
SHIFTS = (1, 2)
_HELD_OUT = {"embedded": 1000, "natural": 2000}
_TRAINED_ON = {"embedded": 5000, "natural": 6500}
_ROWS = {
    "product bias": ("product-bias-k", "none"),
    "K": ("product-contextual-k", "none"),
    "QKV": ("product-contextual-qkv", "none"),
    "absolute": ("none", "keep"),
}


@dataclass(frozen=True)
class Trial:
    """A run of the search.

    Args:
        images: "embedded" or "natural".
        row: What is learned.
        factor: Its learning rate, as a multiple of the model's.
        seed: The seed.
    """

    images: str
    row: str
    factor: float
    seed: int


def plan(has_natural: bool) -> list[Trial]:
    """Returns the runs, the embedded images first."""
    tables = ("product bias", "K")
    trials = [
        Trial("embedded", row, factor, seed)
        for seed in range(2)
        for row in _ROWS
        for factor in ((1, 3, 10) if row == "QKV" else (1, 3, 5, 10))
    ]
    trials += [
        Trial("natural", row, factor, 0)
        for row in (*tables, "absolute")
        for factor in (1, 3, 10)
        if has_natural
    ]
    return trials


def configure(trial: Trial, data: str) -> ClassifierConfig:
    """Returns the configuration of a run: the recipe, with a factor for its positions."""
    config = laptop()
    if trial.images == "natural":
        arguments = {
            "patch_size": 8, "embed_dim": 64, "depth": 4, "num_heads": 2, "mlp_ratio": 2,
        }  # fmt: skip
        config = laptop_64().replace(
            data=data, model_args=arguments, epochs=4, warmup_epochs=1, lr=4e-3
        )
    encoding, absolute = _ROWS[trial.row]
    rate = "absolute_lr" if trial.row == "absolute" else "table_lr"
    return config.replace(
        encoding=encoding,
        absolute=absolute,
        seed=trial.seed,
        eval_every=config.epochs,
        **{rate: float(trial.factor)},
    )


def run(trial: Trial, data: str) -> dict[str, Any]:
    """Returns the scores of a run on the images that were held out."""
    torch.set_num_threads(1)
    config = configure(trial, data)
    whole = open_split(config.data, "train")
    order = np.random.default_rng(0).permutation(len(whole)).tolist()
    held, kept = _HELD_OUT[trial.images], _TRAINED_ON[trial.images]
    val = Subset(whole, order[:held], whole.classes)
    train = Subset(whole, order[held : held + kept], whole.classes)
    task, accelerator = ClassificationTask(config), make_accelerator()
    task.sources = {"train": train, "val": val}
    with tempfile.TemporaryDirectory() as directory:
        model = Trainer(task, Run(directory), accelerator).fit().model
    conditions = [Condition(shift=shift) for shift in (0, *SHIFTS)]
    top1 = [each.score.value for each in evaluate((task, model), conditions, accelerator)]
    return {**asdict(trial), "top1": top1}


def _run_of(pair: tuple[Trial, str]) -> dict[str, Any]:
    return run(*pair)


def _show(line: dict[str, Any]) -> None:
    scores = " / ".join(f"{score:.1f}" for score in line["top1"])
    print(f"{line['images']:9} {line['row']:13} x{line['factor']:<4}", end=" ")
    print(f"seed {line['seed']}  {scores}", flush=True)


def main() -> None:
    """Runs the search, and writes each result as it comes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--data", default="", help="Tiny-ImageNet-29; without: embedded images.")
    given = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
    done = {(line["images"], line["row"], line["factor"], line["seed"]) for line in found}
    left = [t for t in plan(bool(given.data)) if tuple(asdict(t).values()) not in done]
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        for line in pool.imap(_run_of, [(trial, given.data) for trial in left]):
            found.append(line)
            write_text(RESULTS, json.dumps(found, indent=1) + "\n")
            _show(line)


if __name__ == "__main__":
    main()
