"""The configurations of all tasks, by the name of the task; torch is not needed to read them."""

from collections.abc import Mapping

from irpe.tasks.classify.config import ClassifierConfig
from irpe.tasks.detect.config import DetectorConfig
from irpe.tasks.segment.config import SegmenterConfig

Config = ClassifierConfig | DetectorConfig | SegmenterConfig
CONFIGS: Mapping[str, type[Config]] = {
    config.task: config for config in (ClassifierConfig, DetectorConfig, SegmenterConfig)
}
KINDS = {
    "classification": "classifier",
    "detection": "detector",
    "segmentation": "segmenter",
}  # what the model of a task is called
