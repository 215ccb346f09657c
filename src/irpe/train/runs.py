"""The directory of a run.

It holds run.json, the whole configuration; checkpoint.pt, where the run stands; metrics.csv, a row
an epoch; tensorboard/, curves; and model/, the trained model, once the run has ended.
"""

from pathlib import Path

import safetensors.torch
from torch import nn

from irpe.adapters.equip import equipment_of
from irpe.adapters.keep import save_equipped
from irpe.files import write_bytes
from irpe.train.checkpoint import load_checkpoint
from irpe.train.classification.model import Weights, build_model, read_weights
from irpe.train.config import RUN_FILE, Config, DetectorConfig, parse_config

CHECKPOINT, MODEL = "checkpoint.pt", "model"
_TENSORS = "model.safetensors"


def read_config(directory: Path) -> Config:
    """Returns the configuration of a run."""
    path = directory / RUN_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: {directory} is not a run")
    try:
        return parse_config(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def save_model(directory: Path, model: nn.Module) -> None:
    """Writes the trained model of a run, as `irpe.load_equipped` reads it if it is equipped.

    A detector with a frozen backbone is read by `load_run` alone: transformers has no such model.
    """
    place = directory / MODEL
    if equipment_of(model):
        save_equipped(model, place)
        return
    place.mkdir(exist_ok=True)
    write_bytes(place / _TENSORS, safetensors.torch.save(dict(model.state_dict())))


def load_run(directory: str | Path) -> nn.Module:
    """Returns the model of a run in eval mode: the trained one, or the one of its checkpoint.

    Args:
        directory: The run's directory.
    """
    directory = Path(directory)
    config = read_config(directory).replace(initial=None)
    if (directory / MODEL / _TENSORS).is_file():
        weights = read_weights(directory)
    else:
        state = load_checkpoint(directory / CHECKPOINT)
        weights = state["average"] or state["model"]
    model = _build(config, weights)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{directory} does not fit its own configuration: {error}") from error
    return model.eval()


def _build(config: Config, weights: Weights) -> nn.Module:
    if isinstance(config, DetectorConfig):
        from irpe.train.detection.model import build_detector

        return build_detector(config, is_filled=False)
    return build_model(config, _num_classes(weights))


def _num_classes(weights: Weights) -> int:
    """Returns the classes that the last layer tells apart, in timm's ViT and Swin."""
    for name in ("head.bias", "head.fc.bias"):
        if name in weights:
            return len(weights[name])
    raise ValueError("the model has no last layer named head or head.fc, as timm's ViT and Swin do")
