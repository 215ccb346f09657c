"""torchvision: which size of images a model is for, and how it gets another one."""

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

from irpe.errors import UserError

Size = tuple[int, int]
_ANY = (224, 224)  # an image of Swin, which is for no size


def image_size_of(module: nn.Module) -> Size | None:
    """Returns the rows and columns that a model is for; `None` for any other module."""
    if isinstance(module, VisionTransformer):
        return module.image_size, module.image_size
    return _ANY if isinstance(module, SwinTransformer) else None


def channels_of(model: nn.Module) -> int:
    """Returns the channels of the images that a model takes."""
    return next(m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d))


def patch_of(model: Any) -> int:
    """Returns the side of a patch."""
    if isinstance(model, VisionTransformer):
        return model.patch_size
    return max(next(m.kernel_size for m in model.modules() if isinstance(m, nn.Conv2d)))


def run(model: nn.Module, images: Tensor) -> object:
    """Runs a model."""
    return model(images)


def set_input_size(model: nn.Module, size: Size) -> bool:
    """Sets a VisionTransformer to a size and returns that; Swin is for no size."""
    if not isinstance(model, VisionTransformer):
        return False
    side, patch = size[0], model.patch_size
    if size[0] != size[1]:
        raise UserError("torchvision's VisionTransformer takes squares alone")
    if side % patch:
        raise UserError(f"patches of {patch} x {patch} pixels do not divide {side}")
    if side == model.image_size:
        return True
    before: Any = model.encoder.pos_embedding
    state = OrderedDict({"encoder.pos_embedding": before.detach()})
    values = interpolate_embeddings(side, patch, state)["encoder.pos_embedding"]
    model.encoder.pos_embedding = nn.Parameter(values, before.requires_grad)
    model.image_size, model.seq_length = side, values.shape[1]
    return True
