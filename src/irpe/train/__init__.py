"""Training and evaluation: data, loop, checkpoints and runs.

A configuration says what is trained; `irpe.recipes.RECIPES` has those that the documentation names.
"""

from typing import TYPE_CHECKING

from irpe.lazy import lazy_names

if TYPE_CHECKING:
    from irpe.tasks.classify.config import ClassifierConfig
    from irpe.tasks.detect.config import DetectorConfig
    from irpe.tasks.segment.config import SegmenterConfig
    from irpe.train.engine import FitResult
    from irpe.train.runs import load_run, read_metrics
    from irpe.train.start import train

__all__ = [
    "ClassifierConfig",
    "DetectorConfig",
    "FitResult",
    "SegmenterConfig",
    "load_run",
    "read_metrics",
    "train",
]

__getattr__, __dir__ = lazy_names(
    "irpe.train",
    {
        "irpe.tasks.classify.config": ("ClassifierConfig",),
        "irpe.tasks.detect.config": ("DetectorConfig",),
        "irpe.train.engine": ("FitResult",),
        "irpe.train.runs": ("load_run", "read_metrics"),
        "irpe.tasks.segment.config": ("SegmenterConfig",),
        "irpe.train.start": ("train",),
    },
    extra="train",
)
