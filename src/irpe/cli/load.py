"""Models that a command is pointed at."""

from pathlib import Path

from torch import nn

from irpe.adapters.saving import load_equipped
from irpe.train.config import RUN_FILE


def load_model(path: Path) -> nn.Module:
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
    return load_equipped(path)
