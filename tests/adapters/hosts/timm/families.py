"""Small models of timm's families besides the stock ViT and Swin, with random weights.

RelPos stands for VisionTransformerRelPos, SAM for VisionTransformerSAM, Swin v2 for
SwinTransformerV2.
"""

from functools import partial

import timm
import torch
from adapters.small_models import images, make_vit, perturb
from timm.models.gcvit import GlobalContextVit
from timm.models.volo import VOLO


def make_small(name, size=0.2, **arguments):
    """A model of timm, of a class or by name, with five classes, in eval mode."""
    torch.manual_seed(0)
    make = name if isinstance(name, type) else partial(timm.create_model, name)
    return perturb(make(num_classes=5, **arguments).eval(), size=size)


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
    "Qwen3": ("qwen3_vit_88m_enc", 0, {"global_pool": "avg", "merge_size": 1}),
    "DeepSeek": ("deepseek_vit_412m_enc", 0, {"global_pool": "avg"}),
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

TWO_STAGES = {"depths": (1, 1), "embed_dim": (32, 64), "img_size": (64, 128)}
ON_MAPS = {
    "Swin v2, CR": ("swinv2_cr_tiny_ns_224", (32, 64), {
        "img_size": (32, 64), "window_size": (2, 4), "embed_dim": 16, "depths": (2, 2),
        "num_heads": (2, 4),
    }),
    "MaxViT": ("maxvit_rmlp_pico_rw_256", (64, 128), {
        **TWO_STAGES, "block_type": ("M", "M"), "stem_width": 16,
    }),
    "MaxViT of TensorFlow": ("maxvit_tiny_tf_224", (64, 128), {
        **TWO_STAGES, "block_type": ("M", "M"), "stem_width": 16,
    }),
    "CoAtNet": ("coatnet_rmlp_nano_rw_224", (64, 128), {
        **TWO_STAGES, "depths": (1, 2), "block_type": ("C", "T"), "stem_width": 16,
    }),
    "VOLO": (VOLO, (64, 128), {
        "img_size": (64, 128), "layers": (1, 2), "embed_dims": (32, 32), "num_heads": (2, 2),
        "downsamples": (True, False), "outlook_attention": (True, False), "mlp_ratio": (2, 2),
    }),
    "Twins": ("twins_svt_small", (40, 72), {
        "img_size": (40, 72), "embed_dims": (16, 32), "num_heads": (2, 2), "mlp_ratios": (2, 2),
        "depths": (2, 2), "sr_ratios": (2, 1), "wss": (3, 3),
    }),
    "TinyViT": ("tiny_vit_5m_224", (64, 128), {
        "depths": (1, 2, 1, 1), "embed_dims": (16, 32, 32, 32), "num_heads": (1, 2, 2, 2),
        "window_sizes": (2, 2, 2, 2),
    }),
    "DaViT": ("davit_tiny", (40, 72), {
        "depths": (1, 1), "embed_dims": (32, 32), "num_heads": (2, 2), "window_size": 3,
    }),
    "Visformer": ("visformer_tiny", (32, 64), {
        "img_size": (32, 64), "embed_dim": 32, "depth": (1, 1, 1), "num_heads": 2,
        "attn_stage": "011", "init_channels": 8, "size": 0.02,
    }),
    "FastViT": ("fastvit_sa12", (64, 128), {
        "layers": (1, 1, 1, 2), "embed_dims": (8, 8, 8, 32),
    }),
    "GCViT": (GlobalContextVit, (64, 128), {
        "img_size": (64, 128), "depths": (2, 2), "num_heads": (2, 4), "window_ratio": (32, 16),
        "embed_dim": 16,
    }),
}  # fmt: skip
FAMILIES |= {
    f"timm's {family}": (partial(make_small, name, **arguments), images(*size), 0)
    for family, (name, size, arguments) in ON_MAPS.items()
}
# Which of them every test of hosts runs with; the others are variants of these.
FIRST = {
    f"timm's {family}": FAMILIES[f"timm's {family}"]
    for family in (
        "DINOv3", "rope-vit, grouped", "BEiT", "RelPos with a class token", "SAM", "Swin v2",
        "MaxViT", "VOLO", "Twins",
    )
}  # fmt: skip
