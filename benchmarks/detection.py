"""What the encodings cost a whole DETR: a full training step of detr_r50 on one image.

python -m benchmarks.detection
python -m benchmarks.detection --height 480 --width 640 --rounds 5
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.timing import write_report
from irpe.profile.measure import interleaved, peak_memory
from irpe.recipes.detection import RECIPES
from irpe.tasks.detect.loss import Normalizer, detection_loss
from irpe.tasks.detect.model import build_detector, layer_predictions
from irpe.tasks.detect.task import DetectionTask

ENCODINGS = {
    "plain": "none",
    "bias": "product-bias-k@2.0",
    "K": "product-contextual-k@2.0",
    "QKV": "product-contextual-qkv@2.0",
}


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    runs = {name: make_step(text, arguments) for name, text in ENCODINGS.items()}
    memory = {name: peak_memory(run) / 2**20 for name, run in runs.items()}
    seconds = interleaved(runs, arguments.rounds)
    print(f"a step of the plain model takes {seconds['plain']:.1f} s")
    print(f"{'':6}{'time':>8}{'peak memory':>14}")
    for name in ENCODINGS:
        ratio = seconds[name] / seconds["plain"]
        print(f"{name:6}{ratio:7.3f}x{memory[name]:11.0f} MB")
    ratios = {name: seconds[name] / seconds["plain"] for name in ENCODINGS}
    size = {"height": arguments.height, "width": arguments.width, "batch": 1}
    write_report(arguments.output, {**size, "time": ratios, "peak memory in MB": memory})


def make_step(encoding: str, arguments: argparse.Namespace) -> Callable[[], None]:
    """Returns a forward and a backward pass and a step of the optimizer, as in training."""
    torch.manual_seed(0)
    classes = tuple(str(number) for number in range(80))
    recipe = RECIPES["detr_r50"]()
    config = recipe.replace(encoding=encoding, backbone_weights="none", classes=classes)
    model = build_detector(config).train()
    optimizer = torch.optim.AdamW(DetectionTask(config).groups(model))
    image = torch.randn(1, 3, arguments.height, arguments.width)
    mask = torch.ones(1, arguments.height, arguments.width, dtype=torch.bool)
    boxes = torch.tensor([[0.3, 0.4, 0.2, 0.3], [0.6, 0.5, 0.4, 0.2]])
    targets = [{"boxes": boxes, "class_labels": torch.tensor([3, 17])}]
    normalizer = Normalizer(boxes=2.0, weight=2 + 0.1 * (100 - 2))
    predict = partial(layer_predictions, model)

    def step() -> None:
        optimizer.zero_grad()
        detection_loss(*predict(image, mask), targets, normalizer, model.config).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
        optimizer.step()

    return step


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--height", type=int, default=800)
    parser.add_argument("--width", type=int, default=1066)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, help="write a report here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
