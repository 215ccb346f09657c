"""`irpe eval`: the score of a run, of an equipped model, or of a published checkpoint."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from irpe.cli.load import load_model
from irpe.extras import require
from irpe.train.config import RUN_FILE, TrainConfig

EPILOG = """
**Examples**

`irpe eval runs/laptop` (on the data of the run)

`irpe eval runs/laptop --data FOLDER --json`

`irpe eval deit_small_patch16_224_ctx_product_50_shared_k.pth --data IMAGENET`

`torchrun --nproc_per_node 2 -m irpe eval runs/laptop` (each image counts once)
"""


def evaluate(
    path: Annotated[Path, typer.Argument(help="A run, an equipped model, or a published file.")],
    data: Annotated[
        str | None, typer.Option(help="A folder, tar or idx files, a timm data set name.")
    ] = None,
    root: Annotated[str | None, typer.Option(help="Where a data set with a name is kept.")] = None,
    batch_size: Annotated[int, typer.Option(help="Images at a time.")] = 256,
    workers: Annotated[int, typer.Option(help="Processes that read images.")] = 0,
    precision: Annotated[str, typer.Option(help="Mixed precision: no, bf16 or fp16.")] = "no",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Top-1 and top-5 on the validation images."""
    require("accelerate", "train")
    require("timm", "train")
    from irpe.train.engine import make_accelerator
    from irpe.train.evaluate import check_broken
    from irpe.train.evaluate import evaluate as score_of
    from irpe.train.loading import eval_images

    if batch_size < 1 or workers < 0:
        raise ValueError(f"batch_size = {batch_size}, workers = {workers}: at least 1 and 0")
    accelerator = make_accelerator(precision)
    model, config = _load(path)
    if data is not None:
        config = config.replace(data=data, root=root, holdout=0.0)
    source = _open(config, model, is_own=data is None)
    score = score_of(
        model.to(accelerator.device), eval_images(source, config), accelerator, batch_size, workers
    )
    check_broken(score, config.max_broken, config.data)
    if not accelerator.is_main_process:
        return
    if as_json:
        typer.echo(
            json.dumps({"path": str(path), "data": config.data, **dataclasses.asdict(score)})
        )
        return
    broken = f", {score.num_broken} unreadable left out" if score.num_broken else ""
    typer.echo(
        f"top-1 {score.top1:.2f}  top-5 {score.top5:.2f}  loss {score.loss:.4f}  "
        f"({score.num_images:,} images of {config.data}{broken})"
    )


def _load(path: Path) -> tuple[Any, TrainConfig]:
    """Returns a model, and how images are prepared for it."""
    import irpe
    from irpe.train.runs import read_config

    model: Any = load_model(path) if path.is_dir() else irpe.load_published(path)
    if (path / RUN_FILE).is_file():
        return model, read_config(path)
    prepared: Any = model.pretrained_cfg
    tag = prepared.get("tag")
    config = TrainConfig(
        model=prepared["architecture"] + (f".{tag}" if tag else ""),
        data="",
        image_size=model.patch_embed.img_size[0],
        channels=model.in_chans,
        crop=prepared["crop_pct"],
    )
    return model, config


def _open(config: TrainConfig, model: Any, is_own: bool) -> Any:
    """Returns the validation images; those of a run's own data count the classes it trained."""
    from irpe.train.images import open_images, open_split

    if not config.data:
        raise ValueError("--data is missing: the images to evaluate on")
    if is_own:
        source = open_images(config.data, config.root, config.holdout)[1]
    else:
        source = open_split(config.data, "val", config.root)
    if len(source.classes) != model.num_classes:
        raise ValueError(
            f"{config.data} has {len(source.classes)} classes, the model {model.num_classes}"
        )
    return source
