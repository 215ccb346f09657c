"""Images of any size for a network whose patches have one."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def score_padded(
    images: Float[Tensor, "image channel row column"],
    stride: int,
    score: Callable[[Tensor], Tensor],
) -> Float[Tensor, "image class row column"]:
    """Returns the class scores of each pixel; images are padded to the right and below.

    Args:
        images: The images.
        stride: What the sides of a padded image are multiples of.
        score: Returns the class scores of padded images, at any resolution.
    """
    rows, columns = images.shape[-2:]
    padding = (0, -columns % stride, 0, -rows % stride)
    padded = functional.pad(images, padding) if any(padding) else images
    scores = score(padded).float()
    scores = functional.interpolate(scores, size=padded.shape[-2:], mode="bilinear")
    return scores[..., :rows, :columns]
