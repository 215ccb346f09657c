"""Recipes for segmenters: two with published settings, and a small one for a laptop.

Each docstring gives the command, the cost and the score to expect. The two for GPUs have not been
run here.
"""

from collections.abc import Callable

from irpe.tasks.segment.config import SegmenterConfig


def seg_small() -> SegmenterConfig:
    """A small ViT with a linear head on images of 240 x 180, 20 x 15 patches.

    Command: irpe train seg_small --data CAMVID --set ignore_label=11 --encoding K
    Cost: 12 epochs of 367 images, 1.5 to 2.5 minutes of one core.
    Score: mIoU 26.2 on val of CamVid with the absolute encoding alone;
    docs/results/segmentation.md.
    """
    return SegmenterConfig(
        model="vit_tiny_patch16_224",
        model_args={
            "patch_size": 12,
            "embed_dim": 64,
            "depth": 3,
            "num_heads": 2,
            "mlp_ratio": 2,
        },
        crop_height=180,
        crop_width=240,
        min_resize=0.75,
        max_resize=1.5,
        color_jitter=0.2,
        epochs=12,
        batch_size=4,
        lr=4e-3,
        warmup_epochs=1,
        eval_every=4,
    )


def seg_ade20k() -> SegmenterConfig:
    """DeiT-S with a linear head on ADE20K, with the settings of Segmenter; not run here.

    Command: torchrun --nproc_per_node 8 -m irpe train seg_ade20k --data ADEChallengeData2016
    --encoding product-contextual-k --precision bf16
    Cost: 64 epochs of 20,210 images (160,000 steps of 8), a day on 8 GPUs.
    Score: not run here, so none is known.
    """
    return SegmenterConfig(
        model="deit_small_patch16_224",
        initial="pretrained",
        short_side=512,
        sliding=True,
        stride=512,
        crop_height=512,
        crop_width=512,
        min_resize=0.5,
        max_resize=2.0,
        color_jitter=0.4,
        drop_path=0.1,
        epochs=64,
        batch_size=8,
        optimizer="sgd",
        lr=1e-3,
        table_lr=1.0,
        absolute_lr=1.0,
        min_lr=1e-5,
        poly_power=0.9,
        warmup_epochs=0,
        weight_decay=0.0,
        eval_every=4,
        workers=8,
    )


def seg_cityscapes() -> SegmenterConfig:
    """DeiT-B with an upsampling head on Cityscapes, with the settings of SETR; not run here.

    Command: torchrun --nproc_per_node 8 -m irpe train seg_cityscapes --data CITYSCAPES
    --encoding product-contextual-k --precision bf16
    Cost: 215 epochs of 2,975 images (80,000 steps of 8), a day on 8 GPUs.
    Score: not run here; SETR reports 79.3 mIoU for its own upsampling head on a ViT-L.
    """
    return seg_ade20k().replace(
        model="deit_base_patch16_384",
        head="upsampling",
        short_side=0,
        stride=512,
        crop_height=768,
        crop_width=768,
        epochs=215,
        lr=1e-2,
        min_lr=1e-4,
        eval_every=10,
    )


RECIPES: dict[str, Callable[[], SegmenterConfig]] = {
    recipe.__name__: recipe for recipe in (seg_small, seg_ade20k, seg_cityscapes)
}
