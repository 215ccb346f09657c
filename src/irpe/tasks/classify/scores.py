"""Top-1 and top-5 of a classifier; each image counts once however many processes there are."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn import functional

from irpe.errors import UserError
from irpe.progress import NO_PROGRESS, Progress
from irpe.tasks.classify.sources import Source
from irpe.tasks.classify.transforms import Batch, LabelledImages
from irpe.train.sampling import every_batch

TOP = 5  # of the classes; of so many or fewer, every image's class is among them


@dataclass(frozen=True)
class Score:
    """How well a model classifies.

    Args:
        top1: Percent of images whose class comes first.
        top5: Percent of images whose class is among the first five.
        loss: The mean cross-entropy.
        correct: Whether each readable image was classified correctly, in the order of the source.
        broken: The indices of the images that could not be read, which do not count.
        chance: Percent of images of the most frequent class: the best answer without a look.
    """

    top1: float
    top5: float
    loss: float
    correct: tuple[bool, ...]
    broken: tuple[int, ...]
    chance: float

    @property
    def num_images(self) -> int:
        """The images that count."""
        return len(self.correct)

    @property
    def num_broken(self) -> int:
        """The images that could not be read."""
        return len(self.broken)

    def row(self) -> dict[str, float]:
        """Returns the columns of the run's table."""
        return {
            "val_loss": self.loss,
            "top1": self.top1,
            "top5": self.top5,
            "val_broken": self.num_broken,
        }


class _Prediction(NamedTuple):
    """What became of one readable image."""

    image: int
    is_first: bool
    is_among_five: bool
    label: int
    loss: float


def evaluate(
    model: nn.Module,
    images: LabelledImages,
    accelerator: Accelerator,
    batch_size: int = 256,
    workers: int = 0,
    progress: Progress = NO_PROGRESS,
) -> Score:
    """Returns the score of a model on images; the model is in eval mode afterwards.

    Args:
        model: The model, on the accelerator's device.
        images: The images, with their labels.
        accelerator: Knows the processes and the device.
        batch_size: Images per forward pass.
        workers: Processes that load images.
        progress: Is told how far it is.
    """
    ranks = accelerator.num_processes, accelerator.process_index
    predictions: list[_Prediction] = []
    broken: list[int] = []
    model.eval()
    with torch.no_grad(), accelerator.autocast():
        for batch in every_batch(images, batch_size, workers, *ranks, progress):
            logits = model(batch.images.to(accelerator.device))
            predictions += _predictions(logits.float().cpu(), batch)
            broken += batch.indices[batch.broken].tolist()
    if accelerator.num_processes > 1:
        predictions = gather_object(predictions)
        broken = gather_object(broken)
    return _score(sorted(predictions), sorted(broken))


def check_broken(score: Score, limit: float, source: Source) -> None:
    """Raises an error if more than a fraction of the images could not be read."""
    count = score.num_images + score.num_broken
    if score.num_broken > limit * count:
        files = ", ".join(source.filename(index) for index in score.broken[:8])
        raise UserError(
            f"{score.num_broken} of {count} images cannot be read, more than max_broken = {limit}: "
            f"{files}"
        )


def _predictions(logits: Tensor, batch: Batch) -> Iterable[_Prediction]:
    readable = ~batch.broken
    logits, labels = logits[readable], batch.labels[readable]
    ranked = logits.topk(min(TOP, logits.shape[1]), dim=1).indices == labels[:, None]
    losses = functional.cross_entropy(logits, labels, reduction="none").tolist()
    indices = batch.indices[readable].tolist()
    first, among_five = ranked[:, 0].tolist(), ranked.any(1).tolist()
    return map(_Prediction, indices, first, among_five, labels.tolist(), losses)


def _score(predictions: list[_Prediction], broken: list[int]) -> Score:
    if not predictions:
        raise UserError("no image could be read: nothing to evaluate")
    count = len(predictions)
    return Score(
        top1=100 * sum(p.is_first for p in predictions) / count,
        top5=100 * sum(p.is_among_five for p in predictions) / count,
        loss=sum(p.loss for p in predictions) / count,
        correct=tuple(p.is_first for p in predictions),
        broken=tuple(broken),
        chance=100 * max(Counter(p.label for p in predictions).values()) / count,
    )
