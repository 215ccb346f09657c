"""Trained segmenters on images of other sizes than in training, whole and in sliding windows."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator

from irpe.ablation.robustness import read_as
from irpe.errors import UserError
from irpe.tasks.segment.config import SegmenterConfig
from irpe.tasks.segment.crops import PixelImages, WholeImages
from irpe.tasks.segment.labels.source import LabelledPixels
from irpe.tasks.segment.scores import evaluate
from irpe.tasks.segment.windows import windows_of
from irpe.train.runs import load_run

Curves = dict[str, dict[float, list[float]]]


@dataclass(frozen=True)
class SegmenterRun:
    """A run of a segmenter to evaluate.

    Args:
        path: Its directory.
        config: Its configuration.
        source: The images to evaluate on.
    """

    path: Path
    config: SegmenterConfig
    source: LabelledPixels


class SizePoint(NamedTuple):
    """A run's score at one size.

    Args:
        run: The index of the run.
        scale: How much larger than in training images are.
        is_sliding: Whether windows of the size of training were averaged.
        miou: The mean intersection over union, in percent.
    """

    run: int
    scale: float
    is_sliding: bool
    miou: float


def read_segmenter(path: Path) -> SegmenterConfig:
    """Returns the configuration of a segmenter's run."""
    return read_as(path, SegmenterConfig)


def measure_sizes(
    runs: Sequence[SegmenterRun], scales: Sequence[float], accelerator: Accelerator
) -> Iterator[SizePoint]:
    """Yields the scores of all runs at all sizes, whole images and then sliding windows.

    The learned absolute encoding is resampled to each grid, and all else stays as it is. A window
    is as large as a crop in training.

    Args:
        runs: The runs.
        scales: How much larger than in training images are.
        accelerator: Knows the device.
    """
    if accelerator.num_processes > 1:
        raise UserError("sizes are measured in one process: start it without torchrun")
    for index, run in enumerate(runs):
        model = load_run(run.path).to(accelerator.device)
        for scale in scales:
            images = PixelImages(run.source, WholeImages(run.config, scale), None)
            for is_sliding in (False, True):
                windows: Any = windows_of(run.config.replace(sliding=is_sliding))
                score = evaluate(model, images, accelerator, windows, workers=run.config.workers)
                yield SizePoint(index, scale, is_sliding, score.miou)


def collect_sizes(points: Iterable[SizePoint], labels: Sequence[str], is_sliding: bool) -> Curves:
    """Returns the scores by the label of the group, then by size, in the order of runs.

    Args:
        points: The scores.
        labels: The label of each run.
        is_sliding: Those of sliding windows, or of whole images.
    """
    curves: Curves = {label: {} for label in labels}
    for point in points:
        if point.is_sliding == is_sliding:
            curves[labels[point.run]].setdefault(point.scale, []).append(point.miou)
    return curves
