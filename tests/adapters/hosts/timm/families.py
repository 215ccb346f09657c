"""Small models of timm's families besides the stock ViT and Swin, with random weights."""

from functools import partial

import timm
import torch
from adapters.small_models import images, make_vit, perturb


def make_small(name, **arguments):
    """A model of timm with five classes, in eval mode."""
    torch.manual_seed(0)
    return perturb(timm.create_model(name, num_classes=5, **arguments).eval())


def make_on_tokens(name, **arguments):
    """A model on a 2x5 grid of patches."""
    return make_vit(name, **{"img_size": (16, 40), **arguments})


# How each is made, what it is called with, and the tokens before the patches.
ON_TOKENS = {
    "DINOv3": ("vit_small_patch16_dinov3", 5, {}),
    "DINOv3 with biases": ("vit_small_patch16_dinov3_qkvb", 5, {}),
    "EVA-02": ("eva02_tiny_patch14_224", 1, {}),
    "EVA-02 with one projection": ("eva02_base_patch14_224", 1, {"qkv_fused": True}),
    "EVA-02 with a norm": ("eva02_base_patch16_clip_224", 1, {"scale_attn_inner": True}),
    "EVA-02 after the norm": ("eva02_tiny_patch14_224", 1, {"use_post_norm": True}),
    "Perception Encoder": ("vit_pe_core_base_patch16_224", 1, {}),
    "rope-vit": ("vit_small_patch16_rope_224", 1, {}),
    "rope-vit, mixed": ("vit_small_patch16_rope_mixed_ape_224", 1, {}),
    "rope-vit, grouped": ("vit_small_patch16_rope_224", 1, {"num_kv_heads": 1, "qkv_fused": False}),
    "Sapiens 2": ("vit_5b_patch16_sapiens2", 9, {"num_kv_heads": 1}),
    "BEiT": ("beit_base_patch16_224", 1, {}),
    "BEiT, shared": ("beit_base_patch16_224", 1, {"use_shared_rel_pos_bias": True}),
    "RelPos": ("vit_relpos_small_patch16_224", 0, {}),
    "RelPos with a class token": ("vit_relpos_base_patch16_clsgap_224", 1, {}),
    "RelPos, shared": ("vit_srelpos_small_patch16_224", 0, {}),
}
FAMILIES = {
    f"timm's {family}": (partial(make_on_tokens, name, **arguments), images(16, 40), prefix)
    for family, (name, prefix, arguments) in ON_TOKENS.items()
}


def make_sam(name="samvit_base_patch16_224", **arguments):
    """A model with windows of 3x3, which are padded, and attention over a grid of 4x8."""
    sizes = {"img_size": (32, 64), "window_size": 3, "global_attn_indexes": (1,)}
    return make_vit(name, **{**sizes, "neck_chans": 16, **arguments})


FAMILIES |= {
    "timm's SAM": (make_sam, images(32, 64), 0),
    "timm's SAM that rotates": (
        partial(make_sam, use_rel_pos=False, use_rope=True), images(32, 64), 0,
    ),
}  # fmt: skip


def make_swin_v2(**arguments):
    """Swin v2 of timm: shifted windows of 2x4 on grids of 8x16 and 4x8."""
    sizes = {"img_size": (32, 64), "window_size": (2, 4), "embed_dim": 16}
    sizes |= {"depths": (2, 2), "num_heads": (2, 4)}
    return make_small("swinv2_tiny_window8_256", **{**sizes, **arguments})


FAMILIES["timm's Swin v2"] = (make_swin_v2, images(32, 64), 0)
# Which of them every test of hosts runs with; the others are variants of these.
FIRST = {
    f"timm's {family}": FAMILIES[f"timm's {family}"]
    for family in (
        "DINOv3", "rope-vit, grouped", "BEiT", "RelPos with a class token", "SAM", "Swin v2",
    )
}  # fmt: skip
