"""`irpe show robustness`: trained models on images of other sizes, and shifted."""

import json
import statistics
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from irpe.cli.load import find_model
from irpe.errors import UserError
from irpe.extras import require_installed

if TYPE_CHECKING:
    from irpe.train.run import Run
    from irpe.train.task import Condition, Task

_COLUMNS = 6  # that fit in 80 characters
_SCALES = tuple(Fraction(scale) for scale in ("3/4", "7/8", "1", "5/4", "3/2"))
_FACTORS = "1,1.5,2"

At = float | tuple[int, int]
Curves = dict[str, dict[At, list[float]]]


def robustness(
    runs: Annotated[list[Path], "Folders of runs of one task.", "RUN"],
    *,
    sizes: Annotated[
        str | None,
        "Sizes of the input, in pixels: 48,64,32x64 [3/4 to 3/2 of the first run's]. Of segmenters "
        "how much larger images are [1,1.5,2].",
    ] = None,
    moves: Annotated[str, "Of classifiers: how far images move, in patches."] = "0,1,2,3",
    label: Annotated[
        list[str] | None, "Name of a group; repeat it for each, in order [their encodings]."
    ] = None,
    data: Annotated[str | None, "The images, as in irpe eval [those of the runs]."] = None,
    split: Annotated[str | None, "Of segmenters: the split [that of the runs]."] = None,
    output: Annotated[Path, "The picture, .png or .svg.", "FILE"] = Path("robustness.png"),
    as_json: Annotated[bool, "Print JSON."] = False,
) -> None:
    """Scores of trained models at other sizes, and on images that moved.

    Runs that differ in the seed alone are a group: one curve, their mean, with a point for each
    seed and bars of two standard errors over the images. At another size the learned absolute
    encoding is resampled and all else stays as it is.
    Images of classifiers also move: right, down, left or up in turn; grey images leave black, those
    with colours their reflection.
    Segmenters see larger images whole, and in sliding windows of the size of a crop in training.
    The scores are written next to the picture, as FILE.json.

    Examples:
        irpe show robustness ABLATION/cells/* --sizes 48,64,32x64 -o robust.png
    """
    require_installed("train", "accelerate", "timm")
    require_installed("viz", "matplotlib")
    for run in runs:
        find_model(run)
    _check_once(runs)
    from irpe.ablation.robustness import name_groups
    from irpe.cli.console import ProgressBar, print_lines
    from irpe.files import check_writable, write_text
    from irpe.progress import silent
    from irpe.train.evaluation import evaluate
    from irpe.train.processes import make_accelerator
    from irpe.train.run import Run
    from irpe.viz import plot_robustness, save_figure
    from irpe.viz.canvas import FORMATS, check_output

    values = check_output(output, FORMATS).with_suffix(".json")
    check_writable(values)
    opened = [Run(path) for path in runs]
    tasks = dict.fromkeys(run.config.task for run in opened)
    if len(tasks) > 1:
        raise UserError(f"the runs are of {' and '.join(tasks)}: pass runs of one task")
    labels, accelerator = name_groups(opened, label or []), make_accelerator()
    if accelerator.num_processes > 1:
        raise UserError("robustness is measured in one process: start it without torchrun")
    first = _open(opened[0], data, split)[0]
    axes, measure = _axes(first, sizes, moves), first.measures[0]
    for run in opened:  # all of them are checked before the first is evaluated
        task = _open(run, data, split)[0]
        for condition in (each for axis in axes.values() for each in axis.values()):
            task.open("val", condition, silent)
    curves: dict[str, Curves] = {axis: {each: {} for each in labels} for axis in axes}
    errors: dict[str, Curves] = {axis: {each: {} for each in labels} for axis in axes}
    entries: list[dict[str, Any]] = []
    with ProgressBar() as bar:
        for run, name in zip(opened, labels, strict=True):
            pair = _open(run, data, split)
            config, found, count = pair[0].config, {axis: dict[str, float]() for axis in axes}, 0
            for axis, conditions in axes.items():
                each = evaluate(pair, list(conditions.values()), accelerator, None, bar)
                for at, evaluation in zip(conditions, each, strict=True):
                    value, count = evaluation.score.value, evaluation.score.num_images
                    curves[axis][name].setdefault(at, []).append(value)
                    spread = statistics.pstdev(evaluation.score.values or (value,))
                    errors[axis][name].setdefault(at, []).append(spread / count**0.5)
                    found[axis][_text(at)] = value
            by_axis = {f"{measure.key}_by_{axis}": of_axis for axis, of_axis in found.items()}
            entries.append({
                "path": str(run), "label": name, "seed": config.seed, "data": config.data,
                "num_images": count, "image_size": getattr(config, "image_size", None), **by_axis,
            })  # fmt: skip
    text = json.dumps({"runs": entries}, indent=2) + "\n"
    write_text(values, text)
    trained = {run.config.input_shape[1:] for run in opened if run.config.input_shape}
    marks = {"size": trained} if "move" in axes else {}
    titles = {axis: _TITLES[axis] for axis in axes}
    save_figure(plot_robustness(curves, titles, measure, marks, errors), output)
    if as_json:
        print_lines(text.rstrip("\n"))
        return
    for axis, of_axis in curves.items():
        _print_curves(f"{measure.name} by {_TITLES[axis]}", of_axis, 1 if measure.unit else 3)
    print_lines(f"wrote {values}", f"wrote {output}")


_TITLES = {
    "size": "the size of the input, in pixels",
    "move": "the patches that images moved",
    "scale": "the size of whole images, relative to training",
    "scale_sliding": "the size of images in sliding windows, relative to training",
}


def _open(run: "Run", data: str | None, split: str | None) -> "tuple[Task, Any]":
    """Returns the task of a run and its model, with the images that are asked for."""
    task, model = run.open()
    if data is not None:
        task.config = task.config.with_data(data)
    if split is not None:
        task.config = task.config.replace(val_split=split)
    return task, model


def _axes(task: "Task", sizes: str | None, moves: str) -> "dict[str, dict[At, Condition]]":
    """Returns the conditions by what changes, and by how much."""
    from irpe.train.task import Condition

    if "scale" in task.takes:
        factors = sorted(_number(part, sizes or "") for part in (sizes or _FACTORS).split(","))
        return {
            "scale": {each: Condition(scale=each, windows=False) for each in factors},
            "scale_sliding": {each: Condition(scale=each, windows=True) for each in factors},
        }
    if "shift" not in task.takes:
        raise UserError(f"images of {task.config.task} have no other sizes: pass other runs")
    pixels = _default_sizes(task) if sizes is None else [_size(each) for each in sizes.split(",")]
    by_area = sorted(set(pixels), key=lambda size: (size[0] * size[1], size))
    shifts = sorted({int(_number(part, moves)) for part in moves.split(",")})
    return {
        "size": {size: Condition(size=size) for size in by_area},
        "move": {float(shift): Condition(shift=shift) for shift in shifts},
    }


def _default_sizes(task: Any) -> list[tuple[int, int]]:
    """Returns sizes from three quarters to one and a half of a run's own, in whole patches."""
    own, patch = task.config.input_shape[1:], task.patch
    return [
        (rows, columns)
        for scale in _SCALES
        for rows, columns in [
            tuple(max(1, round(Fraction(side, patch) * scale)) * patch for side in own)
        ]
    ]


def _size(text: str) -> tuple[int, int]:
    rows, times, columns = text.strip().partition("x")
    numbers = (rows, columns) if times else (rows, rows)
    if not all(number.isdecimal() and 0 < len(number) < 10 for number in numbers):
        raise UserError(f"--sizes: {text!r} is not a size: write 48, or rows x columns, as 32x64")
    return int(numbers[0]), int(numbers[1])


def _number(part: str, text: str) -> float:
    try:
        return float(part)
    except ValueError:
        raise UserError(f"{text!r}: {part!r} is not a number, as in 1,1.5,2") from None


def _text(at: At) -> str:
    """Returns how a condition is called: 48 for a square, 32x64, or a number."""
    if isinstance(at, tuple):
        return str(at[0]) if at[0] == at[1] else f"{at[0]}x{at[1]}"
    return f"{at:g}"


def _check_once(runs: Sequence[Path]) -> None:
    """Raises an error if a run is given twice."""
    paths = [run.resolve() for run in runs]
    for run, path in zip(runs, paths, strict=True):
        if paths.count(path) > 1:
            raise UserError(f"{run} is given twice: give each run once")


def _print_curves(
    title: str, curves: Mapping[str, Mapping[At, Sequence[float]]], digits: int
) -> None:
    """Prints the mean of each group, and half the distance between its best and worst seed."""
    from irpe.cli.console import print_lines, print_table

    conditions = list(next(iter(curves.values())))
    print_lines(title)
    for start in range(0, len(conditions), _COLUMNS):
        shown = conditions[start : start + _COLUMNS]
        rows = [
            [label, *(_cell(scores[condition], digits) for condition in shown)]
            for label, scores in curves.items()
        ]
        print_table(["", *map(_text, shown)], rows)


def _cell(scores: Sequence[float], digits: int) -> str:
    half = (max(scores) - min(scores)) / 2
    spread = f"±{half:.{digits}f}" if len(scores) > 1 else ""
    return f"{statistics.mean(scores):.{digits}f}{spread}"
