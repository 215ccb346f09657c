"""Recipes for DETR: the paper's Table 6, and a small one for a laptop.

Each docstring gives the command, the cost and the score to expect. Scores "in the paper" are the
paper's: they have not been reproduced here.
"""

from collections.abc import Callable

from irpe.tasks.detect.config import DetectorConfig

_K = "product-contextual-k"
_TABLE_6 = (  # name, what distinguishes it, encoding, DETR's sinusoid, epochs, AP in the paper
    ("detr_r50", "DETR with a ResNet-50 on COCO", "none", "keep", 150, 39.5),
    ("detr_r50_none", "No position encoding but for the object queries", "none", "none", 150, 30.4),
    ("detr_r50_bias", "A bias of 9 x 9 buckets beside the sinusoid", "product-bias-k@2.0", "keep",
     150, 40.6),
    ("detr_r50_k_none", "Contextual, 9 x 9 buckets, in place of the sinusoid", f"{_K}@2.0", "none",
     150, 38.7),
    ("detr_r50_k_clip", "Contextual, 9 x 9 buckets of the clip function, beside the sinusoid",
     f"{_K}@clip4", "keep", 150, 40.4),
    ("detr_r50_k", "Contextual, 9 x 9 buckets, beside the sinusoid", f"{_K}@2.0", "keep", 150,
     40.8),
    ("detr_r50_k_15", "Contextual, 15 x 15 buckets, beside the sinusoid", f"{_K}@3.5", "keep", 150,
     40.8),
    ("detr_r50_300", "DETR with a ResNet-50 on COCO", "none", "keep", 300, 40.6),
    ("detr_r50_300_k", "Contextual, 9 x 9 buckets, beside the sinusoid", f"{_K}@2.0", "keep", 300,
     42.3),
)  # fmt: skip


def _paper_recipe(
    row: int, name: str, what: str, encoding: str, absolute: str, epochs: int, ap: float
) -> Callable[[], DetectorConfig]:
    """Returns the recipe of a row of Table 6: the learning rate drops for the last third."""

    def recipe() -> DetectorConfig:
        return DetectorConfig(
            backbone="resnet50.tv_in1k",
            encoding=encoding,
            absolute=absolute,
            epochs=epochs,
            low_lr_epochs=epochs // 3,
            batch_size=16,
            lr=1e-4,
            table_lr=1.0,
            backbone_lr=1e-5,
            warmup_epochs=0,
            weight_decay=1e-4,
            clip_grad=0.1,
            workers=4,
        )

    duration = "days" if epochs < 300 else "a week"
    recipe.__name__ = recipe.__qualname__ = name
    recipe.__doc__ = f"""{what}, {epochs} epochs: the paper's Table 6, row {row}.

    Command: torchrun --nproc_per_node 8 -m irpe train {name} --data COCO
    Cost: {epochs} epochs of COCO, {duration} on 8 GPUs.
    Score: AP {ap} in the paper.
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
    values[0]: _paper_recipe(row, *values) for row, values in enumerate(_TABLE_6, 1)
}
RECIPES[detr_small.__name__] = detr_small
