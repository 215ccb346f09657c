"""Top-1 and top-5 of a classifier, each image counted once however many processes there are."""

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn import functional

from irpe.train.sampling import Batch, Images, Track, every_batch, no_track


@dataclass(frozen=True)
class Score:
    """How well a model does.

    Args:
        top1: Percent of images whose class comes first.
        top5: Percent of images whose class is among the first five.
        loss: The mean cross-entropy.
        num_images: The images that count.
        num_broken: The images that could not be read, which do not.
    """

    top1: float
    top5: float
    loss: float
    num_images: int
    num_broken: int


def evaluate(
    model: nn.Module,
    images: Images,
    accelerator: Accelerator,
    batch_size: int = 256,
    workers: int = 0,
    track: Track = no_track,
) -> Score:
    """Returns the score of a model on images; the model is in eval mode afterwards.

    Args:
        model: The model, on the accelerator's device.
        images: The images, with their labels.
        accelerator: Tells which process this is.
        batch_size: Images at a time.
        workers: Processes that read images.
        track: Shows how far it is.
    """
    share = accelerator.num_processes, accelerator.process_index
    sums = torch.zeros(5, dtype=torch.float64)
    model.eval()
    with torch.no_grad(), accelerator.autocast():
        for batch in every_batch(images, batch_size, workers, *share, track):
            logits = model(batch.images.to(accelerator.device))
            sums += _count(logits.float().cpu(), batch)
    if accelerator.num_processes > 1:
        sums = torch.tensor(gather_object([sums.tolist()]), dtype=torch.float64).sum(0)
    return _score(sums)


def check_broken(score: Score, limit: float, name: str) -> None:
    """Raises an error if more than a fraction of the images could not be read."""
    count = score.num_images + score.num_broken
    if score.num_broken > limit * count:
        raise ValueError(
            f"{score.num_broken} of {count} images of {name} cannot be read, more than max_broken "
            f"= {limit}"
        )


def _count(logits: Tensor, batch: Batch) -> Tensor:
    """Returns hits among the first, hits among five, summed loss, images, broken images."""
    counts = ~batch.broken
    logits, labels = logits[counts], batch.labels[counts]
    ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
    loss = functional.cross_entropy(logits, labels, reduction="sum")
    numbers = ranked[:, 0].sum(), ranked.sum(), loss, counts.sum(), batch.broken.sum()
    return torch.stack([number.double() for number in numbers])


def _score(sums: Any) -> Score:
    top1, top5, loss, count, broken = sums.tolist()
    if not count:
        raise ValueError("no image could be read: nothing to evaluate")
    return Score(100 * top1 / count, 100 * top5 / count, loss / count, int(count), int(broken))
