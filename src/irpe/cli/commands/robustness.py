"""`irpe show robustness`: trained classifiers on images of other sizes, and shifted."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from irpe.cli.bars import ProgressBar
from irpe.cli.load import find_model
from irpe.cli.validation import open_val
from irpe.errors import UserError
from irpe.extras import require_installed
from irpe.files import check_writable, write_text
from irpe.progress import track

_COLUMNS = 6  # that fit in 80 characters


def robustness(
    runs: Annotated[list[Path], "Folders of runs of classifiers.", "RUN"],
    *,
    sizes: Annotated[
        str | None, "Sides of the input, in pixels [3/4 to 3/2 of the first run's]."
    ] = None,
    moves: Annotated[str, "How far images move, in patches."] = "0,1,2,3",
    label: Annotated[
        list[str] | None, "Name of a group; repeat it for each, in order [their encodings]."
    ] = None,
    data: Annotated[str | None, "The images, as in irpe eval [those of the runs]."] = None,
    output: Annotated[Path, "The picture, .png or .svg.", "FILE"] = Path("robustness.png"),
    as_json: Annotated[bool, "Print JSON."] = False,
) -> None:
    """Top-1 of trained classifiers at other input sizes, and on images that moved.

    Runs that differ in the seed alone are a group: one curve, their mean, with a point for each
    seed and bars of two standard errors over the images.
    At another size the learned absolute encoding is resampled and all else stays as it is. Moved
    images go right, down, left or up in turn; grey images leave black, those with colours their
    reflection. The scores are written next to the picture, as FILE.json.

    Examples:
        irpe show robustness ABLATION/cells/* --sizes 48,56,64,80 -o robust.png
    """
    require_installed("train", "accelerate", "timm")
    require_installed("viz", "matplotlib")
    for run in runs:
        find_model(run)
    from irpe.ablation.robustness import collect, measure, name_groups
    from irpe.train.processes import make_accelerator
    from irpe.viz import plot_robustness, save_figure
    from irpe.viz.canvas import FORMATS, check_output

    values = check_output(output, FORMATS).with_suffix(".json")
    check_writable(values)
    chosen = None if sizes is None else _parse("--sizes", sizes, "48,56,64")
    distances = _parse("--moves", moves, "0,1,2,3")
    labels = name_groups(check_once(runs), label or [])
    opened, chosen = _open(runs, data, chosen, distances)
    work = measure(opened, chosen, distances, make_accelerator())
    count = len(runs) * (len(chosen) + len(distances))
    with ProgressBar() as bar:
        points = list(track(bar, work, count, "evaluating"))
    by_size, by_move = (collect(points, axis, labels) for axis in ("size", "move"))
    trained = {run.config.image_size for run in opened}
    num_images = min(len(run.source) for run in opened)
    figure = plot_robustness(by_size, by_move, trained, num_images)
    text = describe_runs(opened, labels, lambda index, run: _scores(index, run, points))
    write_text(values, text)
    save_figure(figure, output)
    if as_json:
        print(text, end="")
        return
    print_curves("top-1 (%) by the side of the input", by_size)
    print_curves("top-1 (%) by the patches that images moved", by_move)
    error = 50 / num_images**0.5
    print(f"{num_images:,} images: the standard error of a score is at most {error:.1f}")
    print(f"wrote {values}\nwrote {output}")


def check_once(runs: Sequence[Path]) -> Sequence[Path]:
    """Returns some runs, or raises an error if one is given twice."""
    paths = [run.resolve() for run in runs]
    for run, path in zip(runs, paths, strict=True):
        if paths.count(path) > 1:
            raise UserError(f"{run} is given twice: give each run once")
    return runs


def _parse(option: str, text: str, example: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 10 for part in parts):
        raise UserError(f"{option} {text!r}: write integers such as {example}")
    return sorted({int(part) for part in parts})


def _open(
    paths: Sequence[Path], data: str | None, sizes: list[int] | None, moves: list[int]
) -> tuple[list[Any], list[int]]:
    """Returns the runs with their images, and the sizes, after all of them are checked."""
    from irpe.ablation.robustness import (
        EvaluatedRun,
        check_conditions,
        default_sizes,
        read_classifier,
    )
    from irpe.train.runs import load_run

    runs: list[EvaluatedRun] = []
    for path in paths:
        config, model = read_classifier(path), load_run(path)
        val = open_val(config, model, data)
        sizes = sizes or default_sizes(config, model)
        check_conditions(path, val.config, model, sizes, moves)
        runs.append(EvaluatedRun(path, val.config, val.source))
    return runs, sizes or []


def _scores(index: int, run: Any, points: Sequence[Any]) -> dict[str, Any]:
    """Returns what the JSON file holds of one run's scores."""
    of_run = [point for point in points if point.run == index]
    return {
        "image_size": run.config.image_size,
        "top1_by_size": {point.at: point.top1 for point in of_run if point.axis == "size"},
        "top1_by_move": {point.at: point.top1 for point in of_run if point.axis == "move"},
    }


def print_curves(title: str, curves: Mapping[str, Mapping[Any, Sequence[float]]]) -> None:
    """Prints the mean of each group, and half the distance between its best and worst seed."""
    from irpe.cli.console import print_lines, print_table

    conditions = list(next(iter(curves.values())))
    print_lines(title)
    for start in range(0, len(conditions), _COLUMNS):
        shown = conditions[start : start + _COLUMNS]
        columns = ["", *(f"{condition:g}" for condition in shown)]
        rows = [
            [label, *(_cell(scores[condition]) for condition in shown)]
            for label, scores in curves.items()
        ]
        print_table(columns, rows)


def describe_runs(
    runs: Sequence[Any], labels: Sequence[str], scores: Callable[[int, Any], dict[str, Any]]
) -> str:
    """Returns the content of the JSON file beside a picture of runs, an entry for each.

    Args:
        runs: The runs, with their configurations and images.
        labels: The name of each one's group.
        scores: Returns the rest of an entry, from the index of a run and the run.
    """
    entries = [
        {
            "path": str(run.path),
            "label": label,
            "seed": run.config.seed,
            "data": run.config.data,
            "num_images": len(run.source),
            **scores(index, run),
        }
        for index, (run, label) in enumerate(zip(runs, labels, strict=True))
    ]
    return json.dumps({"runs": entries}, indent=2) + "\n"


def _cell(scores: Sequence[float]) -> str:
    spread = f"±{(max(scores) - min(scores)) / 2:.1f}" if len(scores) > 1 else ""
    return f"{statistics.mean(scores):.1f}{spread}"
