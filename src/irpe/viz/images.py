"""Pictures as a model wants them (its channels, size and normalisation), and many on one page."""

import math
import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from irpe.errors import MissingFileError, UserError, UserTypeError
from irpe.extras import require
from irpe.viz.canvas import draw_map, new_figure, panel_shape, panels, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

_SCENE = "assets/scene.png"
_GREY = (0.5, 0.5)  # mean and deviation for models that name none
_PANEL = 6.0  # centimetres: the width of an image
_COLUMNS, _MOST = 4, 24
_TITLE = 40  # letters


def read_image(path: str | os.PathLike[str]) -> "Image":
    """Returns the picture in a file, in colour.

    Args:
        path: A PNG, JPEG or any other file that Pillow reads.

    Examples:
        >>> import irpe.viz, pathlib
        >>> path = pathlib.Path(irpe.viz.__file__).parent / "assets" / "scene.png"
        >>> irpe.viz.read_image(path).size
        (224, 224)
    """
    pillow = require("PIL.Image", "viz")
    from irpe.train.images import convert_mode

    path = Path(path)
    if not path.is_file():
        raise MissingFileError(f"{path} does not exist: pass the file of an image")
    try:
        with pillow.open(path) as image:
            return convert_mode(image, "RGB")
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise UserError(f"{path} is not an image that can be read: {error}") from error


def default_image() -> "Image":
    """Returns the picture that ships with the package, 224 x 224, drawn for it.

    Examples:
        >>> import irpe.viz
        >>> irpe.viz.default_image().size
        (224, 224)
    """
    pillow = require("PIL.Image", "viz")
    with files("irpe.viz").joinpath(_SCENE).open("rb") as file, pillow.open(file) as image:
        return image.convert("RGB")


def image_input(model: nn.Module, image: "Image") -> "tuple[Tensor, Image]":
    """Returns a picture as the input of a model, and the picture as the model sees it.

    Channels come from the model's first convolution. The size is the one that the model was made
    for; a model that takes any size gets the picture's own. Mean and deviation are those of timm's
    configuration, if the model has one, else 0.5.

    Args:
        model: The model.
        image: The picture.

    Examples:
        >>> import irpe.viz, timm
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=1)
        >>> pixels, shown = irpe.viz.image_input(model, irpe.viz.default_image())
        >>> pixels.shape
        torch.Size([1, 3, 224, 224])
    """
    if isinstance(image, str | os.PathLike):
        path = os.fspath(image)
        raise UserTypeError(
            f"image {path!r} is a path, not a picture: pass irpe.viz.read_image({path!r})"
        )
    channels, size = _num_channels(model), _input_size(model)
    seen = image.convert("L" if channels == 1 else "RGB")
    if size is not None:
        seen = seen.resize((size[1], size[0]), require("PIL.Image", "viz").Resampling.BICUBIC)
    bands, (width, height) = len(seen.getbands()), seen.size
    pixels = torch.frombuffer(bytearray(seen.tobytes()), dtype=torch.uint8)
    pixels = pixels.view(height, width, bands).permute(2, 0, 1).float() / 255
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    of_timm = config.get("mean", _GREY[:1]), config.get("std", _GREY[1:])
    mean, deviation = (torch.tensor(values).view(-1, 1, 1) for values in of_timm)
    if len(mean) != channels:
        mean, deviation = mean.mean(), deviation.mean()
    parameter = next(model.parameters())
    return ((pixels - mean) / deviation).unsqueeze(0).to(parameter), seen


def _num_channels(model: nn.Module) -> int:
    convolutions = (module for module in model.modules() if isinstance(module, nn.Conv2d))
    first = next(convolutions, None)
    if first is None or first.in_channels not in (1, 3):
        found = "no convolution" if first is None else f"{first.in_channels} channels"
        raise UserError(
            f"{type(model).__qualname__} takes no grey or colour pictures, it has {found} at its "
            "input: call irpe.viz.capture(model, x) with an input of your own"
        )
    return first.in_channels


def _input_size(model: nn.Module) -> tuple[int, int] | None:
    """Returns the height and width that timm's, torchvision's or transformers' models are for."""
    for module in model.modules():
        owner: Any = getattr(module, "patch_embed", None)
        size = getattr(owner, "img_size", None) if isinstance(owner, nn.Module) else None
        size = size or getattr(module, "image_size", None)
        size = size or getattr(getattr(module, "config", None), "image_size", None)
        if isinstance(size, int):
            return size, size
        if isinstance(size, tuple | list) and len(size) == 2:
            return int(size[0]), int(size[1])
    return None


@styled
def plot_images(images: Mapping[str, Any]) -> "Figure":
    """Returns many images on one page, the first 24 of them.

    Args:
        images: Pillow images by their names.

    Examples:
        >>> import irpe.viz
        >>> figure = irpe.viz.plot_images({"scene": irpe.viz.default_image()})
    """
    shown = dict(list(images.items())[:_MOST])
    if not shown:
        raise UserError("nothing to draw: pass at least one image")
    shape = median(panel_shape(image.height, image.width) for image in shown.values())
    most = _COLUMNS if shape > 1 / 2 else 1  # wide ones lie below each other
    columns = min(math.ceil(math.sqrt(len(shown))), most)
    rows, width = math.ceil(len(shown) / columns), _PANEL * (1 if most > 1 else 3)
    figure = new_figure(width * columns, (width * shape + 0.5) * rows)
    drawn = [axes for row in panels(figure, rows, columns) for axes in row]
    for axes in drawn[len(shown) :]:
        axes.remove()
    for axes, (name, image) in zip(drawn, shown.items(), strict=False):
        picture = draw_map(axes, image, extent=(0, image.width, image.height, 0))
        picture.set_interpolation("auto")
        short = f"{name[: _TITLE // 2]}…{name[-_TITLE // 2 + 1 :]}"
        axes.set_title(short if len(name) > _TITLE else name, parse_math=False)
        axes.set_anchor("N")
    return figure
