"""From a folder of class folders to a fine-tuned, saved and evaluated model with an encoding.

python examples/finetune_folder.py FOLDER
python examples/finetune_folder.py FOLDER --model vit_small_patch16_224 --image-size 128

FOLDER holds one folder of images for each class, or two of such folders, train and val. Without
val, every fifth image is held out. Training ends after --minutes at most; the rate of the tables is
5 times that of the weights (--table-lr).
"""

import argparse
import time
from itertools import chain, islice, repeat
from pathlib import Path

import timm
import torch
import torch.nn.functional as F  # noqa: N812
from timm.data import create_transform, resolve_data_config
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.datasets import ImageFolder

import irpe
from irpe.hub import cached_if_unreachable

TIMED_STEPS = 3  # from which the number of steps is computed that the time allows


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    classes, model = find_classes(arguments.folder), make_model(arguments)
    model.reset_classifier(len(classes))
    train, val = make_datasets(arguments.folder, model)
    print(f"{len(train)} images to train, {len(val)} to evaluate, {len(classes)} classes")
    irpe.equip(model, arguments.encoding)

    steps = train_model(model, train, arguments)
    print(f"{steps} steps; accuracy on the held-out images {accuracy(model, val):.1f} %")
    images = next(iter(DataLoader(val, 4)))[0]
    print(irpe.summary(model, images))

    irpe.save_equipped(model, arguments.output)
    loaded = irpe.load_equipped(arguments.output)
    with torch.inference_mode():
        assert torch.equal(loaded(images), model(images))
    print(f"saved to {arguments.output} and loaded again; classes in order: {', '.join(classes)}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--weights", choices=["pretrained", "random"], default="pretrained")
    parser.add_argument("--encoding", default="product-contextual-k")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--table-lr", type=float, default=5.0)
    parser.add_argument("--output", default="finetuned-folder")
    return parser.parse_args()


def make_model(arguments: argparse.Namespace) -> nn.Module:
    """Returns a model of timm; with random weights, and a line about it, where none can be had."""
    size = {"img_size": arguments.image_size}
    if arguments.weights == "pretrained":
        try:
            with cached_if_unreachable():
                return timm.create_model(arguments.model, pretrained=True, **size)
        except Exception as error:  # what it is depends on the network
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            print(f"the weights of {arguments.model} are not available: {reason}")
    print("random weights: the accuracy is that of training from scratch")
    return timm.create_model(arguments.model, **size)


def find_classes(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise SystemExit(f"{folder} is not a folder")
    root = folder / "train" if (folder / "train").is_dir() else folder
    classes = sorted(path.name for path in root.iterdir() if path.is_dir())
    if len(classes) < 2:
        raise SystemExit(f"{root} has {len(classes)} folders: at least two classes are needed")
    return classes


def make_datasets(folder: Path, model: nn.Module) -> tuple[Dataset, Dataset]:
    """Returns images to train, augmented, and to evaluate, both as the model wants them."""
    config = resolve_data_config({"img_size": model.patch_embed.img_size[0]}, model=model)
    config["input_size"] = (3, *model.patch_embed.img_size)
    views = [create_transform(**config, is_training=True), create_transform(**config)]
    if (folder / "train").is_dir():
        return ImageFolder(folder / "train", views[0]), ImageFolder(folder / "val", views[1])
    train, val = (ImageFolder(folder, view) for view in views)
    held_out = set(range(0, len(val), 5))
    rest = [index for index in range(len(train)) if index not in held_out]
    return Subset(train, rest), Subset(val, sorted(held_out))


def train_model(model: nn.Module, data: Dataset, arguments: argparse.Namespace) -> int:
    """Trains as many epochs as were asked for, or as the time allows; returns the steps."""
    groups = irpe.parameter_groups(
        model, weight_decay=0.05, lr=arguments.lr, table_lr=arguments.table_lr
    )
    optimizer = torch.optim.AdamW(groups)
    loader = DataLoader(data, min(arguments.batch, len(data)), shuffle=True, drop_last=True)
    batches = chain.from_iterable(repeat(loader))
    model.train()
    started = time.monotonic()
    for batch in islice(batches, TIMED_STEPS):  # at the first rate of a schedule: next to nothing
        take_step(model, optimizer, batch, scale=0.01)
    seconds = (time.monotonic() - started) / TIMED_STEPS
    allowed = int(arguments.minutes * 60 / seconds)
    steps = max(1, min(arguments.epochs * len(loader), allowed))
    print(f"{seconds:.2f} s a step, {steps} steps: about {steps * seconds / 60:.1f} minutes")
    for step, batch in enumerate(islice(batches, steps)):
        scale = min(1.0, 10 * (step + 1) / steps) * (1 - step / steps)  # warm up, then go down
        loss = take_step(model, optimizer, batch, scale)
        if step % max(1, steps // 10) == 0:
            print(f"step {step}: loss {loss:.3f}", flush=True)
    return steps


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch, scale: float) -> float:
    images, labels = batch
    loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    for group in optimizer.param_groups:
        rate = group.setdefault("initial_lr", group["lr"])  # the tables' own in their group
        group["lr"] = rate * scale
    optimizer.step()
    return loss.item()


@torch.inference_mode()
def accuracy(model: nn.Module, data: Dataset) -> float:
    model.eval()
    correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in DataLoader(data, 64))
    return 100 * correct / len(data)


if __name__ == "__main__":
    main()
