"""`irpe eval`: the score of a run, of an equipped model, or of a published checkpoint."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from irpe.cli.evaluate_boxes import THRESHOLD, config_of_detector, evaluate_boxes, is_detector
from irpe.cli.evaluate_pixels import evaluate_pixels
from irpe.cli.load import find_model, load_model, open_timm
from irpe.cli.validation import open_val
from irpe.errors import UserError, check_choice
from irpe.extras import require_installed
from irpe.tasks.classify.config import ClassifierConfig
from irpe.tasks.detect.config import DetectorConfig
from irpe.tasks.segment.config import SegmenterConfig
from irpe.train.config import PRECISIONS, RUN_FILE, check_exists
from irpe.train.configs import KINDS, Config

_INSIDE = (".safetensors", ".json", ".pt")  # files of a saved model or run; the authors' are .pth


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
    draw: Annotated[int, "Of a detector or segmenter: draw this many images."] = 0,
    threshold: Annotated[
        float | None, "Of a detector: the least score of a box that is drawn [0.3]."
    ] = None,
    scale: Annotated[float | None, "Of a segmenter: how much larger images are [1]."] = None,
    sliding: Annotated[
        bool | None, "Of a segmenter: sliding windows, or whole images [as in training]."
    ] = None,
    output: Annotated[
        Path | None, "Of a detector or segmenter: folder of results [PATH/eval].", "DIR"
    ] = None,
    batch_size: Annotated[
        int | None, "Images per forward pass [256; detectors 4; segmenters 8]."
    ] = None,
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
    check_choice("--precision", precision, PRECISIONS)
    is_file = path.is_file() or path.suffix == ".pth"
    if model is None and path.is_file() and path.suffix in _INSIDE:
        raise UserError(
            f"{path} is one file: of a saved model or run, pass its folder, {path.parent}; of "
            "weights of a model of timm, add --model NAME"
        )
    if model is not None and not path.is_file():
        raise UserError(f"--model {model}: it is for a file of weights, which {path} is not")
    if image_size is not None and model is None:
        raise UserError(f"--image-size {image_size}: it belongs to --model NAME, which is missing")
    path = path if is_file else find_model(path)
    if data is not None:
        check_exists(data)
    from irpe.cli.bars import ProgressBar
    from irpe.tasks.classify.scores import TOP, check_broken
    from irpe.tasks.classify.scores import evaluate as score_of
    from irpe.tasks.classify.transforms import eval_images
    from irpe.train.processes import make_accelerator

    accelerator = make_accelerator(precision, device)
    loaded, config, preparation = _load(path, is_file, model, image_size)
    if not isinstance(config, SegmenterConfig) and (scale is not None or sliding is not None):
        raise UserError(f"--scale and --sliding are for segmenters: this is {_kind(config)}")
    if not isinstance(config, ClassifierConfig):
        if root is not None:
            raise UserError(f"--root is for classifiers: this is {_kind(config)}")
        if data is not None or split is not None:
            is_other = data is not None and os.path.realpath(data) != os.path.realpath(config.data)
            holdout = 0.0 if is_other else config.holdout
            config = config.replace(data=data or config.data, limit=0, holdout=holdout)
        config = config.replace(val_split=split or config.val_split)
    if threshold is not None and not isinstance(config, DetectorConfig):
        raise UserError(f"--threshold is for detectors: this is {_kind(config)}")
    if isinstance(config, SegmenterConfig):
        if sliding is not None:
            config = config.replace(sliding=sliding)
        how = (1.0 if scale is None else scale, batch_size, workers, draw, output, as_json)
        evaluate_pixels(path, loaded, config, accelerator, *how)
        return
    if isinstance(config, DetectorConfig):
        drawing = (draw, THRESHOLD if threshold is None else threshold, output)
        evaluate_boxes(path, loaded, config, accelerator, batch_size, workers, *drawing, as_json)
        return
    if split is not None or draw or output is not None:
        raise UserError(
            "--split, --draw and --output are for detectors and segmenters: this is a classifier"
        )
    if root is not None and data is None:
        raise UserError(f"--root {root}: it belongs to --data NAME, which is missing")
    val = open_val(config, loaded, data, root)
    config, source = val.config, val.source
    loaded = loaded.to(accelerator.device)
    images = eval_images(source, config, preparation)
    with ProgressBar() as bar:
        score = score_of(loaded, images, accelerator, batch_size or 256, workers, bar)
    check_broken(score, config.max_broken, source)
    if not accelerator.is_main_process:
        return
    if as_json:
        values = {
            "path": str(path),
            "data": config.data,
            "images": val.part,
            "top1": score.top1,
            "top5": score.top5,
            "loss": score.loss,
            "num_images": score.num_images,
            "num_broken": score.num_broken,
        }
        print(json.dumps(values))
        return
    broken = f", {score.num_broken} unreadable left out" if score.num_broken else ""
    top5 = f"top-5 {score.top5:.2f}  " if len(source.classes) > TOP else ""
    print(
        f"top-1 {score.top1:.2f}  {top5}loss {score.loss:.4f}  "
        f"({score.num_images:,} images: {val.words}{broken})"
    )


def _kind(config: Config) -> str:
    return f"a {KINDS[config.task]}"


def _load(
    path: Path, is_file: bool, timm_name: str | None, image_size: int | None
) -> tuple[Any, Config, Mapping[str, Any] | None]:
    """Returns a model, its configuration, and how its images are prepared if it is not a run."""
    import irpe
    from irpe.cli.classifiers import as_classifier
    from irpe.train.runs import read_config

    model: Any
    if timm_name is not None:
        model = open_timm(timm_name, path, image_size)
        if not model.num_classes:
            raise UserError(
                f"{path} has no head, so it cannot classify: irpe train --initial {path} --set "
                f"model={timm_name} --data FOLDER trains one"
            )
    else:
        model = irpe.load_published(path) if is_file else load_model(path)
    if (path / RUN_FILE).is_file():
        return model, read_config(path), None
    if is_detector(model):
        return model, config_of_detector(model), None
    classifier = as_classifier(model, path)
    if classifier.note is not None:
        print(classifier.note, file=sys.stderr)
    return classifier.model, classifier.config, classifier.preparation
