"""Fine-tunes a model of DINOv3's shape with an encoding, on the images that come with the library.

python examples/finetune_dinov3.py
python examples/finetune_dinov3.py --images 600 --epochs 1

The model has DINOv3's parts (rotary attention, class token, four registers) at a small size, with
random weights: pass pretrained=True and other sizes to timm.create_model for the published ones.
"""

import argparse

import numpy as np
import timm
import torch
import torch.nn.functional as F  # noqa: N812

import irpe
from irpe.tasks.classify.sources import Source, open_images


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    train, val = (load(source, arguments.images) for source in open_images("embedded"))
    model = timm.create_model(
        "vit_small_patch16_dinov3",
        img_size=28, patch_size=4, in_chans=1, num_classes=10, embed_dim=64, depth=4, num_heads=2,
        init_values=0.1,  # of the layer scale: DINOv3's own is for trained weights
    )  # fmt: skip

    model.eval()
    with torch.inference_mode():
        before = model(val[0][:8])
        irpe.equip(model, arguments.encoding)
        print(f"equipping changed the output by {(model(val[0][:8]) - before).abs().max():.1e}")
    print(irpe.summary(model))

    groups = irpe.parameter_groups(model, weight_decay=0.05, lr=2e-3)
    optimizer = torch.optim.AdamW(groups)
    steps = arguments.epochs * (len(train[0]) // arguments.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in groups], steps, pct_start=0.2
    )
    for epoch in range(arguments.epochs):
        loss = train_epoch(model, train, arguments.batch, optimizer, schedule)
        print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy(model, val):.1f} %", flush=True)

    irpe.save_equipped(model, "finetuned-dinov3")
    loaded = irpe.load_equipped("finetuned-dinov3")
    with torch.inference_mode():
        assert torch.equal(loaded(val[0][:8]), model(val[0][:8]))
    print("saved to ./finetuned-dinov3 and loaded again")


def load(source: Source, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns images, in [-1, 1], and labels."""
    pairs = [source.read(index) for index in range(min(most, len(source)))]
    images = np.stack([np.asarray(image, dtype=np.float32) for image, _ in pairs])
    return torch.from_numpy(images)[:, None] / 127.5 - 1, torch.tensor(
        [label for _, label in pairs]
    )


def train_epoch(model, data, batch, optimizer, schedule) -> float:
    """Returns the mean loss of an epoch."""
    model.train()
    images, labels = data
    order = torch.randperm(len(images))
    losses = []
    for indices in order[: len(order) // batch * batch].split(batch):
        loss = F.cross_entropy(model(images[indices]), labels[indices])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.inference_mode()
def accuracy(model, data) -> float:
    """Returns the percentage of images that are classified correctly."""
    model.eval()
    images, labels = data
    predicted = torch.cat([model(part).argmax(-1) for part in images.split(200)])
    return 100 * (predicted == labels).float().mean().item()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--encoding", default="product-contextual-k")
    parser.add_argument("--images", type=int, default=6000, help="Most images of each split")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=50)
    return parser.parse_args()


if __name__ == "__main__":
    main()
