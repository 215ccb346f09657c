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

_ON_A_SHEET = 24
_FROM = 0.5  # the score from which a box is drawn


def is_detector(model: Any) -> bool:
    """Tells whether a model finds objects."""
    return type(model).__name__ == "DetrForObjectDetection"


def describe_detector(model: Any) -> DetectorConfig:
    """Returns how images are prepared for a detector that is no run, and its classes.

    A model without a name for each class has COCO's category ids as its classes, as those of the
    paper. Images are prepared as for the paper's.
    """
    names = [model.config.id2label[number] for number in range(model.config.num_labels)]
    is_named = names[0] != "LABEL_0" and len(set(names)) == len(names)
    backbone = model.config.backbone_config.backbone
    return DetectorConfig(backbone=backbone, classes=tuple(names) if is_named else ())


def evaluate_boxes(
    path: Path,
    model: Any,
    config: DetectorConfig,
    accelerator: Any,
    batch_size: int | None,
    workers: int,
    draw: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Prints and saves average precision, and saves the boxes that were found."""
    require("pycocotools", "train")
    if draw:
        require("matplotlib", "viz")
    from irpe.cli.monitor import track
    from irpe.train.detection.annotations.source import open_boxes
    from irpe.train.detection.scores import score_with_classes
    from irpe.train.detection.task import BATCH, as_row, eval_boxes, find_boxes

    if config.data == "embedded":
        raise ValueError("--data is missing: a folder in the layout of COCO or Pascal VOC")
    source = open_boxes(config.data, config.val_split, config.classes or None)
    source = source.first(config.limit) if config.limit else source
    place = output or (path / "eval" if path.is_dir() else Path(f"{path.stem}-eval"))
    if accelerator.is_main_process:
        place.mkdir(parents=True, exist_ok=True)
    with accelerator.local_main_process_first():  # which may make feature maps
        images = eval_boxes(source, config, model.model.backbone if config.views else None, track)
    categories = source.categories if config.classes else range(model.config.num_labels)
    model = model.to(accelerator.device)
    found = find_boxes(model, images, categories, accelerator, workers, batch_size or BATCH, track)
    known = set(source.categories)
    found = [box for box in found if box["category_id"] in known]
    if not accelerator.is_main_process:
        return
    score, classes = score_with_classes(source.content, found)
    values = {
        "path": str(path),
        "data": config.data,
        "split": config.val_split,
        **_without_nan(as_row(score)),
        "classes": _without_nan(classes),
        "num_images": score.num_images,
        "num_dropped": source.num_dropped,
    }
    write_text(place / "scores.json", json.dumps(values, indent=2) + "\n")
    write_text(place / "detections.json", json.dumps(found) + "\n")
    if draw:
        _draw(source, found, min(draw, len(source)), place)
    if as_json:
        typer.echo(json.dumps(values))
        return
    numbers = (f"{name} {_number(value)}" for name, value in as_row(score).items())
    typer.echo("  ".join(numbers))
    dropped = f" without {source.num_dropped} invalid boxes" if source.num_dropped else ""
    data = f"{config.data}, {config.val_split}{dropped}"
    typer.echo(f"{score.num_images:,} images of {data}; saved in {place}")


def _draw(source: Any, found: list[dict[str, Any]], count: int, place: Path) -> None:
    """Saves pictures of the first images with their boxes, and a contact sheet of some of them."""
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
        save_figure(figure, place / f"{number:04}-{Path(title).stem}.png")
    save_figure(
        plot_contact_sheet(items[:_ON_A_SHEET], source.classes), place / "contact-sheet.png"
    )


def _without_nan(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in values.items()}


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"
