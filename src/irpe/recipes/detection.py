"""Recipes for DETR: the paper's Table 6, and a small one for a laptop.

Each docstring gives the command, the cost and the score to expect. Scores "in the paper" are the
paper's: they have not been reproduced here.
"""

from collections.abc import Callable
from dataclasses import dataclass

from irpe.tasks.detect.config import DetectorConfig


@dataclass(frozen=True)
class _Detector:
    """A table row of Table 6: DETR with a ResNet-50, trained on COCO.

    Args:
        name: What it is called here.
        what: What distinguishes it.
        encoding: The text of the relative encoding, or "none".
        absolute: What becomes of DETR's sinusoid, as in `irpe.equip`.
        epochs: How long it is trained.
        ap: The average precision that the paper reports.
    """

    name: str
    what: str
    encoding: str
    absolute: str
    epochs: int
    ap: float


_TABLE_6 = (
    _Detector("detr_r50", "DETR with a ResNet-50 on COCO", "none", "keep", 150, 39.5),
    _Detector(
        "detr_r50_none", "No position encoding but for the object queries", "none", "none", 150,
        30.4,
    ),
    _Detector(
        "detr_r50_bias", "A bias of 9 x 9 buckets beside the sinusoid", "product-bias-k@2.0",
        "keep", 150, 40.6,
    ),
    _Detector(
        "detr_r50_k_none", "Contextual, 9 x 9 buckets, in place of the sinusoid",
        "product-contextual-k@2.0", "none", 150, 38.7,
    ),
    _Detector(
        "detr_r50_k_clip", "Contextual, 9 x 9 buckets of the clip function, beside the sinusoid",
        "product-contextual-k@clip4", "keep", 150, 40.4,
    ),
    _Detector(
        "detr_r50_k", "Contextual, 9 x 9 buckets, beside the sinusoid",
        "product-contextual-k@2.0", "keep", 150, 40.8,
    ),
    _Detector(
        "detr_r50_k_15", "Contextual, 15 x 15 buckets, beside the sinusoid",
        "product-contextual-k@3.5", "keep", 150, 40.8,
    ),
    _Detector("detr_r50_300", "DETR with a ResNet-50 on COCO", "none", "keep", 300, 40.6),
    _Detector(
        "detr_r50_300_k", "Contextual, 9 x 9 buckets, beside the sinusoid",
        "product-contextual-k@2.0", "keep", 300, 42.3,
    ),
)  # fmt: skip


def _paper_recipe(row: int, detector: _Detector) -> Callable[[], DetectorConfig]:
    """Returns the recipe of a table row of Table 6: the learning rate drops for the last third."""

    def recipe() -> DetectorConfig:
        return DetectorConfig(
            backbone="resnet50.tv_in1k",
            encoding=detector.encoding,
            absolute=detector.absolute,
            epochs=detector.epochs,
            low_lr_epochs=detector.epochs // 3,
            batch_size=16,
            lr=1e-4,
            table_lr=1.0,
            backbone_lr=1e-5,
            warmup_epochs=0,
            weight_decay=1e-4,
            clip_grad=0.1,
            workers=4,
        )

    duration = "days" if detector.epochs < 300 else "a week"
    recipe.__name__ = recipe.__qualname__ = detector.name
    recipe.__doc__ = f"""{detector.what}, {detector.epochs} epochs: the paper's Table 6, row {row}.

    Command: torchrun --nproc_per_node 8 -m irpe train {detector.name} --data COCO
    Cost: {detector.epochs} epochs of COCO, {duration} on 8 GPUs.
    Score: AP {detector.ap} in the paper.
    """
    return recipe


def detr_small() -> DetectorConfig:
    """A small DETR on a frozen EfficientNet-Lite0, whose feature maps are cached.

    Command: irpe train detr_small --data FOLDER --encoding product-contextual-k@2.0
    Cost: 130 epochs of 205 images, about 15 minutes on one busy core, after a minute or two for the
    feature maps.
    Score: AP50 0.32 on BCCD's val with it and --table-lr 1, 0.33 without (means of two seeds).
    """
    return DetectorConfig(
        backbone="tf_efficientnet_lite0",
        backbone_lr=0.0,
        cached_versions=2,
        model_args={
            "d_model": 128,
            "encoder_layers": 2,
            "decoder_layers": 4,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 256,
            "decoder_ffn_dim": 256,
            "num_queries": 40,
            "dropout": 0.0,
        },
        epochs=130,
        low_lr_epochs=20,
        batch_size=3,
        lr=1.5e-4,
        warmup_epochs=1,
        eval_every=10,
        weight_decay=1e-4,
        clip_grad=0.1,
        short_side=384,
        min_short_side=384,
        long_side=640,
    )


RECIPES: dict[str, Callable[[], DetectorConfig]] = {
    detector.name: _paper_recipe(row, detector) for row, detector in enumerate(_TABLE_6, 1)
}
RECIPES[detr_small.__name__] = detr_small
