"""What the encodings cost a whole model: time relative to the same model without one.

python -m benchmarks.models
python -m benchmarks.models --model laptop --rounds 9
python -m benchmarks.models --model deit_tiny_patch16_224 --batch 4
python -m benchmarks.models --threads 2    # by the clock, as people run it

CPU times of one thread, or by the clock with several; medians of interleaved rounds. The model
"laptop" is the ViT that `irpe ablate` trains on its embedded images, with the batch of its recipe.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import timm
import torch

import irpe
from benchmarks.timing import interleaved_medians, ratios_to, write_report
from irpe.adapters.equip import table_names
from irpe.recipes.classification import laptop
from irpe.tasks.classify.task import build_model

ENCODINGS = {
    "bias K": "product-bias-k",
    "K": "product-contextual-k",
    "QK": "product-contextual-qk",
    "QKV": "product-contextual-qkv",
    "cross K": "cross-contextual-k",
}
PASSES = ("inference", "training step")
KINDS = {"cpu": "CPU time of one thread", "wall": "time by the clock"}


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    results = {
        model: measure(model, arguments.batch, arguments.rounds)
        for model in arguments.model or ("deit_small_patch16_224", "laptop")
    }
    write_report(arguments.output, {"threads": arguments.threads, **results})


def measure(name: str, batch: int | None, rounds: int) -> dict[str, object]:
    """Returns the ratios of CPU and wall time to the plain model's, for each pass."""
    torch.manual_seed(0)
    models = {"plain": make_model(name)}
    for label, spec in ENCODINGS.items():
        models[label] = irpe.equip(make_model(name), spec)
        randomize_tables(models[label])
    batch = batch or (laptop().batch_size if name == "laptop" else 8)
    plain = models["plain"]
    channels, size = plain.patch_embed.proj.in_channels, plain.patch_embed.img_size
    images = torch.randn(batch, channels, *size)
    found: dict[str, object] = {"batch": batch}
    kind = "cpu" if torch.get_num_threads() == 1 else "wall"
    print(f"{name}, batch {batch}: {KINDS[kind]} relative to the plain model")
    print(f"{'':14}" + "".join(f"{label:>9}" for label in ENCODINGS))
    for what in PASSES:
        runs = {label: make_run(model, images, what) for label, model in models.items()}
        medians = interleaved_medians(runs, rounds)
        found[what] = {each: ratios_to("plain", medians, each) for each in KINDS}
        row = ratios_to("plain", medians, kind).values()
        print(f"{what:14}" + "".join(f"{ratio:9.3f}" for ratio in row), flush=True)
    return found


def make_model(name: str) -> torch.nn.Module:
    if name == "laptop":
        return build_model(laptop(), 10)
    return timm.create_model(name)


def randomize_tables(model: torch.nn.Module) -> None:
    """Gives the tables of an equipped model small random values, as if they were learned."""
    for table in table_names(model):
        torch.nn.init.normal_(model.get_parameter(table), std=0.02)


def make_run(model: torch.nn.Module, images: torch.Tensor, what: str) -> Callable[[], object]:
    def infer() -> object:
        model.eval()
        with torch.inference_mode():
            return model(images)

    def train() -> None:
        model.train()
        model.zero_grad(set_to_none=True)
        model(images).square().mean().backward()

    return infer if what == "inference" else train


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", help="timm's name, or laptop; repeat it")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, help="write a report here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
