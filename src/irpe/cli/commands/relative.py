"""`irpe make-relative` and `irpe show positions-in`: pretrained models and their positions."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from irpe.cli.commands.show import write_figure
from irpe.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

_MODEL = "A model of timm or transformers, or the folder of a run or of a saved model."
_IMAGES = "Folder of pictures, searched to its end; no labels are needed."
_WEIGHTS = "Weights of a timm model, in a file [those that timm publishes]."
_SIZE = "Height and width of the images [the model's own]."
_COUNT = "How many of the pictures, chosen at random but always the same."
_ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}


def make_relative(
    model: Annotated[str, _MODEL, "MODEL"],
    *,
    images: Annotated[Path, _IMAGES, "FOLDER"],
    output: Annotated[Path, "Folder to write: model and report.", "DIR"],
    encoding: Annotated[str, "METHOD-MODE-TARGETS."] = "product-contextual-k",
    weights: Annotated[Path | None, _WEIGHTS, "FILE"] = None,
    image_size: Annotated[int | None, _SIZE] = None,
    count: Annotated[int, _COUNT] = 64,
    layer: Annotated[list[int] | None, "An attention that gets tables; repeat it [all]."] = None,
    recalibrate: Annotated[int, "Steps of distillation afterwards.", "STEPS"] = 0,
    as_json: Annotated[bool, "Print JSON."] = False,
) -> None:
    """Give a trained model relative tables in the place of its absolute encoding.

    Tables are solved for in closed form on unlabelled pictures; nothing is trained but for
    --recalibrate, which the same command continues after an interruption. DIR then holds an
    equipped model, as of irpe.save_equipped, with a report: conversion.json and conversion.png.

    Examples:
        irpe make-relative vit_small_patch16_224 --images photos -o out
        irpe make-relative deit_tiny_patch16_224 --weights w.pth --images in -o out
        irpe make-relative runs/laptop --images photos --count 32 -o out
    """
    import copy

    import irpe
    from irpe.cli.console import ProgressBar, print_json, print_lines
    from irpe.files import write_text

    files = _find_pictures(images, count)
    made = _open_model(model, weights, image_size)
    inputs = _read_pictures(made, files)
    original = copy.deepcopy(made) if recalibrate else None
    with ProgressBar() as bar:
        found = irpe.make_relative(made, inputs, encoding, layers=layer, listen=bar)
        distilled = None
        if original is not None:
            distilled = irpe.recalibrate(
                made, original, inputs, steps=recalibrate,
                checkpoint=output / "recalibration.pt", listen=bar,
            )  # fmt: skip
    irpe.save_equipped(made, output)
    write_text(output / "conversion.json", found.to_json() + "\n")
    if as_json:
        import json

        print_json(json.loads(found.to_json()))
        return
    print_lines(str(found), *([] if distilled is None else ["", f"{distilled}."]), "")
    write_figure(found.figure(), output / "conversion.png")
    print_lines(f"wrote {output}; read it with irpe.load_equipped({str(output)!r})")


def positions_in(
    model: Annotated[str, _MODEL, "MODEL"],
    *,
    images: Annotated[Path, _IMAGES, "FOLDER"],
    weights: Annotated[Path | None, _WEIGHTS, "FILE"] = None,
    image_size: Annotated[int | None, _SIZE] = None,
    count: Annotated[int, _COUNT] = 64,
    output: Annotated[Path, "The picture, .png or .svg.", "FILE"] = Path("positions-in.png"),
) -> None:
    """How well a patch's row and column can be read from the tokens of a model.

    A linear map is fitted to the tokens that enter each attention, in closed form; R2 on pictures
    that it was not fitted on is 1 where position can be read exactly and 0 where it cannot be read.

    Examples:
        irpe show positions-in vit_small_patch16_224 --images photos
    """
    import irpe
    from irpe.cli.console import print_lines

    files = _find_pictures(images, count)
    made = _open_model(model, weights, image_size)
    probe = irpe.position_probe(made, _read_pictures(made, files))
    print_lines(str(probe), "")
    write_figure(probe.figure(), output)


def _find_pictures(folder: Path, count: int) -> list[Path]:
    """Returns some of the pictures in a folder, always the same in the same random order."""
    import random

    if not folder.is_dir():
        raise UserError(f"--images {folder} is not a folder: pass one with pictures in it")
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _ENDINGS)
    if min(count, len(found)) < 4:
        raise UserError(
            f"--images {folder} has {len(found)} pictures ({', '.join(sorted(_ENDINGS))}), --count "
            f"is {count}: at least 4 are needed, 64 are better"
        )
    return random.Random(0).sample(found, min(count, len(found)))


def _read_pictures(model: "nn.Module", files: list[Path]) -> "Tensor":
    import torch

    from irpe.viz import image_input, read_image

    inputs = [image_input(model, read_image(file))[0] for file in files]
    if len({tuple(x.shape) for x in inputs}) > 1:
        raise UserError("the model takes pictures of any size, and these differ: pass --image-size")
    return torch.cat(inputs)


def _open_model(name: str, weights: Path | None, image_size: int | None) -> "nn.Module":
    """Returns a trained model: of a folder, of timm with its weights or others, of transformers."""
    from irpe.cli.load import load_model, open_timm
    from irpe.extras import require
    from irpe.hub import cached_if_unreachable

    path = Path(name)
    is_transformers = (path / "config.json").is_file() or (not path.is_dir() and "/" in name)
    timm: Any = require("timm", "timm")
    if not path.is_dir() and timm.is_model(name):
        return open_timm(name, weights, image_size)
    for option, value in (("--weights", weights), ("--image-size", image_size)):
        if value is not None:
            raise UserError(f"{option} {value}: it is for models of timm, which {name} is not")
    if not is_transformers:
        return load_model(path)
    transformers: Any = require("transformers", "transformers")
    try:
        with cached_if_unreachable():
            return transformers.AutoModel.from_pretrained(name).eval()
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"model {name!r} of transformers cannot be read: {reason}") from error
