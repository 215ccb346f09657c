"""Recipes: functions that return the configuration of a run."""

from collections.abc import Callable, Mapping

from irpe.recipes import classification, detection, segmentation
from irpe.train.config import RunConfig

RECIPES: Mapping[str, Callable[[], RunConfig]] = {
    **classification.RECIPES,
    **detection.RECIPES,
    **segmentation.RECIPES,
}
