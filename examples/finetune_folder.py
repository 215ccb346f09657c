"""From a folder of class folders to a fine-tuned, saved and evaluated model with an encoding.

python examples/finetune_folder.py FOLDER
python examples/finetune_folder.py FOLDER --model vit_small_patch16_224 --image-size 128
python examples/finetune_folder.py FOLDER --absolute solve

FOLDER holds one folder of images for each class, or two of such folders, train and val. Without
val, every fifth image is held out. Training takes 5 epochs, or as many as make 300 steps, and ends
after --minutes at most. Tables start at zero, beside the absolute encoding, and learn at 100 times
the rate of the weights (--table-lr): at 5 times, the rate for training from scratch, they do
nothing in so few steps (docs/results/pretrained.md). Or they take its place, solved for on 64
images (--absolute solve).
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

FEWEST_EPOCHS, FEWEST_STEPS = 5, 300  # where --epochs is not given
TIMED_STEPS = 3  # from which the number of steps is computed that the time allows


def main() -> None:
    arguments = parse_arguments()
    check_arguments(arguments)
    torch.manual_seed(0)
    classes, model = find_classes(arguments.folder), make_model(arguments)
    model.reset_classifier(len(classes))
    train, val = make_datasets(arguments.folder, model)
    print(f"{len(train)} images to train, {len(val)} to evaluate, {len(classes)} classes")
    if arguments.absolute == "solve":
        images = next(iter(DataLoader(train, 64, shuffle=True)))[0]
        print(irpe.make_relative(model, images, arguments.encoding))
    else:
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
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("folder", type=Path, help="a folder of images for each class")
    add("--model", default="deit_tiny_patch16_224", help="a vision transformer of timm")
    add("--weights", choices=["pretrained", "random"], default="pretrained", help="to start from")
    add("--encoding", default="product-contextual-k", help="see `irpe encodings`")
    add("--absolute", choices=["keep", "solve"], default="keep", help="positions of the model")
    add("--image-size", type=int, default=224, help="height and width of the input")
    add("--epochs", type=int, help=f"{FEWEST_EPOCHS}, or enough for {FEWEST_STEPS} steps")
    add("--minutes", type=float, default=15.0, help="the most that training takes")
    add("--batch", type=int, default=32, help="images of a step")
    add("--lr", type=float, default=2e-4, help="highest learning rate")
    add("--table-lr", type=float, default=100.0, help="rate of the tables, times --lr")
    add("--output", type=Path, default=Path("finetuned-folder"), help="a new folder")
    return parser.parse_args()


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raises an error for what would fail after the training, or late."""
    irpe.parse_encoding(arguments.encoding)
    if not timm.is_model(arguments.model):
        raise ValueError(f"--model {arguments.model!r} is not a model of timm (timm.list_models)")
    if arguments.output.exists() and any(arguments.output.iterdir()):
        raise ValueError(f"--output {arguments.output} has files in it: choose a new folder")


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
        raise ValueError(f"{folder} is not a folder")
    root = folder / "train" if (folder / "train").is_dir() else folder
    classes = sorted(path.name for path in root.iterdir() if path.is_dir())
    if len(classes) < 2:
        raise ValueError(f"{root} has {len(classes)} folders: at least two classes are needed")
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
    """Trains as long as was asked for, or as the time allows; returns the steps."""
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
    epochs = arguments.epochs or FEWEST_EPOCHS
    wanted = epochs * len(loader)
    wanted = wanted if arguments.epochs else max(wanted, FEWEST_STEPS)
    steps = max(1, min(wanted, allowed))
    print(f"{seconds:.2f} s a step, {steps} steps: about {steps * seconds / 60:.1f} minutes")
    reach = steps * arguments.lr * arguments.table_lr
    print(f"an element of a table moves by at most {reach:.2g} in these (Adam: a rate a step)")
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
    try:
        main()
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
