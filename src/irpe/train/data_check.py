"""Whether the data of a configuration is where it should be; torch is not needed to see that."""

from pathlib import Path

from irpe.errors import MissingFileError, UserError
from irpe.tasks.classify.config import ClassifierConfig
from irpe.tasks.classify.sources import check_images
from irpe.tasks.detect.annotations.layout import find_annotations
from irpe.tasks.detect.config import DetectorConfig
from irpe.train.config import EMBEDDED, RunConfig

_NEEDED = {
    "detection": "a folder in the layout of COCO or Pascal VOC",
    "segmentation": "a folder of images with label maps",
}


def check_data(config: RunConfig) -> None:
    """Raises an error if the data of a run is not there, before anything slow is imported or read.

    Args:
        config: The configuration of the run.
    """
    if isinstance(config, ClassifierConfig):
        check_images(config.data, config.root, config.holdout)
        return
    if config.data == EMBEDDED:
        raise UserError(f"--data is missing: {_NEEDED[config.task]}")
    if isinstance(config, DetectorConfig):
        for split in (config.train_split, config.val_split):
            find_annotations(config.data, split, config.holdout)
    elif not Path(config.data).is_dir():
        raise MissingFileError(f"data {config.data!r} is not a folder")
