"""`irpe eval` for segmenters: intersection over union, and pictures of what is predicted."""

import json
import math
from pathlib import Path
from typing import Any

from irpe.errors import UserError
from irpe.extras import require_installed
from irpe.files import write_text
from irpe.tasks.segment.config import SegmenterConfig

_ON_A_SHEET = 12  # images
_WIDTH = 79


def evaluate_pixels(
    path: Path,
    model: Any,
    config: SegmenterConfig,
    accelerator: Any,
    scale: float,
    batch_size: int | None,
    workers: int,
    draw: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Prints and saves the scores of a segmenter, and draws images.

    Args:
        path: The run.
        model: Its model.
        config: Its configuration; its `val_split` is evaluated.
        accelerator: Knows the processes and the device.
        scale: How much larger than in training images are.
        batch_size: Images per forward pass; `None`: as many as in training.
        workers: Processes that load images.
        draw: How many images are drawn.
        output: The folder of results; `None`: eval in the run.
        as_json: Print JSON.
    """
    if not 0 < scale <= 16:
        raise UserError(f"--scale {scale} must be greater than 0, and at most 16")
    if draw:
        require_installed("viz", "matplotlib")
    from irpe.cli.bars import ProgressBar
    from irpe.tasks.segment.crops import PixelImages, WholeImages
    from irpe.tasks.segment.scores import EVAL_BATCH, evaluate
    from irpe.tasks.segment.task import open_split
    from irpe.tasks.segment.windows import windows_of

    folder, model = output or path / "eval", model.to(accelerator.device)
    with ProgressBar() as bar:
        source = open_split(config, config.val_split, bar)
        config.check_classes(source.classes)
        if accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
        images = PixelImages(source, WholeImages(config, scale), None)
        windows, size = windows_of(config), batch_size or EVAL_BATCH
        score = evaluate(model, images, accelerator, windows, size, workers, bar)
    if not accelerator.is_main_process:
        return
    values = {
        "path": str(path),
        "data": config.data,
        "split": config.val_split,
        "scale": scale,
        "sliding": config.sliding,
        **score.row(),
        "classes": {
            name: None if math.isnan(iou) else iou
            for name, iou in zip(source.classes, score.iou, strict=True)
        },
        "num_images": score.num_images,
    }
    write_text(folder / "scores.json", json.dumps(values, indent=2) + "\n")
    if draw:
        _draw(model, images, windows, min(draw, len(source)), accelerator.device, folder)
    if as_json:
        print(json.dumps(values))
        return
    print("  ".join(f"{name} {value:.2f}" for name, value in score.row().items()))
    for line in _class_lines(source.classes, score.iou):
        print(line)
    windowed = ", sliding windows" if config.sliding else ""
    sized = f" at {scale:g} times the size" if scale != 1 else ""
    where = f"{config.data}, {config.val_split}{sized}{windowed}"
    print(f"{score.num_images:,} images of {where}; saved in {folder}")


def _class_lines(classes: Any, ious: Any) -> list[str]:
    """Returns the intersection over union of each class that occurs, as many to a line as fit."""
    known = {name: iou for name, iou in zip(classes, ious, strict=True) if not math.isnan(iou)}
    texts = [f"{name} {iou:.1f}" for name, iou in known.items()]
    if len(known) < len(classes):
        texts.append(f"({len(classes) - len(known)} neither true nor predicted)")
    lines = [f"IoU: {texts[0]}"]
    for text in texts[1:]:
        if len(lines[-1]) + len(text) + 3 > _WIDTH:
            lines.append(f"     {text}")
        else:
            lines[-1] += f"  {text}"
    return lines


def _draw(model: Any, images: Any, windows: Any, count: int, device: Any, folder: Path) -> None:
    """Saves pictures of the first images with what is true and predicted, and a contact sheet."""
    import torch

    from irpe.tasks.segment.scores import predict
    from irpe.train.sampling import Sample
    from irpe.viz import SegmentedImage, plot_segmentation, plot_segmentation_sheet, save_figure

    source = images.source
    items: list[SegmentedImage] = []
    for index in range(count):
        image, labels, _ = images[Sample(0, index, index)]
        with torch.no_grad():
            (predicted,) = predict(model, [image], [labels], device, windows)
        file = Path(source.filename(index))
        item = SegmentedImage(source.read(index)[0], labels, predicted, file.name)
        items.append(item)
        figure = plot_segmentation(item, source.classes)
        save_figure(figure, folder / f"{index:04}-{file.stem}.png")
    sheet = plot_segmentation_sheet(items[:_ON_A_SHEET], source.classes)
    save_figure(sheet, folder / "contact-sheet.png")
