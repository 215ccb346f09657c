"""What a pretrained model that was made relative can and cannot do.

python -m benchmarks.relative --weights WEIGHTS --data TINY_IMAGENET_29 [--only CELL ...] [--list]

WEIGHTS is vit_small_patch14_reg4_dinov2.safetensors: a DINOv2 ViT-S/14 with registers that others
trained further. A linear head is fitted once, on features of the original at 112 pixels, and stays
frozen: it classifies what each converted model gives it. Cells are named MODEL; each makes a model
and scores it. The results are in docs/results/relative.json, and cells that it has are not
repeated. One thread; times are CPU times.
"""

import argparse
import copy
import json
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn

import irpe
from irpe.adapters.equipped import equipped_attentions
from irpe.files import write_text
from irpe.relative import solve
from irpe.tasks.classify.sources import open_split

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "relative.json"
NAME = "vit_small_patch14_reg4_dinov2"
SIZES = ((98, 98), (112, 112), (126, 126), (98, 196), (168, 168), (224, 224))  # height, width
BIAS, K, SHARED = (
    "product-bias-k+unshared", "product-contextual-k+unshared", "product-contextual-k",
)  # fmt: skip
_PER_CLASS = {"head": 30, "solve": 9, "val": 20, "sizes": 10}
MEAN, STD = (
    torch.tensor(timm.data.constants.__dict__[f"IMAGENET_DEFAULT_{n}"]) for n in ("MEAN", "STD")
)


@cache
def read_images(
    data: str, split: str, first: int, count: int, size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Returns images of each class, resized to (height, width), and their classes."""
    source = open_split(data, split)
    each = len(source) // len(source.classes)
    images, labels = [], []
    for index in range(len(source)):
        if first <= index % each < first + count:
            image, label = source.read(index)
            resized = image.convert("RGB").resize(size[::-1], Image.Resampling.BICUBIC)
            pixels = torch.from_numpy(np.array(resized)) / 255
            images.append(((pixels - MEAN) / STD).permute(2, 0, 1))
            labels.append(label)
    return torch.stack(images), torch.tensor(labels)


@dataclass(frozen=True)
class Place:
    """Where weights and images are."""

    weights: Path
    data: str

    def model(self) -> nn.Module:
        """Returns the original, whose positions are resampled from 37 x 37 to each input's grid."""
        model = timm.create_model(NAME, num_classes=0, dynamic_img_size=True)
        state = {name: value.float() for name, value in load_file(self.weights).items()}
        model.load_state_dict(checkpoint_filter_fn(state, model))
        return model.eval()

    def unlabelled(self, count: int, seed: int = 0, size: tuple[int, int] = (112, 112)) -> Tensor:
        """Returns training images that the head was not fitted on, in a random order."""
        images, _ = read_images(self.data, "train", 100, _PER_CLASS["solve"], size)
        generator = torch.Generator().manual_seed(seed)
        return images[torch.randperm(len(images), generator=generator)[:count]]


@cache
def fit_head(place: Place) -> Callable[[Tensor], Tensor]:
    """Returns a linear classifier of the original's features at 112 pixels."""
    images, labels = read_images(place.data, "train", 0, _PER_CLASS["head"], (112, 112))
    found = features(place.model(), images)
    mean, std = found.mean(0), found.std(0)
    linear = nn.Linear(found.shape[1], int(labels.max()) + 1)
    nn.init.zeros_(linear.weight), nn.init.zeros_(linear.bias)
    optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = linear((found - mean) / std)
        value = nn.functional.cross_entropy(logits, labels)
        value = value + 0.05 * linear.weight.square().sum()
        value.backward()
        return value.detach()

    optimizer.step(loss)
    linear.requires_grad_(False)
    return lambda x: linear((x - mean) / std)


@torch.no_grad()
def features(model: nn.Module, images: Tensor) -> Tensor:
    """Returns the class token of each image."""
    return torch.cat([model(batch) for batch in images.split(16)])


def accuracy(place: Place, model: nn.Module) -> dict[str, float]:
    """Returns the percentage of 580 validation images that the frozen head classifies correctly."""
    return {"accuracy": _accuracy(place, model, (112, 112), _PER_CLASS["val"])}


def at(*sizes: tuple[int, int]) -> Callable[[Place, nn.Module], dict[str, float]]:
    """Returns what scores a model on the same 290 images at some sizes, in bfloat16 autocast."""

    def score(place: Place, model: nn.Module) -> dict[str, float]:
        fit_head(place)  # in float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return {
                f"{size[0]} x {size[1]}": _accuracy(place, model, size, _PER_CLASS["sizes"])
                for size in sizes
            }

    return score


def _accuracy(place: Place, model: nn.Module, size: tuple[int, int], per_class: int) -> float:
    images, labels = read_images(place.data, "val", 0, per_class, size)
    found = fit_head(place)(features(model, images).float()).argmax(1)
    return 100 * float((found == labels).double().mean())


def shifts(place: Place, model: nn.Module) -> dict[str, float]:
    """Returns how well a patch's last token agrees before and after a move by whole patches.

    The same image of 168 pixels is seen through two windows of 112; patches that both see are
    compared. The cosine is of tokens less their mean over all images and patches.
    """
    images = place.unlabelled(32, 1, (168, 168))
    found = {}
    with torch.no_grad():
        grids = {
            (r, c): torch.cat([
                model.forward_features(batch[..., 14 * r :, 14 * c :][..., :112, :112])[:, 5:]
                for batch in images.split(16)
            ]).unflatten(1, (8, 8))
            for r, c in ((0, 0), (1, 1), (2, 2), (4, 4))
        }  # fmt: skip
    base = grids[0, 0]
    mean = base.mean((0, 1, 2))
    for (r, c), other in grids.items():
        if r:
            one, two = base[:, r:, c:] - mean, other[:, : 8 - r, : 8 - c] - mean
            found[f"moved by {r}"] = float(nn.functional.cosine_similarity(one, two, dim=-1).mean())
    return found


def probe(place: Place, model: nn.Module) -> dict[str, float]:
    """Returns R2 of row and column in the tokens that enter each attention."""
    found = irpe.position_probe(model, place.unlabelled(96)).attentions
    return {
        f"{each.name}, {axis}": getattr(each, axis) for each in found for axis in ("row", "column")
    }


def plain(place: Place) -> tuple[nn.Module, dict[str, Any]]:
    """Returns the original."""
    return place.model(), {}


def without(place: Place) -> tuple[nn.Module, dict[str, Any]]:
    """Returns the original without its absolute encoding."""
    return irpe.equip(place.model(), "none", absolute="none"), {}


def converted(
    spec: str,
    count: int = 64,
    seed: int = 0,
    sizes: tuple[tuple[int, int], ...] = ((112, 112),),
    system: type[solve.ScoreSystem] = solve.ScoreSystem,
    newton_steps: int = 2,
) -> Callable[[Place], tuple[nn.Module, dict[str, Any]]]:
    """Returns what makes the model relative, on `count` images in all."""

    def make(place: Place) -> tuple[nn.Module, dict[str, Any]]:
        model, facts = _convert(place, spec, count, seed, sizes, system, newton_steps)
        return copy.deepcopy(model), dict(facts)

    return make


@lru_cache(maxsize=2)
def _convert(
    place: Place, spec: str, count: int, seed: int, sizes: Any, system: Any, newton_steps: int
) -> tuple[nn.Module, dict[str, Any]]:
    images = [place.unlabelled(count // len(sizes), seed, size) for size in sizes]
    model, start = place.model(), time.process_time()
    with patch("irpe.relative.make_relative.ScoreSystem", system):
        result = irpe.make_relative(model, images, spec, seed=seed, newton_steps=newton_steps)
    return model, {
        "seconds": time.process_time() - start,
        "peak GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "divergence": [each.divergence_after for each in result.attentions],
        "divergence before": [each.divergence_before for each in result.attentions],
        "explained": [each.explained for each in result.attentions],
        "largest": [each.largest_element for each in result.attentions],
        "cosine": result.after.cosine,
        "R2": result.after.r2,
    }


class Uniform(solve.ScoreSystem):
    """A control: every key counts the same in the least squares."""

    def weights(self, batch: solve.Batch) -> Tensor:
        """Returns rows of equal weights."""
        return torch.full_like(solve.attention(batch.original), 1 / batch.original.k.shape[2])


def scaled(factor: float, spec: str) -> Callable[[Place], tuple[nn.Module, dict[str, Any]]]:
    """Returns the model solved at 112 pixels, whose offsets are divided by `factor`."""

    def make(place: Place) -> tuple[nn.Module, dict[str, Any]]:
        model, facts = converted(spec)(place)
        found: dict[Any, irpe.Positions] = {}

        def scale(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            grid = irpe.Grid.of(kwargs["grid"])
            if grid not in found:
                points = irpe.Points(grid.coordinates().double() / factor)
                found[grid] = irpe.Positions(points, num_prefix_tokens=5)
            return args, {**kwargs, "grid": found[grid]}

        for attention in equipped_attentions(model).values():
            rpe: Any = attention.rpe
            rpe.register_forward_pre_hook(scale, with_kwargs=True)
        return model, facts

    return make


def tempered(factor: float, spec: str) -> Callable[[Place], tuple[nn.Module, dict[str, Any]]]:
    """Returns the model solved at 112 pixels, with all scores multiplied by `factor`."""

    def make(place: Place) -> tuple[nn.Module, dict[str, Any]]:
        model, facts = converted(spec)(place)
        with torch.no_grad():
            for block in model.blocks:
                block.attn.qkv.weight[:384] *= factor
                block.attn.qkv.bias[:384] *= factor
                for table in block.attn.rpe.bias_tables:
                    table *= factor
        return model, facts

    return make


def recalibrated(
    make: Callable[[Place], tuple[nn.Module, dict[str, Any]]], seed: int, trained: str = "all"
) -> Callable[[Place], tuple[nn.Module, dict[str, Any]]]:
    """Returns the model after 70 steps of distillation on 12 images each."""

    def distilled(place: Place) -> tuple[nn.Module, dict[str, Any]]:
        model, facts = make(place)
        start = time.process_time()
        result = irpe.recalibrate(
            model, place.model(), place.unlabelled(224), steps=70, seed=seed, trained=trained
        )
        cost = time.process_time() - start
        return model, {**facts, "recalibration seconds": cost, "tokens R2": result.after.r2}

    return distilled


def zeros(spec: str) -> Callable[[Place], tuple[nn.Module, dict[str, Any]]]:
    """Returns the original without its absolute encoding, with tables of zeros."""
    return lambda place: (irpe.equip(place.model(), spec, absolute="none"), {})


_SIZES, _168 = at(*SIZES), at((168, 168))
Cell = tuple[Callable[[Place], tuple[nn.Module, dict[str, Any]]], list[Any]]
CELLS: dict[str, Cell] = {
    "original": (plain, [accuracy, shifts, probe]),
    "no position": (without, [accuracy, shifts, probe]),
    "bias": (converted(BIAS), [accuracy]),
    "K": (converted(K), [accuracy]),
    "bias, shared": (converted("product-bias-k"), [accuracy]),
    "K, shared": (converted(SHARED), [accuracy]),
    "QK, shared": (converted("product-contextual-qk"), [accuracy]),
    "original, sizes": (plain, [_SIZES]),
    "no position, sizes": (without, [_SIZES]),
    "bias, sizes": (converted(BIAS), [_SIZES]),
    "K, shared, sizes": (converted(SHARED), [_SIZES]),
    "bias, positions": (converted(BIAS), [shifts, probe]),
    "K, shared, positions": (converted(SHARED), [shifts, probe]),
    **{f"{name}, {n} images": (converted(spec, n), [accuracy])
       for n in (16, 256) for name, spec in (("bias", BIAS), ("K, shared", SHARED))},
    **{f"{name}, seed {n}": (converted(spec, seed=n), [accuracy])
       for n in (1, 2) for name, spec in (("bias", BIAS), ("K, shared", SHARED))},
    "bias, second order": (converted(BIAS, newton_steps=0), [accuracy]),
    "K, shared, second order": (converted(SHARED, newton_steps=0), [accuracy]),
    "bias, uniform weights": (converted(BIAS, newton_steps=0, system=Uniform), [accuracy]),
    "bias at 168": (converted(BIAS, 32, sizes=((168, 168),)), [_168]),
    "K, shared, at 168": (converted(SHARED, 32, sizes=((168, 168),)), [_168]),
    "bias at 112 and 168": (converted(BIAS, sizes=((112, 112), (168, 168))), [accuracy, _168]),
    "bias, more buckets, at 168": (
        converted("product-bias-k@clip11+unshared", 32, sizes=((168, 168),)), [_168],
    ),
    "bias, offsets scaled": (scaled(12 / 8, BIAS), [_168]),
    "bias, temperature 1.1": (tempered(1.1, BIAS), [_168]),
    "bias, temperature 1.2": (tempered(1.2, BIAS), [_168]),
    "KV, shared": (converted("product-contextual-kv"), [accuracy]),
    "bias, recalibrated": (recalibrated(converted(BIAS), 0), [accuracy, _168]),
    "K, shared, recalibrated": (recalibrated(converted(SHARED), 0), [accuracy, _168]),
    "no position, recalibrated": (recalibrated(zeros(BIAS), 0), [accuracy]),
    "bias, tables recalibrated": (recalibrated(converted(BIAS), 0, "tables"), [accuracy]),
    **{
        f"{name}, recalibrated, seed {n}": (recalibrated(converted(spec, seed=n), n), [accuracy])
        for n in (1, 2) for name, spec in (("bias", BIAS), ("K, shared", SHARED))
    },
}  # fmt: skip


def main() -> None:
    """Makes the cells that are missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument(
        "--only", nargs="+", choices=CELLS, metavar="CELL", help="these cells alone"
    )
    parser.add_argument("--list", action="store_true", help="name the cells and leave")
    arguments = parser.parse_args()
    names = arguments.only or list(CELLS)
    if arguments.list:
        print("\n".join(names))
        return
    torch.set_num_threads(1)
    place = Place(arguments.weights, arguments.data)
    for name in names:
        done = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        if name in done:
            continue
        make, scores = CELLS[name]
        torch.manual_seed(0)
        model, facts = make(place)
        for score in scores:
            facts |= score(place, model)
        done = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        write_text(RESULTS, json.dumps({**done, name: facts}, indent=1) + "\n")
        print(
            name,
            {key: value for key, value in facts.items() if isinstance(value, float)},
            flush=True,
        )


if __name__ == "__main__":
    main()
