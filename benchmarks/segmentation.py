"""What K and QKV cost a segmenter as its images grow: time and memory relative to the plain model.

python -m benchmarks.segmentation
python -m benchmarks.segmentation --blocks 12 --rounds 5

DeiT-S with a linear head on one image, patches of 16 pixels. Every block costs the same, so three
of the twelve are enough for a ratio. CPU times of one thread, medians of interleaved rounds; memory
is the peak of all tensors that a pass makes, which does not vary.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from benchmarks.models import make_run, randomize_tables
from benchmarks.timing import interleaved_medians, ratios_to, write_report
from irpe.profile.measure import peak_memory
from irpe.tasks.segment.config import SegmenterConfig
from irpe.tasks.segment.task import build_segmenter

ENCODINGS = {
    "plain": "none",
    "K": "product-contextual-k",
    "QKV": "product-contextual-qkv",
}
GRIDS = ((24, 32), (36, 48), (48, 64))  # rows and columns of tokens
PASSES = ("inference", "training step")
_PATCH = 16


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    results: dict[str, object] = {"blocks": arguments.blocks}
    for grid in GRIDS:
        results[f"{grid[1]}x{grid[0]}"] = measure(grid, arguments.blocks, arguments.rounds)
    write_report(arguments.output, results)


def measure(grid: tuple[int, int], blocks: int, rounds: int) -> dict[str, object]:
    """Returns ratios of CPU time and megabytes at the peak, for each pass."""
    torch.manual_seed(0)
    models = {name: make_segmenter(spec, blocks) for name, spec in ENCODINGS.items()}
    images = torch.randn(1, 3, grid[0] * _PATCH, grid[1] * _PATCH)
    found: dict[str, object] = {}
    for what in PASSES:
        runs = {name: make_run(model, images, what) for name, model in models.items()}
        medians = interleaved_medians(runs, rounds)
        memory = {name: round(peak_memory(run) / 1e6, 1) for name, run in runs.items()}
        found[what] = {
            "seconds of the plain model": round(medians["plain"]["cpu"], 3),
            "cpu": ratios_to("plain", medians, "cpu"),
            "peak MB": memory,
        }
        print(f"{grid[1]} x {grid[0]} tokens, {what}: {found[what]}", flush=True)
    return found


def make_segmenter(encoding: str, blocks: int) -> nn.Module:
    """Returns DeiT-S with some blocks and a linear head for the 19 classes of Cityscapes."""
    config = SegmenterConfig(
        model="deit_small_patch16_224",
        model_args={"depth": blocks},
        encoding=encoding,
        absolute="keep",
        classes=tuple(map(str, range(19))),
    )
    model = build_segmenter(config)
    if encoding != "none":
        randomize_tables(model)
    return model


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=3, help="blocks of DeiT-S, 12 are all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, help="write a report here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
