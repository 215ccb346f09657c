"""What the encodings cost a whole model: time relative to the same timm model without one.

python -m benchmarks.models
python -m benchmarks.models --model deit_tiny_patch16_224 --batch 4 --rounds 10
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import timm
import torch

import irpe
from benchmarks.timing import write_report
from irpe.profile.measure import interleaved

ENCODINGS = {
    "bias K": "product-bias-k",
    "K": "product-contextual-k",
    "QK": "product-contextual-qk",
    "QKV": "product-contextual-qkv",
    "cross K": "cross-contextual-k",
}
PASSES = ("inference", "training step")


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    models = {"plain": timm.create_model(arguments.model)}
    for name, spec in ENCODINGS.items():
        models[name] = irpe.equip(timm.create_model(arguments.model), spec)
        for table in irpe.adapters.equip.table_names(models[name]):
            torch.nn.init.normal_(models[name].get_parameter(table), std=0.02)
    images = torch.randn(arguments.batch, *models["plain"].pretrained_cfg["input_size"])

    ratios: dict[str, dict[str, float]] = {}
    for what in PASSES:
        runs = {name: make_run(model, images, what) for name, model in models.items()}
        seconds = interleaved(runs, arguments.rounds)
        ratios[what] = {name: seconds[name] / seconds["plain"] for name in ENCODINGS}
        print(f"{what}: the plain model takes {seconds['plain'] * 1e3:.0f} ms")
    print_table(ratios)
    write_report(arguments.output, {"model": arguments.model, "batch": arguments.batch, **ratios})


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


def print_table(ratios: dict[str, dict[str, float]]) -> None:
    print(f"{'':14}" + "".join(f"{name:>9}" for name in ENCODINGS))
    for what, row in ratios.items():
        print(f"{what:14}" + "".join(f"{ratio:9.3f}" for ratio in row.values()))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="deit_small_patch16_224")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/models.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
