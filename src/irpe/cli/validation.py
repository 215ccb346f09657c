"""The images that a trained classifier is evaluated on, and what to call them."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from irpe.errors import UserError
from irpe.tasks.classify.config import ClassifierConfig
from irpe.train.config import is_name

_WORDS = {
    "held-out": "the part of {} held out in training",
    "val": "the val split of {}",
    "all": "all of {}",
}


@dataclass(frozen=True)
class ValImages:
    """Images to evaluate on.

    Args:
        config: The configuration of the model, with the data that the images are of.
        source: The images.
        part: Which images of the data they are: "held-out", "val" or "all".
    """

    config: ClassifierConfig
    source: Any
    part: str

    @property
    def words(self) -> str:
        """Which images they are, in words."""
        return _WORDS[self.part].format(self.config.data)


def open_val(
    config: ClassifierConfig, model: Any, data: str | None = None, root: str | None = None
) -> ValImages:
    """Returns the images to evaluate on; a run's own data has the classes that it was trained on.

    Of the folder that a run held images out of, these alone are evaluated on, whether the folder is
    given again or not: the run has seen the others.

    Args:
        config: The configuration of the model.
        model: The model, with `num_classes`.
        data: Other images than those of the run.
        root: Where a dataset with a name is stored.
    """
    from irpe.tasks.classify.sources import has_splits, open_evaluation, open_images

    is_own = data is None or (root is None and _is_held_out_of(config, data))
    if data is not None and not is_own:
        config = config.replace(data=data, root=root, holdout=0.0)
    if not config.data:
        raise UserError("--data is missing: the images to evaluate on")
    if is_own:
        source = open_images(config.data, config.root, config.holdout)[1]
    else:
        source = open_evaluation(config.data, config.root)
    config.check_classes(source.classes)
    if len(source.classes) != model.num_classes:
        raise UserError(
            f"{config.data} has {len(source.classes)} classes, the model {model.num_classes}"
        )
    has_val = is_name(config.data) or has_splits(Path(config.data))
    return ValImages(config, source, "held-out" if config.holdout else "val" if has_val else "all")


def _is_held_out_of(config: ClassifierConfig, data: str) -> bool:
    """Returns whether data is the folder that a run held images out of."""
    is_path = config.holdout > 0 and not is_name(data)
    return is_path and os.path.realpath(data) == os.path.realpath(config.data)
