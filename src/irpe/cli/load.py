"""Models and runs that a command is pointed at."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from irpe.errors import MissingFileError, UserError
from irpe.train.config import RUN_FILE

if TYPE_CHECKING:
    from torch import nn

_MODEL, _CELLS = "model", "cells"  # folders in a run, and in an ablation


def find_model(path: Path) -> Path:
    """Returns the folder of the run or saved model that is meant; torch is not needed to see it.

    Args:
        path: What the user gave: also the folder model of a run, which knows how images are
            prepared.
    """
    if not path.is_dir():
        raise MissingFileError(
            f"{path} is not a folder: pass the folder of a run, or of a model that "
            "irpe.save_equipped wrote"
        )
    if (path / _CELLS).is_dir():
        raise UserError(f"{path} is an ablation: name one of its runs, in {path / _CELLS}")
    if not (path / RUN_FILE).is_file() and (runs := sorted(path.glob(f"*/{RUN_FILE}"))):
        raise UserError(f"{path} is not a run, but holds runs: name one, as {runs[0].parent}")
    is_inside = path.name == _MODEL and (path.parent / RUN_FILE).is_file()
    return path.parent if is_inside else path


def load_model(path: Path) -> "nn.Module":
    """Returns the model of a training run or of `irpe.save_equipped`, in eval mode."""
    path = find_model(path)
    if (path / RUN_FILE).is_file():
        from irpe.train.run import load_run

        return load_run(path)
    from irpe.adapters.saving import load_equipped

    return load_equipped(path)


def open_timm(name: str, weights: Path | None, image_size: int | None = None) -> "nn.Module":
    """Returns a model of timm in eval mode, without a head if its weights have none.

    Args:
        name: Its name.
        weights: A file in timm's names, at any image size; `None` for those that timm publishes.
        image_size: Height and width of its images; `None` for its own.
    """
    from irpe.adapters.hosts.timm.building import create_timm_model
    from irpe.train.run import read_weights, start_from

    size: dict[str, Any] = {} if image_size is None else {"img_size": image_size}
    if weights is None:
        return create_timm_model(name, size, pretrained=True).eval()
    values = read_weights(weights)
    heads = [len(values[key]) for key in ("head.bias", "head.fc.bias") if key in values]
    model = create_timm_model(name, {**size, "num_classes": heads[0] if heads else 0})
    start_from(model, values, str(weights))
    return model.eval()
