"""Cross-entropy over the pixels that have a class, the same however a batch is split."""

from collections.abc import Sequence

from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional

from irpe.tasks.segment.labels.listing import IGNORED


def count_pixels(labels: Sequence[UInt8[Tensor, "row column"]]) -> int:
    """Returns the number of pixels that have a class."""
    return sum(int((each != IGNORED).sum()) for each in labels)


def pixel_loss(
    scores: Float[Tensor, "image class row column"],
    labels: UInt8[Tensor, "image row column"],
    num_pixels: float,
) -> Tensor:
    """Returns the summed cross-entropy of a micro-batch over a number of pixels.

    A mean over each micro-batch would weigh pixels by how many others of it have a class. Divided
    by the pixels of the whole step per micro-batch, the mean over micro-batches and processes is
    the loss of the batch on one device.

    Args:
        scores: The class scores.
        labels: The true classes, or `IGNORED`.
        num_pixels: What the sum is divided by.
    """
    total = functional.cross_entropy(
        scores.float(), labels.long(), ignore_index=IGNORED, reduction="sum"
    )
    return total / num_pixels
