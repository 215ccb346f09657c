"""Recipes: functions that return the configuration of a run."""

from collections.abc import Callable, Mapping

from irpe.recipes import classification, detection, segmentation
from irpe.train.configs import Config

RECIPES: Mapping[str, Callable[[], Config]] = {
    **classification.RECIPES,
    **detection.RECIPES,
    **segmentation.RECIPES,
}
