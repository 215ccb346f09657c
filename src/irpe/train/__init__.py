"""Training and evaluation: data, loop, checkpoints and runs.

A configuration says what is trained; `irpe.recipes.RECIPES` has those that the documentation names.
"""

from typing import TYPE_CHECKING

from irpe.lazy import lazy_names

if TYPE_CHECKING:
    from irpe.tasks.classify.config import ClassifierConfig
    from irpe.tasks.detect.config import DetectorConfig
    from irpe.tasks.segment.config import SegmenterConfig
    from irpe.train.config import RunConfig, register_task
    from irpe.train.engine import FitResult, train
    from irpe.train.evaluation import evaluate
    from irpe.train.run import Run, load_run, read_metrics
    from irpe.train.task import Condition, Measure, Score, Task

__all__ = [
    "ClassifierConfig", "Condition", "DetectorConfig", "FitResult", "Measure", "Run", "RunConfig",
    "Score", "SegmenterConfig", "Task", "evaluate", "load_run", "read_metrics", "register_task",
    "train",
]  # fmt: skip

_SOURCES = {
    "irpe.tasks.classify.config": ("ClassifierConfig",),
    "irpe.tasks.detect.config": ("DetectorConfig",),
    "irpe.tasks.segment.config": ("SegmenterConfig",),
    "irpe.train.config": ("RunConfig", "register_task"),
    "irpe.train.engine": ("FitResult", "train"),
    "irpe.train.evaluation": ("evaluate",),
    "irpe.train.run": ("Run", "load_run", "read_metrics"),
    "irpe.train.task": ("Condition", "Measure", "Score", "Task"),
}
__getattr__, __dir__ = lazy_names("irpe.train", _SOURCES, extra="train")
