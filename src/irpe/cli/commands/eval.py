"""`irpe eval`: the score of a run, of an equipped model, or of a published checkpoint."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from irpe.cli.load import find_model, load_model, open_timm
from irpe.errors import UserError, check_choice
from irpe.extras import require_installed
from irpe.train.config import PRECISIONS, check_exists

if TYPE_CHECKING:
    from torch import nn

    from irpe.train.evaluation import Evaluation
    from irpe.train.task import Task

_INSIDE = (".safetensors", ".json", ".pt")  # files of a saved model or run; the authors' are .pth
_DETECTOR = "DetrForObjectDetection"


def evaluate(
    path: Annotated[Path, "A run, an equipped model, or a file of weights.", "PATH"],
    *,
    model: Annotated[
        str | None, "Of a file: the model of timm [a published one: by its name].", "NAME"
    ] = None,
    image_size: Annotated[
        int | None, "With --model: height and width of the images [the model's own]."
    ] = None,
    data: Annotated[str | None, "The images, as in irpe train [those of the run]."] = None,
    root: Annotated[str | None, "Where a dataset with a name is stored.", "DIR"] = None,
    split: Annotated[
        str | None, "Of a detector or segmenter: the split [the one the run evaluates on]."
    ] = None,
    scale: Annotated[float, "Of a segmenter: how much larger images are."] = 1.0,
    sliding: Annotated[
        bool | None, "Of a segmenter: sliding windows, or whole images [as in training]."
    ] = None,
    draw: Annotated[int, "Draw this many images with their predictions."] = 0,
    threshold: Annotated[
        float | None, "Of a detector: the least score of a box that is drawn [0.3]."
    ] = None,
    output: Annotated[Path | None, "Folder of results [eval in the run].", "DIR"] = None,
    batch_size: Annotated[int | None, "Images per forward pass [as the task has]."] = None,
    workers: Annotated[int, "Processes that load images."] = 0,
    precision: Annotated[str, "Mixed precision: no, bf16 or fp16."] = "no",
    device: Annotated[str, "auto, cpu, cuda or another kind of accelerator."] = "auto",
    as_json: Annotated[bool, "Print JSON."] = False,
) -> None:
    """Top-1 and top-5 of a classifier, average precision of a detector, mIoU of a segmenter.

    Examples:
        irpe eval runs/laptop
        irpe eval runs/laptop --data FOLDER --json
        irpe eval deit_small_patch16_224_ctx_product_50_shared_k.pth --data FOLDER
        irpe eval weights.safetensors --model vit_small_patch16_224 --data FOLDER
        torchrun --nproc_per_node 2 -m irpe eval runs/laptop    # counted once
        irpe eval runs/detr_small --split test --draw 12
        irpe eval runs/seg_small --split test --scale 1.5 --draw 8
    """
    require_installed("train", "accelerate", "timm")
    if (batch_size is not None and batch_size < 1) or workers < 0 or draw < 0:
        raise UserError(
            f"--batch-size {batch_size}, --workers {workers}, --draw {draw}: at least 1, 0 and 0"
        )
    if threshold is not None and not 0 <= threshold <= 1:
        raise UserError(f"--threshold {threshold}: a score is a number of 0 to 1")
    if draw:
        require_installed("viz", "matplotlib")
    check_choice("--precision", precision, PRECISIONS)
    _check_path(path, model, image_size)
    path = path if path.is_file() or path.suffix == ".pth" else find_model(path)
    if data is not None:
        check_exists(data)
    if root is not None and data is None:
        raise UserError(f"--root {root}: it belongs to --data NAME, which is missing")
    from irpe.cli.console import ProgressBar, print_lines
    from irpe.train.evaluation import evaluate as run_evaluation
    from irpe.train.processes import make_accelerator
    from irpe.train.task import Condition

    accelerator = make_accelerator(precision, device)
    task, loaded, note = _load(path, model, image_size)
    if note is not None:
        print(note, file=sys.stderr)
    if threshold is not None and "threshold" not in task.takes:
        raise UserError(f"--threshold {threshold} is not for {task.config.task}: leave it out")
    config = task.config if data is None else task.config.with_data(data)
    given: dict[str, Any] = {"root": root, "val_split": split, **({"limit": 0} if split else {})}
    changes = {name: value for name, value in given.items() if value is not None}
    task.config = config.replace(workers=workers, **changes)
    condition = Condition(scale=scale, windows=sliding)
    with ProgressBar() as bar:
        how = ([condition], accelerator, batch_size, bar)
        (found,) = run_evaluation((task, loaded), *how)
    if not accelerator.is_main_process:
        return
    default = path / "eval" if path.is_dir() else Path(f"{path.stem}-eval")
    saves = output is not None or path.is_dir() or draw or found.score.files
    folder = (output or default) if saves else None
    values = {
        "path": str(path),
        "data": task.config.data,
        **found.images.facts,
        **found.score.report(),
    }
    if folder is not None:
        _save(folder, values, found, task, draw, threshold)
    if as_json:
        print_lines(json.dumps(values))
        return
    print_lines(*_lines(found, folder))


def _check_path(path: Path, model: str | None, image_size: int | None) -> None:
    if model is None and path.is_file() and path.suffix in _INSIDE:
        raise UserError(
            f"{path} is one file: of a saved model or run, pass its folder, {path.parent}; of "
            "weights of a model of timm, add --model NAME"
        )
    if model is not None and not path.is_file():
        raise UserError(f"--model {model}: it is for a file of weights, which {path} is not")
    if image_size is not None and model is None:
        raise UserError(f"--image-size {image_size}: it belongs to --model NAME, which is missing")


def _load(
    path: Path, timm_name: str | None, image_size: int | None
) -> "tuple[Task, nn.Module, str | None]":
    """Returns the task of a model, the model, and what to say of how its images are prepared."""
    import irpe
    from irpe.train.config import find_task
    from irpe.train.run import Run

    if Run(path).exists:
        return *Run(path).open(), None
    model: Any
    if timm_name is not None:
        model = open_timm(timm_name, path, image_size)
        if not model.num_classes:
            raise UserError(
                f"{path} has no head, so it cannot classify: irpe train --initial {path} --set "
                f"model={timm_name} --data FOLDER trains one"
            )
    else:
        model = irpe.load_published(path) if not path.is_dir() else load_model(path)
    is_detector = type(model).__name__ == _DETECTOR
    owner: Any = find_task("detection" if is_detector else "classification")
    return owner.adopt(model, path)


def _save(
    folder: Path,
    values: Mapping[str, Any],
    found: "Evaluation",
    task: "Task",
    draw: int,
    threshold: float | None,
) -> None:
    """Writes the scores, what else the task stores, and pictures of the first images."""
    from irpe.files import write_text

    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "scores.json", json.dumps(values, indent=2) + "\n")
    for name, content in found.score.files.items():
        write_text(folder / name, json.dumps(content) + "\n")
    pictures: dict[str, Any] = {}
    for index in list(found.predictions)[:draw]:
        name = Path(found.images.source.filename(index)).stem
        picture = task.draw(found.images, index, found.predictions[index], threshold)
        picture.save(folder / f"{index:04}-{name}.png")
        pictures[name] = picture
    if pictures:
        from irpe.viz import plot_images, save_figure

        save_figure(plot_images(pictures), folder / "contact-sheet.png")


def _lines(found: "Evaluation", folder: Path | None) -> list[str]:
    """Returns the score in words, that of each class, and what the images are."""
    from irpe.cli.parse import wrap

    score = found.score
    known = {name: value for name, value in score.classes.items() if value == value}
    digits = 1 if score.measure.unit == "%" else score.measure.digits
    classes = [f"{name} {value:.{digits}f}" for name, value in known.items()]
    if len(known) < len(score.classes):
        classes.append(f"({len(score.classes) - len(known)} do not occur)")
    words = [text.replace(" ", "\0") for text in classes]
    by_class = wrap("  ".join(words), f"{score.measure.name}: ", "  ") if words else []
    broken = f", {score.num_broken} unreadable left out" if score.num_broken else ""
    saved = f"; saved in {folder}" if folder else ""
    return [
        score.line(),
        *(line.replace("\0", " ") for line in by_class),
        f"{score.num_images:,} images: {found.images}{broken}{saved}",
    ]
