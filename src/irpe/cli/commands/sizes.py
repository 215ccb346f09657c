"""`irpe show sizes`: trained segmenters on images of other sizes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from irpe.cli.bars import ProgressBar
from irpe.cli.commands.robustness import check_once, describe_runs, print_curves
from irpe.cli.load import find_model
from irpe.errors import UserError
from irpe.extras import require_installed
from irpe.files import check_writable, write_text
from irpe.progress import track

_LARGEST = 16.0  # times the size in training


def sizes(
    runs: Annotated[list[Path], "Folders of runs of segmenters.", "RUN"],
    *,
    scales: Annotated[str, "How much larger than in training images are."] = "1,1.5,2",
    label: Annotated[
        list[str] | None, "Name of a group; repeat it for each, in order [their encodings]."
    ] = None,
    split: Annotated[str | None, "The split [the one the runs evaluate on]."] = None,
    output: Annotated[Path, "The picture, .png or .svg.", "FILE"] = Path("sizes.png"),
    as_json: Annotated[bool, "Print JSON."] = False,
) -> None:
    """MIoU of trained segmenters on larger images, whole and in sliding windows.

    Runs that differ in the seed alone are a group: one curve, their mean, with a point for each
    seed. The learned absolute encoding is resampled to each grid and all else stays as it is; a
    window is as large as a crop in training. Scores are of the label maps as they are stored. They
    are written next to the picture, as FILE.json.

    Examples:
        irpe show sizes ABLATION/cells/* --scales 1,1.5,2 -o sizes.png
    """
    require_installed("train", "accelerate", "timm")
    require_installed("viz", "matplotlib")
    for run in runs:
        find_model(run)
    from irpe.ablation.image_sizes import collect_sizes, measure_sizes, read_segmenter
    from irpe.ablation.robustness import name_groups
    from irpe.train.processes import make_accelerator
    from irpe.viz import plot_sizes, save_figure
    from irpe.viz.canvas import FORMATS, check_output

    values = check_output(output, FORMATS).with_suffix(".json")
    check_writable(values)
    chosen = _parse_scales(scales)
    labels = name_groups(check_once(runs), label or [], read_segmenter)
    with ProgressBar() as bar:
        opened = _open(runs, split, bar)
        work = measure_sizes(opened, chosen, make_accelerator())
        points = list(track(bar, work, 2 * len(runs) * len(chosen), "evaluating"))
    whole, windows = (collect_sizes(points, labels, is_sliding) for is_sliding in (False, True))
    text = describe_runs(opened, labels, lambda index, run: _scores(index, run, points))
    write_text(values, text)
    save_figure(plot_sizes(whole, windows), output)
    if as_json:
        print(text, end="")
        return
    print_curves("mIoU (%) of whole images, by their size relative to training", whole)
    print_curves("mIoU (%) of sliding windows", windows)
    print(f"wrote {values}\nwrote {output}")


def _parse_scales(text: str) -> list[float]:
    try:
        found = sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise UserError(f"--scales {text!r}: write numbers such as 1,1.5,2") from None
    if not all(0 < scale <= _LARGEST for scale in found):
        raise UserError(f"--scales {text!r}: each must be greater than 0, at most {_LARGEST:g}")
    return found


def _open(paths: Sequence[Path], split: str | None, bar: ProgressBar) -> list[Any]:
    """Returns the runs with their images; those of the same data are opened once."""
    from irpe.ablation.image_sizes import SegmenterRun, read_segmenter
    from irpe.tasks.segment.task import open_split

    sources: dict[tuple[Any, ...], Any] = {}
    runs: list[SegmenterRun] = []
    for path in paths:
        config = read_segmenter(path)
        config = config.replace(val_split=split or config.val_split)
        key = config.data, config.val_split, config.ignore_label, config.classes, config.limit
        if key not in sources:
            sources[key] = open_split(config, config.val_split, bar)
        runs.append(SegmenterRun(path, config, sources[key]))
    return runs


def _scores(index: int, run: Any, points: Sequence[Any]) -> dict[str, Any]:
    """Returns what the JSON file holds of one run's scores."""
    of_run = [point for point in points if point.run == index]
    return {
        "split": run.config.val_split,
        "whole": {point.scale: point.miou for point in of_run if not point.is_sliding},
        "sliding": {point.scale: point.miou for point in of_run if point.is_sliding},
    }
