"""What models return, as one tensor."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from irpe.errors import UserTypeError


def features_of(output: Any) -> Tensor:
    """Returns the logits or tokens in what a model of any library returned."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        if isinstance(found := getattr(output, name, None), Tensor):
            return found
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    raise UserTypeError(
        f"the model returns a {type(output).__name__}, which has no logits or tokens: convert the "
        "part of it that returns a tensor"
    )


def tokens_of(model: Any, images: Tensor) -> Tensor:
    """Returns the tokens that leave a model, those before the patches included.

    Models of timm give them apart from their heads; of others it is what they return first.
    """
    if hasattr(model, "forward_features"):
        return features_of(model.forward_features(images))
    return features_of(model(images))


def accuracy(outputs: Sequence[Tensor], labels: Tensor) -> float:
    """Returns the fraction of labels that logits predict."""
    predicted = torch.cat([output.argmax(-1).flatten() for output in outputs])
    if predicted.shape != labels.shape:
        raise UserTypeError(
            f"labels of shape {tuple(labels.shape)}, but the model returns {tuple(predicted.shape)}"
            " classes: it is not a classifier of whole images; leave labels out"
        )
    return float((predicted == labels.to(predicted.device)).double().mean())
