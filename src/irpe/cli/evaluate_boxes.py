"""`irpe eval` for detectors: average precision, the detections, and pictures of them."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from irpe.errors import UserError
from irpe.extras import require_installed
from irpe.files import write_text
from irpe.tasks.detect.config import DetectorConfig

_ON_A_SHEET = 24  # pictures
THRESHOLD = 0.3  # the least score of a box that is drawn


def is_detector(model: Any) -> bool:
    """Tells whether a model is a detector."""
    return type(model).__name__ == "DetrForObjectDetection"


def config_of_detector(model: Any) -> DetectorConfig:
    """Returns how images are prepared for a detector that is not a run, and its classes.

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
    threshold: float,
    output: Path | None,
    as_json: bool,
) -> None:
    """Prints and saves average precision, and saves the detections."""
    require_installed("train", "pycocotools")
    if draw:
        require_installed("viz", "matplotlib")
    from irpe.cli.bars import ProgressBar
    from irpe.tasks.detect.annotations.source import open_boxes
    from irpe.tasks.detect.scores import score_with_classes
    from irpe.tasks.detect.task import EVAL_BATCH, detect, eval_inputs

    if config.data == "embedded":
        raise UserError("--data is missing: a folder in the layout of COCO or Pascal VOC")
    source = open_boxes(config.data, config.val_split, config.classes or None, config.holdout)
    source = source.first(config.limit) if config.limit else source
    folder = output or (path / "eval" if path.is_dir() else Path(f"{path.stem}-eval"))
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
    categories = source.categories if config.classes else range(model.config.num_labels)
    backbone = model.model.backbone if config.cached_versions else None
    with ProgressBar() as bar:
        with accelerator.local_main_process_first():  # it may compute feature maps
            images = eval_inputs(source, config, backbone, bar)
        if backbone is not None:
            backbone.takes = "features"
        model, size = model.to(accelerator.device), batch_size or EVAL_BATCH
        found = detect(model, images, categories, accelerator, workers, size, bar)
    known = set(source.categories)
    found = [detection for detection in found if detection["category_id"] in known]
    if not accelerator.is_main_process:
        return
    score, classes = score_with_classes(source.content, found)
    values = {
        "path": str(path),
        "data": config.data,
        "split": config.val_split,
        **_without_nan(score.row()),
        "classes": _without_nan(classes),
        "num_images": score.num_images,
        "num_dropped": source.num_dropped,
    }
    write_text(folder / "scores.json", json.dumps(values, indent=2) + "\n")
    write_text(folder / "detections.json", json.dumps(found) + "\n")
    if draw:
        _draw(source, found, min(draw, len(source)), threshold, folder)
    if as_json:
        print(json.dumps(values))
        return
    scores = (f"{name} {_score_text(value)}" for name, value in score.row().items())
    print("  ".join(scores))
    dropped = f" without {source.num_dropped} invalid boxes" if source.num_dropped else ""
    data = f"{config.data}, {config.val_split}{dropped}"
    print(f"{score.num_images:,} images of {data}; saved in {folder}")


def _draw(
    source: Any, found: list[dict[str, Any]], count: int, threshold: float, folder: Path
) -> None:
    """Saves pictures of the first images with their boxes, and a contact sheet of some of them."""
    from irpe.viz import DetectedImage, plot_contact_sheet, plot_detections, save_figure

    names = dict(zip(source.categories, source.classes, strict=True))
    items: list[DetectedImage] = []
    for index in range(count):
        image, key = source.read(index)[0], source.image_id(index)
        own = [d for d in found if d["image_id"] == key and d["score"] >= threshold]
        truth = [
            (a["bbox"], names[a["category_id"]])
            for a in source.content["annotations"]
            if a["image_id"] == key and not a["iscrowd"]
        ]
        file = Path(source.filename(index))
        boxes, scores = [d["bbox"] for d in own], [d["score"] for d in own]
        labels = [names[d["category_id"]] for d in own]
        items.append(DetectedImage(image, boxes, labels, scores, truth, file.name, threshold))
        figure = plot_detections(image, boxes, labels, scores, None, source.classes, threshold)
        save_figure(figure, folder / f"{index:04}-{file.stem}.png")
    sheet = plot_contact_sheet(items[:_ON_A_SHEET], source.classes)
    save_figure(sheet, folder / "contact-sheet.png")


def _without_nan(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in values.items()}


def _score_text(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"
