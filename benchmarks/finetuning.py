"""When does equipping a pretrained model pay? Fine-tuning on few images.

python -m benchmarks.finetuning --weights WEIGHTS --tiny-imagenet DIR --camvid DIR
python -m benchmarks.finetuning --report

WEIGHTS is that of benchmarks.relative. Classification of 29 classes of Tiny-ImageNet (10 images a
class, 112 pixels) and segmentation of CamVid (184 images of 112 x 154 pixels, a linear head on the
patch tokens), each 3 epochs in batches of 16, in bfloat16 autocast. Every run is scored on held-out
images (of the training images of Tiny-ImageNet, of CamVid's `val`), which choose rates with seed 0,
and on test images (`val` and `test`). The plain model, the one that was made relative and the head
alone choose the rate of the model; tables beside the absolute encoding, or with the head alone,
choose their own on top of it. Results are in docs/results/finetuning.json; runs that it has are not
repeated. One thread; times are CPU times.
"""

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import irpe
from benchmarks.relative import MEAN, STD, Place, read_images
from irpe.ablation.verdicts import judge
from irpe.adapters.effect import mean_effect, measure_effect
from irpe.adapters.equipped import table_names
from irpe.files import write_text

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "finetuning.json"
SEEDS, EPOCHS, BATCH = (0, 1, 2), 3, 16
RATES, FACTORS = (1e-5, 3e-5, 1e-4), (5.0, 500.0, 5000.0)
SPEC = "product-contextual-k"
HEAD_RATES = (1e-4, 1e-3, 1e-2)  # of a head alone, before the factor
HEAD_FACTOR = 10  # the rate of the new head, as a multiple of the model's
IGNORED = 11
TASKS = ("tiny-imagenet-29", "camvid")

Split = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Run:
    """One fine-tuning.

    Args:
        task: What is learned.
        row: "plain", "head alone", "beside" (tables of zeros beside the absolute encoding),
            "head and tables" (the same, and nothing else is trained) or "made relative" (solved
            tables in its place).
        lr: The rate of the model.
        factor: The rate of tables, as a multiple of `lr`.
        seed: The order of images, and how they are flipped.
    """

    task: str
    row: str
    lr: float
    factor: float
    seed: int

    @property
    def name(self) -> str:
        """The name in the results."""
        tables = "" if self.row in ("plain", "head alone") else f", tables x{self.factor:g}"
        return f"{self.task}: {self.row}, lr {self.lr:g}{tables}, seed {self.seed}"


def find_runs(done: dict[str, Any]) -> Iterator[Run]:
    """Yields the runs in order; what a choice needs must be done before it goes on."""

    def best(runs: list[Run]) -> Run:
        return max(runs, key=lambda run: done[run.name]["held-out"])

    chosen: dict[str, list[Run]] = {}
    heads: dict[str, Run] = {}
    for seed in SEEDS:
        for task in TASKS:
            if seed == 0:
                plain = [Run(task, "plain", lr, 5, 0) for lr in RATES]
                relative = [Run(task, "made relative", lr, 5, 0) for lr in RATES[1:]]
                alone = [Run(task, "head alone", lr, 5, 0) for lr in HEAD_RATES]
                yield from (*plain, *relative, *alone)
                beside = [Run(task, "beside", best(plain).lr, factor, 0) for factor in FACTORS]
                yield from beside
                heads[task] = best(alone)
                found = [best(plain), beside[0], best(beside), best(relative), heads[task]]
                chosen[task] = list(dict.fromkeys(found))
            for run in chosen[task]:
                yield replace(run, seed=seed)
    for task in TASKS:
        lr = heads[task].lr
        tables = [Run(task, "head and tables", lr, factor, 0) for factor in (50.0, 500.0)]
        yield from tables
        for seed in SEEDS:
            yield replace(best(tables), seed=seed)


@dataclass(frozen=True)
class Data:
    """Where weights and images are."""

    place: Place
    camvid: Path

    def split(self, task: str, split: str) -> Split:
        """Returns the images of a split, and their classes or the class of each pixel."""
        if task == "camvid":
            return read_camvid(self.camvid, "val" if split == "held-out" else split)
        where = {"train": ("train", 0, 10), "held-out": ("train", 10, 10), "test": ("val", 0, 20)}
        return read_images(self.place.data, *where[split], (112, 112))

    def unlabelled(self, task: str) -> Tensor:
        """Returns the images that tables are solved on."""
        if task == "camvid":
            return self.split(task, "train")[0][torch.randperm(184)[:64]]
        return self.place.unlabelled(64)


@cache
def read_camvid(folder: Path, split: str) -> Split:
    """Returns images of 112 x 154 pixels and labels of 180 x 240; but for `test` every other."""
    images, labels = [], []
    files = sorted((folder / "images" / split).glob("*.jpg"))
    for file in files if split == "test" else files[::2]:
        resized = Image.open(file).convert("RGB").resize((154, 112), Image.Resampling.BICUBIC)
        images.append(((torch.from_numpy(np.array(resized)) / 255 - MEAN) / STD).permute(2, 0, 1))
        label = Image.open(folder / "labels" / split / f"{file.stem}.png")
        labels.append(torch.from_numpy(np.array(label)).long())
    return torch.stack(images), torch.stack(labels)


class Segmenter(nn.Module):
    """A backbone and a linear classifier of its patch tokens."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Conv2d(384, IGNORED, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Returns the logits of each patch."""
        rows, columns = (size // 14 for size in images.shape[2:])
        patches = self.backbone.forward_features(images)[:, 5:].unflatten(1, (rows, columns))
        return self.head(patches.permute(0, 3, 1, 2))


def build(data: Data, run: Run) -> Any:
    """Returns the model with a head of zeros."""
    model: Any = data.place.model()
    if run.row == "made relative":
        model = copy.deepcopy(make_relative(data, run.task))
    elif run.row in ("beside", "head and tables"):
        irpe.equip(model, SPEC)
    if run.task == "camvid":
        model = Segmenter(model)
    else:
        model.reset_classifier(29)
    for parameter in model.head.parameters():
        nn.init.zeros_(parameter)
    return model


@cache
def make_relative(data: Data, task: str) -> Any:
    """Returns the backbone with solved tables: the same for every seed."""
    model = data.place.model()
    torch.manual_seed(0)
    irpe.make_relative(model, data.unlabelled(task), SPEC)
    return model


def make_groups(model: Any, run: Run) -> list[dict[str, Any]]:
    """Returns what is trained, in groups with their rates."""
    head = list(model.head.parameters())
    found = [{"params": head, "lr": HEAD_FACTOR * run.lr, "weight_decay": 0.0}]
    if run.row in ("head alone", "head and tables"):
        tables = [model.get_parameter(name) for name in table_names(model)]
        model.requires_grad_(False)
        for parameter in (*head, *tables):
            parameter.requires_grad_(True)
        return [*found, {"params": tables, "lr": run.factor * run.lr, "weight_decay": 0.0}]
    of_head = {id(parameter) for parameter in head}
    for group in irpe.parameter_groups(model, 0.05, lr=run.lr, table_lr=run.factor):
        found.append({**group, "params": [p for p in group["params"] if id(p) not in of_head]})
    return found


def train(model: Any, run: Run, images: Tensor, labels: Tensor) -> None:
    """Trains a model."""
    optimizer = torch.optim.AdamW(make_groups(model, run))
    rates = [group["lr"] for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(run.seed)
    batches = [
        batch
        for _ in range(EPOCHS)
        for batch in torch.randperm(len(images), generator=generator).split(BATCH)
    ]
    for step, batch in enumerate(batches):
        warm = min(1.0, (step + 1) / 10)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * warm * (1 + math.cos(math.pi * step / len(batches))) / 2
        flipped = torch.rand(len(batch), generator=generator) < 0.5
        x, y = images[batch], labels[batch]
        x = torch.where(flipped.view(-1, 1, 1, 1), x.flip(-1), x)
        if run.task == "camvid":
            y = torch.where(flipped.view(-1, 1, 1), y.flip(-1), y)
        loss = F.cross_entropy(predict(model, run.task, x), y, ignore_index=IGNORED_OF[run.task])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
        optimizer.step()


IGNORED_OF = {"camvid": IGNORED, "tiny-imagenet-29": -100}


def predict(model: Any, task: str, images: Tensor) -> Tensor:
    """Returns the logits of images, or of their pixels."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(images)
    logits = logits.float()
    return F.interpolate(logits, size=(180, 240), mode="bilinear") if task == "camvid" else logits


@torch.no_grad()
def score(model: Any, task: str, images: Tensor, labels: Tensor) -> tuple[float, list[float]]:
    """Returns accuracy or mIoU, and a value for each image: whether it, or how many pixels."""
    values, confusion = list[float](), torch.zeros(IGNORED, IGNORED, dtype=torch.float64)
    for x, y in zip(images.split(BATCH), labels.split(BATCH), strict=True):
        found = predict(model, task, x).argmax(1)
        if task != "camvid":
            values += (found == y).double().tolist()
            continue
        for one, true in zip(found, y, strict=True):
            one, true = one[true != IGNORED], true[true != IGNORED]
            values.append(round(float((one == true).double().mean()), 4))
            pairs = torch.bincount(true * IGNORED + one, minlength=IGNORED**2)
            confusion += pairs.view(IGNORED, IGNORED)
    if task != "camvid":
        return 100 * fmean(values), values
    intersection = confusion.diag()
    union = confusion.sum(0) + confusion.sum(1) - intersection
    return 100 * float((intersection / union)[union > 0].mean()), values


def fine_tune(data: Data, run: Run) -> dict[str, Any]:
    """Returns the scores of a fine-tuning, and what it took."""
    start = time.process_time()
    torch.manual_seed(run.seed)
    model = build(data, run)
    train(model, run, *data.split(run.task, "train"))
    model.eval()
    images, labels = data.split(run.task, "test")
    test, values = score(model, run.task, images, labels)
    tables = [model.get_parameter(name).detach() for name in table_names(model)]
    facts: dict[str, Any] = {
        "held-out": 0.0
        if run.seed
        else score(model, run.task, *data.split(run.task, "held-out"))[0],
        "test": test,
        "mean of images": 100 * fmean(values),
        "seconds": time.process_time() - start,
    }
    if tables:
        facts["effect"] = mean_effect(measure_effect(model, images[:BATCH]))
        facts["largest element"] = max(float(table.abs().max()) for table in tables)
    return {**facts, "values": values}


def report(done: dict[str, Any]) -> str:
    """Returns the scores of each row, and how they differ from the plain model's."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, result in done.items():
        rows.setdefault(name.rsplit(", seed", 1)[0], []).append(result)
    lines = []
    for task in TASKS:
        own = {name: found for name, found in rows.items() if name.startswith(f"{task}: ")}
        plain = [name for name in own if name.startswith(f"{task}: plain")]
        base = own[max(plain, key=lambda name: (len(own[name]), own[name][0]["held-out"]))]
        for name, found in own.items():
            scores = ", ".join(f"{each['test']:.1f}" for each in found)
            texts = [name, f"held out {found[0]['held-out']:.1f}", f"test {scores}"]
            if len(found) > 1:
                texts.append(f"mean {fmean(each['test'] for each in found):.1f}")
                texts.append(compare_text(found, base))
            texts += [
                f"{key} {100 * found[0][key]:.2f} %"
                if key == "effect"
                else f"{key} {found[0][key]:.3g}"
                for key in ("effect", "largest element", "seconds")
                if key in found[0]
            ]
            lines.append(" | ".join(texts))
    return "\n".join(lines)


def compare_text(found: list[dict[str, Any]], base: list[dict[str, Any]]) -> str:
    """Returns the difference to other runs, by the rule of `irpe ablate`."""
    texts = []
    for key in ("test", "mean of images"):
        images = np.mean([each["values"] for each in found], 0)
        images = 100 * (images - np.mean([each["values"] for each in base], 0))
        error = float(images.std(ddof=1)) / math.sqrt(len(images))
        own, other = ([each[key] for each in rows] for rows in (found, base))
        has_error = own == [each["mean of images"] for each in found]  # mIoU is not a mean
        difference = judge(own, other, error if has_error else 0.0, len(images))
        half = difference.high - difference.value
        texts.append(f"{key} {difference.value:+.1f} ± {half:.1f} ({difference.verdict})")
    return ", ".join(texts)


def main() -> None:
    """Makes the runs that are missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--tiny-imagenet", default="")
    parser.add_argument("--camvid", type=Path)
    parser.add_argument("--report", action="store_true", help="print the results and leave")
    arguments = parser.parse_args()
    done = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else {}
    if arguments.report:
        print(report(done))
        return
    torch.set_num_threads(1)
    data = Data(Place(arguments.weights, arguments.tiny_imagenet), arguments.camvid)
    for run in find_runs(done):
        if run.name not in done:
            done[run.name] = fine_tune(data, run)
            content = {"command": __doc__.splitlines()[2], "runs": done}
            write_text(RESULTS, json.dumps(content) + "\n")
            values = {k: round(v, 4) for k, v in done[run.name].items() if k != "values"}
            print(run.name, values, flush=True)


if __name__ == "__main__":
    main()
