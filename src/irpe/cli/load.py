"""Models that a command is pointed at."""

from pathlib import Path

from torch import nn

from irpe.adapters.keep import load_equipped


def load_model(path: Path) -> nn.Module:
    """Returns the equipped model of a training run or of `irpe.save_equipped`, in eval mode.

    Args:
        path: The folder of a run, or of a saved model.
    """
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path} is not a folder: pass the folder of a run, or of a model that "
            "irpe.save_equipped wrote"
        )
    inside = path / "model"
    return load_equipped(inside if inside.is_dir() else path)
