"""`irpe eval` for detectors: average precision, the boxes that were found, pictures of them."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from irpe.extras import require
from irpe.files import write_text
from irpe.train.config import DetectorConfig

_FROM = 0.5  # the score from which a box is drawn


def is_detector(model: Any) -> bool:
    """Tells whether a model finds objects."""
    return type(model).__name__ == "DetrForObjectDetection"


def describe_detector(model: Any) -> DetectorConfig:
    """Returns how images are prepared for a detector that is no run, and its classes.

    A model that does not know names has COCO's category ids as its classes, as those of the paper.
    """
    names = [model.config.id2label[number] for number in range(model.config.num_labels)]
    is_named = names != [f"LABEL_{number}" for number in range(len(names))]
    backbone = model.config.backbone_config.backbone
    return DetectorConfig(backbone=backbone, classes=tuple(names) if is_named else ())


def evaluate_boxes(
    path: Path,
    model: Any,
    config: DetectorConfig,
    accelerator: Any,
    split: str | None,
    batch_size: int,
    workers: int,
    draw: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Prints and saves average precision, and saves the boxes that were found."""
    require("pycocotools", "train")
    from irpe.cli.monitor import track
    from irpe.train.average_precision import per_class, score_boxes
    from irpe.train.boxes import open_boxes
    from irpe.train.detect import as_row, eval_boxes, find_boxes

    if config.data == "embedded":
        raise ValueError("--data is missing: a folder in the layout of COCO or Pascal VOC")
    split = split or config.val_split
    source = open_boxes(config.data, split, config.classes or None)
    source = source.first(config.limit) if config.limit else source
    with accelerator.local_main_process_first():  # which may make feature maps
        images = eval_boxes(source, config, model.model.backbone if config.views else None, track)
    categories = source.categories if config.classes else range(model.config.num_labels)
    model = model.to(accelerator.device)
    found = find_boxes(model, images, categories, accelerator, workers, batch_size)
    known = set(source.categories)
    found = [box for box in found if box["category_id"] in known]
    if not accelerator.is_main_process:
        return
    score = score_boxes(source.content, found)
    values = {
        "path": str(path), "data": config.data, "split": split, **_without_nan(as_row(score)),
        "classes": _without_nan(per_class(source.content, found)), "num_images": score.num_images,
    }  # fmt: skip
    place = output or (path / "eval" if path.is_dir() else Path(f"{path.stem}-eval"))
    place.mkdir(parents=True, exist_ok=True)
    write_text(place / "scores.json", json.dumps(values, indent=2) + "\n")
    write_text(place / "detections.json", json.dumps(found) + "\n")
    if draw:
        _draw(source, found, min(draw, len(source)), place)
    if as_json:
        typer.echo(json.dumps(values))
        return
    numbers = (f"{name} {_number(value)}" for name, value in as_row(score).items())
    typer.echo("  ".join(numbers))
    typer.echo(f"{score.num_images:,} images of {config.data}, {split}; saved in {place}")


def _draw(source: Any, found: list[dict[str, Any]], count: int, place: Path) -> None:
    """Saves pictures of the first images with their boxes, and all of them on a contact sheet."""
    require("matplotlib", "viz")
    from irpe.viz import DetectedImage, plot_contact_sheet, plot_detections, save_figure

    names = dict(zip(source.categories, source.classes, strict=True))
    items: list[DetectedImage] = []
    for number in range(count):
        image, title = source.read(number)[0], Path(source.filename(number)).name
        own = [
            box
            for box in found
            if box["image_id"] == source.image_id(number) and box["score"] >= _FROM
        ]
        truth = [
            (tuple(box["bbox"]), names[box["category_id"]])
            for box in source.content["annotations"]
            if box["image_id"] == source.image_id(number) and not box["iscrowd"]
        ]
        boxes = [tuple(box["bbox"]) for box in own]
        labels = [names[box["category_id"]] for box in own]
        scores = [box["score"] for box in own]
        items.append(DetectedImage(image, boxes, labels, scores, truth, title))
        figure = plot_detections(image, boxes, labels, scores, classes=source.classes)
        save_figure(figure, place / f"{Path(title).stem}.png")
    save_figure(plot_contact_sheet(items, source.classes), place / "contact-sheet.png")


def _without_nan(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in values.items()}


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"
