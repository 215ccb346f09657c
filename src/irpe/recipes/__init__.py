"""Recipes: functions that return the configuration of a run."""

from collections.abc import Callable, Mapping

from irpe.recipes import classification, detection
from irpe.train.classification.config import ClassifierConfig
from irpe.train.detection.config import DetectorConfig

RECIPES: Mapping[str, Callable[[], ClassifierConfig | DetectorConfig]] = {
    **classification.RECIPES,
    **detection.RECIPES,
}
