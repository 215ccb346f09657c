"""`irpe show robustness`: trained models on images of other sizes, and shifted."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Annotated, Any

from irpe.cli.load import find_model
from irpe.errors import UserError
from irpe.extras import require_installed

if TYPE_CHECKING:
    from torch import nn

    from irpe.train.config import RunConfig
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
    paths = [run.resolve() for run in map(find_model, runs)]
    for run, path in zip(runs, paths, strict=True):
        if paths.count(path) > 1:
            raise UserError(f"{run} is given twice: give each run once")
    from irpe.cli.console import ProgressBar, print_lines
    from irpe.files import check_writable, write_text
    from irpe.progress import silent
    from irpe.train.evaluation import evaluate
    from irpe.train.processes import make_accelerator
    from irpe.train.run import Run
    from irpe.viz import plot_robustness, save_figure
    from irpe.viz.canvas import FORMATS, check_output
    from irpe.viz.scores import text_of

    values = check_output(output, FORMATS).with_suffix(".json")
    check_writable(values)
    opened = [Run(path) for path in runs]
    tasks = dict.fromkeys(run.config.task for run in opened)
    if len(tasks) > 1:
        raise UserError(f"the runs are of {' and '.join(tasks)}: pass runs of one task")
    labels, accelerator = name_groups(opened, label or []), make_accelerator()
    if accelerator.num_processes > 1:
        raise UserError("robustness is measured in one process: start it without torchrun")
    first = _open(opened[0], data)[0]
    axes, measure = _axes(first, sizes, moves), first.measures[0]
    for run in opened:  # all of them are checked before the first is evaluated
        task = _open(run, data)[0]
        for condition in (each for axis in axes.values() for each in axis.values()):
            task.open("val", condition, silent)
    curves: dict[str, Curves] = {axis: {each: {} for each in labels} for axis in axes}
    errors: dict[str, Curves] = {axis: {each: {} for each in labels} for axis in axes}
    entries: list[dict[str, Any]] = []
    with ProgressBar() as bar:
        for run, name in zip(opened, labels, strict=True):
            pair = _open(run, data)
            config, count = pair[0].config, 0
            found: dict[str, dict[str, float]] = {}
            for axis, conditions in axes.items():
                of_axis = found[f"{measure.key}_by_{axis}"] = {}
                each = evaluate(pair, list(conditions.values()), accelerator, None, bar)
                for at, evaluation in zip(conditions, each, strict=True):
                    score, count = evaluation.score, evaluation.score.num_images
                    error = pstdev(score.values or (score.value,)) / count**0.5
                    curves[axis][name].setdefault(at, []).append(score.value)
                    errors[axis][name].setdefault(at, []).append(error)
                    of_axis[text_of(at)] = score.value
            entries.append({
                "path": str(run), "label": name, "seed": config.seed, "data": config.data,
                "num_images": count, "image_size": getattr(config, "image_size", None), **found,
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
    for axis, of_groups in curves.items():
        print_lines(f"{measure.name} by {_TITLES[axis]}")
        _print_curves(of_groups, 1 if measure.unit else 3)
    print_lines(f"wrote {values}", f"wrote {output}")


_TITLES = {
    "size": "the size of the input, in pixels",
    "move": "the patches that images moved",
    "scale": "the size of whole images, relative to training",
    "scale_sliding": "the size of images in sliding windows, relative to training",
}


def _open(run: "Run", data: str | None) -> "tuple[Task, Any]":
    """Returns the task of a run and its model, with the images that are asked for."""
    task, model = run.open()
    if data is not None:
        task.config = task.config.with_data(data)
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
    pixels = _default_sizes(task) if sizes is None else parse_shapes(sizes)
    by_area = sorted(set(pixels), key=lambda size: (size[0] * size[1], size))
    shifts = sorted({int(_number(part, moves)) for part in moves.split(",")})
    return {
        "size": {size: Condition(size=size) for size in by_area},
        "move": {float(shift): Condition(shift=shift) for shift in shifts},
    }


def _default_sizes(task: Any) -> list[tuple[int, int]]:
    """Returns sizes from three quarters to one and a half of a run's own, in whole patches."""
    patch, (rows, columns) = task.patch, task.config.input_shape[1:]

    def scaled(side: int, scale: Fraction) -> int:
        return max(1, round(Fraction(side, patch) * scale)) * patch

    return [(scaled(rows, scale), scaled(columns, scale)) for scale in _SCALES]


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """Returns the rows and columns in a text such as 48,64,32x64."""
    sizes: list[tuple[int, int]] = []
    for part in text.split(","):
        rows, times, columns = part.strip().partition("x")
        numbers = (rows, columns) if times else (rows, rows)
        if not all(number.isdecimal() and 0 < len(number) < 10 for number in numbers):
            message = f"--sizes: {part!r} is not a size: write 48, or rows x columns, as 32x64"
            raise UserError(message)
        sizes.append((int(numbers[0]), int(numbers[1])))
    return sizes


def _number(part: str, text: str) -> float:
    try:
        return float(part)
    except ValueError:
        raise UserError(f"{text!r}: {part!r} is not a number, as in 1,1.5,2") from None


def _print_curves(curves: Mapping[str, Mapping[At, Sequence[float]]], digits: int) -> None:
    """Prints the mean of each group, and half the distance between its best and worst seed."""
    from irpe.cli.console import print_table
    from irpe.viz.scores import text_of

    def cell(scores: Sequence[float]) -> str:
        half = (max(scores) - min(scores)) / 2
        return f"{fmean(scores):.{digits}f}" + f"±{half:.{digits}f}" * (len(scores) > 1)

    conditions = list(next(iter(curves.values())))
    for start in range(0, len(conditions), _COLUMNS):
        shown = conditions[start : start + _COLUMNS]
        rows = [[label, *(cell(found[at]) for at in shown)] for label, found in curves.items()]
        print_table(["", *map(text_of, shown)], rows)


def name_groups(runs: "Sequence[Run]", labels: Sequence[str]) -> list[str]:
    """Returns the label of each run's group: runs that differ in the seed alone are a group.

    Args:
        runs: The runs.
        labels: A name for each group, in the order of their first runs; empty: names made from
            the encodings.
    """
    configs = [run.config for run in runs]
    keys = [config.replace(seed=0).to_json() for config in configs]
    first = [keys.index(key) for key in dict.fromkeys(keys)]
    if labels and len(labels) != len(first):
        raise UserError(
            f"{len(labels)} labels for {len(first)} groups of runs (runs that differ in the seed "
            "alone are a group): give one label for each, in the order of "
            f"{', '.join(str(runs[index]) for index in first)}"
        )
    names = list(labels) or [label_encodings(configs[n], runs[n].load()) for n in first]
    for group, name in enumerate(names):
        one, other = configs[first[names.index(name)]], configs[first[group]]
        if one is not other:
            fields = [each.name for each in dataclasses.fields(one) if each.name != "seed"]
            differ = [each for each in fields if getattr(one, each) != getattr(other, each)]
            raise UserError(
                f"two groups of runs are called {name!r}, and differ in {', '.join(differ)}: give "
                f"each of the {len(first)} groups a label of its own"
            )
    return [names[first.index(keys.index(key))] for key in keys]


def label_encodings(config: "RunConfig", model: "nn.Module") -> str:
    """Returns a short name for the encodings of a run, such as "absolute + K"."""
    keys = list(model.state_dict())
    parts: list[str] = []
    if config.absolute == "sinusoid":
        parts.append("sinusoid")
    elif any(key.split(".")[-1] == "pos_embed" for key in keys):
        parts.append("absolute")
    if any(key.endswith("relative_position_bias_table") for key in keys):
        parts.append("built-in bias")
    if config.encoding != "none":
        usual = re.fullmatch("product-contextual-([qkv]+)", config.encoding)
        parts.append(usual[1].upper() if usual else config.encoding)
    return " + ".join(parts) or "none"
