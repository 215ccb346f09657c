"""Models that a command is pointed at."""

from pathlib import Path
from typing import TYPE_CHECKING

from irpe.train.config import RUN_FILE

if TYPE_CHECKING:
    from torch import nn


def load_model(path: Path) -> "nn.Module":
    """Returns the model of a training run or of `irpe.save_equipped`, in eval mode.

    Args:
        path: The folder of a run, or of a saved model.
    """
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path} is not a folder: pass the folder of a run, or of a model that "
            "irpe.save_equipped wrote"
        )
    if (path / RUN_FILE).is_file():
        from irpe.train.runs import load_run

        return load_run(path)
    from irpe.adapters.saving import load_equipped

    return load_equipped(path)
