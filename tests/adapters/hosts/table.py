"""Every kind of model that can be equipped, small, with random weights: one table for all tests."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import timm
import torch
import transformers
from adapters import small_models
from adapters.small_models import images, perturb
from timm.models import mvitv2
from timm.models.gcvit import GlobalContextVit
from timm.models.volo import VOLO
from torch import nn
from torchvision.models import SwinTransformer, VisionTransformer
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

import irpe
from irpe.adapters.equipped import table_names

SPEC = "product-contextual-qkv"
WINDOW = 4


@dataclass(frozen=True)
class Host:
    """How a model is made and called, and what is known of it.

    Args:
        make: Makes the model, given other arguments.
        sizes: Sizes of images and the grids of the last attention; the first is not square if may
            be. `None` where the attentions have several.
        prefix: The tokens of the last attention that are not on the grid.
        options: What else the model is called with.
        name: The name of its input; "" for one without.
        takes_grid: Whether `equip` may be told the grid.
        is_described: Whether a file alone says how it is built.
        rtol: Which difference is rounding in float64.
        bias: In the names of parameters of its own relative encoding: of those whose zeros are no
            encoding, then of all.
        absolute: How the name of its learned absolute encoding ends.
        own_grid: The grid of that, if not that of the first size.
        smaller: Arguments that make it smaller, for what takes long.
    """

    make: Callable[..., nn.Module]
    sizes: dict
    prefix: int = 0
    options: dict = field(default_factory=dict)
    name: str = "pixel_values"
    takes_grid: bool = True
    is_described: bool = True
    rtol: float = 1e-6
    bias: tuple[str, ...] = ()
    absolute: str | None = None
    own_grid: tuple[int, ...] | None = None
    smaller: dict = field(default_factory=dict)

    def inputs(self, size=None, dtype=torch.float32):
        x = images(*(next(iter(self.sizes)) if size is None else size)).to(dtype)
        if not self.name:
            return x
        return {self.name: x[:, 0].mT if self.name == "input_values" else x, **self.options}

    @property
    def grid(self):
        return next(iter(self.sizes.values()))

    def equipped(self, spec=SPEC, **arguments):
        return equipped(self.make, spec, **arguments)


def equipped(make, spec=SPEC, **arguments):
    """An equipped model with random tables."""
    return randomize(irpe.equip(make(), spec, **arguments))


def randomize(model, std=0.5):
    """Fills the tables of a model."""
    generator = torch.Generator().manual_seed(3)
    for name in table_names(model):
        nn.init.normal_(model.get_parameter(name), std=std, generator=generator)
    return model


def tensors_of(value):
    """All tensors of real numbers in what a model returns."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, tuple | list):
        return [each for item in value for each in tensors_of(item)]
    return tensors_of(value.to_tuple()) if hasattr(value, "to_tuple") else []


class Outputs(nn.Module):
    """A model that returns one tensor, of all that it predicts."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs):
        out = self.model(**inputs) if isinstance(inputs, dict) else self.model(inputs)
        if isinstance(out, torch.Tensor):
            return out
        return torch.cat([each.flatten() for each in tensors_of(out)])


def predict(model, inputs):
    output = Outputs(model)(inputs)
    for module in model.modules():  # TinyViT keeps its bias in eval mode, with its graph
        getattr(module, "attention_bias_cache", {}).clear()
    return output


def gradients(model, inputs, forward=None):
    """The output and the gradients of all parameters that have one."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)  # for dropout, drop path and augmented rotations
    out = predict(model, inputs) if forward is None else forward(inputs)
    (out.flatten() * torch.linspace(-1, 1, out.numel(), dtype=out.dtype)).sum().backward()
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), **named}


def assert_same(actual, expected, **tolerance):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, **tolerance, msg=lambda m, n=name: n + m)


def use(model, implementation):
    """Chooses how attention is computed; "sdpa" is the default, which not all backbones accept."""
    if model.config._attn_implementation != implementation:
        model.set_attn_implementation(implementation)


def of_timm(name, **arguments):
    """A model of timm, of a class or by name, with five classes, in eval mode."""
    torch.manual_seed(0)
    size = arguments.pop("size", 0.2)
    make = name if isinstance(name, type) else partial(timm.create_model, name)
    return perturb(make(num_classes=5, **arguments).eval(), size=size)


def make_on_tokens(name="vit_tiny_patch16_224", **arguments):
    """A vision transformer of timm on a 2x5 grid of patches."""
    return small_models.make_vit(name, **{"img_size": (16, 40), **arguments})


def make_timm_sam(name="samvit_base_patch16_224", **arguments):
    """Windows of 3x3, which are padded, and attention over a grid of 4x8."""
    sizes = {"img_size": (32, 64), "window_size": 3, "global_attn_indexes": (1,)}
    return small_models.make_vit(name, **{**sizes, "neck_chans": 16, **arguments})


def make_timm_swin(**arguments):
    """Swin of timm: shifted windows of 2 x 4."""
    sizes = {"img_size": (32, 64), "window_size": (2, WINDOW)}
    return small_models.make_swin(**{**sizes, **arguments})


def make_timm_swin_v2(**arguments):
    """Swin v2 of timm (SwinTransformerV2): shifted windows of 2 x 4."""
    sizes = {"img_size": (32, 64), "window_size": (2, 4), "embed_dim": 16, "depths": (2, 2)}
    return of_timm("swinv2_tiny_window8_256", **{**sizes, "num_heads": (2, 4), **arguments})


def make_mvit(**arguments):
    """Keys at stride 4, then 2; queries pooled by 2 before the second and third stage."""
    strides = ((1, 1), (2, 2), (2, 2))
    config = mvitv2.MultiScaleVitCfg(
        depths=(1, 2, 1), embed_dim=16, num_heads=1, stride_q=strides, **arguments
    )
    torch.manual_seed(0)
    return perturb(mvitv2.MultiScaleVit(config, img_size=64, num_classes=5).eval())


# The name, the tokens before the patches, arguments.
STOCK = {
    "VisionTransformer": ("vit_tiny_patch16_224", 1, {}),
    "deit": ("deit_tiny_patch16_224", 1, {}),
    "distilled deit": ("deit_tiny_distilled_patch16_224", 2, {}),
    "dinov2": ("vit_small_patch14_dinov2", 1, {}),
    "dinov2 with registers": ("vit_small_patch14_reg4_dinov2", 5, {}),
    "ViT without a prefix": ("vit_tiny_patch16_224", 0, {"class_token": False,
                                                         "global_pool": "avg"}),
    "ViT with norms of q and k": ("vit_tiny_patch16_224", 1, {"qk_norm": True}),
    "ViT with a norm after attention": ("vit_tiny_patch16_224", 1, {"scale_attn_norm": True}),
    "parallel attentions": ("vit_small_patch16_18x2_224", 1, {}),
    "ViT with norms after blocks": (
        "vit_tiny_patch16_224", 1, {"block_fn": timm.models.vision_transformer.ResPostBlock},
    ),
    "flexible ViT": ("flexivit_small", 1, {}),
}  # fmt: skip
RESAMPLING = {
    "Qwen3": ("qwen3_vit_88m_enc", 0, {"global_pool": "avg", "merge_size": 1}),
    "DeepSeek": ("deepseek_vit_412m_enc", 0, {"global_pool": "avg"}),
}
ROTATING = {
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
}
BIASED = {
    "BEiT": ("beit_base_patch16_224", 1, {}),
    "BEiT, shared": ("beit_base_patch16_224", 1, {"use_shared_rel_pos_bias": True}),
    "RelPos": ("vit_relpos_small_patch16_224", 0, {}),  # VisionTransformerRelPos
    "RelPos with a class token": ("vit_relpos_base_patch16_clsgap_224", 1, {}),
    "RelPos, shared": ("vit_srelpos_small_patch16_224", 0, {}),
}
TABLE, MLP = ("relative_position_bias_table",), ("rel_pos.mlp.fc2", "rel_pos.")
TIMM = {}
for family, (name, prefix, arguments) in (STOCK | RESAMPLING | ROTATING | BIASED).items():
    of_family = {}
    if family in BIASED:
        of_beit = (*TABLE, "rel_pos_bias")
        of_family = {"bias": of_beit if "BEiT" in family else ("rel_pos.mlp.fc2", "rel_pos")}
    if family in STOCK or "ape" in name or "EVA" in family:
        of_family = {"absolute": "pos_embed"}
    TIMM[family] = Host(
        partial(make_on_tokens, name, **arguments), {(16, 40): (2, 5)}, prefix, name="", **of_family
    )
TIMM["ViT with a convolutional stem"] = Host(
    partial(small_models.make_vit, "vit_tiny_r_s16_p8_224", img_size=(64, 128)),
    {(64, 128): (2, 4)}, 1, name="", absolute="pos_embed",
)  # fmt: skip
SIZES = {(16, 40): (2, 5), (40, 16): (5, 2), (16, 64): (2, 8)}
TIMM["ViT of any size"] = Host(
    partial(small_models.make_vit, dynamic_img_size=True), SIZES, 1, name="",
    absolute="pos_embed", own_grid=(4, 4),
)  # fmt: skip
for family in ("DINOv3", "rope-vit, mixed"):
    TIMM[f"{family}, of any size"] = Host(
        partial(small_models.make_vit, ROTATING[family][0], dynamic_img_size=True),
        SIZES, ROTATING[family][1], name="",
    )  # fmt: skip
two_stages = {"depths": (1, 1), "embed_dim": (32, 64), "img_size": (64, 128)}
ON_MAPS = {  # the size of an image, the name or class, its own bias, arguments
    "MaxViT": ((64, 128), "maxvit_rmlp_pico_rw_256", MLP, {
        **two_stages, "block_type": ("M", "M"), "stem_width": 16,
    }),
    "MaxViT of TensorFlow": ((64, 128), "maxvit_tiny_tf_224", (*TABLE, "rel_pos."), {
        **two_stages, "block_type": ("M", "M"), "stem_width": 16,
    }),
    "CoAtNet": ((64, 128), "coatnet_rmlp_nano_rw_224", MLP, {
        **two_stages, "depths": (1, 2), "block_type": ("C", "T"), "stem_width": 16,
    }),
    "VOLO": ((64, 128), VOLO, (), {
        "img_size": (64, 128), "layers": (1, 2), "embed_dims": (32, 32), "num_heads": (2, 2),
        "downsamples": (True, False), "outlook_attention": (True, False), "mlp_ratio": (2, 2),
    }),
    "Twins": ((40, 72), "twins_svt_small", (), {
        "img_size": (40, 72), "embed_dims": (16, 32), "num_heads": (2, 2), "mlp_ratios": (2, 2),
        "depths": (2, 2), "sr_ratios": (2, 1), "wss": (3, 3),
    }),
    "TinyViT": ((64, 128), "tiny_vit_5m_224", ("attention_biases",), {
        "depths": (1, 2, 1, 1), "embed_dims": (16, 32, 32, 32), "num_heads": (1, 2, 2, 2),
        "window_sizes": (2, 2, 2, 2),
    }),
    "DaViT": ((40, 72), "davit_tiny", (), {
        "depths": (1, 1), "embed_dims": (32, 32), "num_heads": (2, 2), "window_size": 3,
    }),
    "Visformer": ((32, 64), "visformer_tiny", (), {
        "img_size": (32, 64), "embed_dim": 32, "depth": (1, 1, 1), "num_heads": 2,
        "attn_stage": "011", "init_channels": 8, "size": 0.02,
    }),
    "FastViT": ((64, 128), "fastvit_sa12", (), {
        "layers": (1, 1, 1, 2), "embed_dims": (8, 8, 8, 32),
    }),
    "GCViT": ((64, 128), GlobalContextVit, (*TABLE, "rel_pos."), {
        "img_size": (64, 128), "depths": (2, 2), "num_heads": (2, 4), "window_ratio": (32, 16),
        "embed_dim": 16,
    }),
    "PVT v2": ((64, 96), "pvt_v2_b0", (), {
        "depths": (1, 1, 1, 1), "embed_dims": (16, 16, 40, 32),
    }),
    "PVT v2, linear": ((64, 96), "pvt_v2_b0", (), {
        "depths": (1, 1, 1, 1), "embed_dims": (16, 16, 40, 32), "linear": True,
    }),
    "Swin v2, CR": ((32, 64), "swinv2_cr_tiny_ns_224", ("meta_mlp.fc2", "meta_mlp"), {
        "img_size": (32, 64), "window_size": (2, 4), "embed_dim": 16, "depths": (2, 2),
        "num_heads": (2, 4),
    }),
}  # fmt: skip
for family, (size, name, bias, arguments) in ON_MAPS.items():
    TIMM[family] = Host(
        partial(of_timm, name, **arguments), {size: None}, name="", takes_grid=False, bias=bias,
        is_described=name not in (VOLO, GlobalContextVit) and "embed" not in str(arguments),
    )  # fmt: skip
on_map = partial(Host, name="", takes_grid=False)
TIMM |= {
    "SAM": on_map(make_timm_sam, {(32, 64): (4, 8), (48, 24): (6, 3)}, bias=("rel_pos_",)),
    "SAM that rotates": on_map(
        partial(make_timm_sam, use_rel_pos=False, use_rope=True, use_abs_pos=True),
        {(32, 64): (4, 8)}, absolute="pos_embed",
    ),
    "Swin": on_map(make_timm_swin, {(32, 64): (2, 4)}, bias=TABLE,
                   smaller={"depths": (2,), "num_heads": (2,)}),
    "Swin v2": on_map(make_timm_swin_v2, {(32, 64): (2, 4)}, bias=("cpb_mlp.2", "cpb_mlp")),
    "MViTv2": on_map(make_mvit, {(64, 64): None}, bias=("rel_pos",), is_described=False),
    "MViTv2 with a class token": on_map(
        partial(make_mvit, use_cls_token=True), {(64, 64): None}, 1, bias=("rel_pos",),
        is_described=False,
    ),
}  # fmt: skip


def make_torchvision_vit(**arguments):
    sizes = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 32}
    torch.manual_seed(0)
    return perturb(VisionTransformer(**sizes, mlp_dim=48, num_classes=5, **arguments).eval())


def make_torchvision_swin(**arguments):
    """Swin of torchvision: shifted windows of 2 x 4."""
    sizes = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [2, WINDOW]}
    torch.manual_seed(0)
    model = SwinTransformer(**{"patch_size": [4, 4], "num_classes": 5, **sizes, **arguments})
    return perturb(model.eval())


SECOND = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2}
TORCHVISION = {
    "VisionTransformer": Host(
        make_torchvision_vit, {(32, 32): (4, 4)}, 1, name="", absolute="pos_embedding"
    ),
    "SwinTransformer": on_map(make_torchvision_swin, {(20, 60): (2, 4), (64, 32): (2, 4)},
                              bias=TABLE, smaller={"depths": [2], "num_heads": [2]}),
    "SwinTransformer v2": on_map(
        partial(make_torchvision_swin, **SECOND), {(20, 60): (2, 4)}, bias=("cpb_mlp.2", "cpb_mlp")
    ),
}  # fmt: skip


def build(kind, config, **arguments):
    """A model of transformers in eval mode, moved away from its initial weights."""
    torch.manual_seed(0)
    made = getattr(transformers, config)(**arguments)
    return perturb(getattr(transformers, kind)(made).eval())


def making(kind, config, *sizes, **more):
    """A function that makes a model of transformers, with more arguments."""
    first = {}
    for each in (*sizes, more):
        first |= each
    return lambda **arguments: build(kind, config, **{**first, **arguments})


BLOCKS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8}
TOWER = {**BLOCKS, "intermediate_size": 48, "image_size": 32}
CLASSIFIER = {**BLOCKS, "num_labels": 5}
MAPS = {**BLOCKS, "image_size": 48, "window_size": WINDOW}
WINDOWS = {
    "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": WINDOW,
    "image_size": (32, 64), "patch_size": 4,
}  # fmt: skip
STAGES = {
    "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [16, 32], "patch_sizes": [4, 2],
    "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
}  # fmt: skip
DETECTOR = {
    "d_model": 32, "encoder_hidden_dim": 32, "encoder_in_channels": [8, 16, 16], "num_queries": 5,
    "feat_strides": [8, 16, 32], "decoder_in_channels": [32, 32, 32], "decoder_n_points": 2,
    "decoder_layers": 2, "decoder_attention_heads": 2, "encoder_attention_heads": 2,
    "num_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_labels": 3,
    "encoder_layers": 2, "num_denoising": 0,
}  # fmt: skip
TEXT = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
    "vocab_size": 11, "max_position_embeddings": 8, "eos_token_id": 2, "projection_dim": 32,
}  # fmt: skip
OBLONG = {"image_size": (16, 40), "intermediate_size": 48}
make_vit = making("ViTForImageClassification", "ViTConfig", CLASSIFIER, OBLONG)
make_deit = making("DeiTForImageClassification", "DeiTConfig", CLASSIFIER, OBLONG)
make_dinov2 = making("Dinov2ForImageClassification", "Dinov2Config", CLASSIFIER, image_size=32)
make_dinov2_with_registers = making(
    "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", CLASSIFIER,
    image_size=32,
)  # fmt: skip
make_swin = making("SwinForImageClassification", "SwinConfig", WINDOWS, num_labels=5)
make_vitdet = making(
    "VitDetModel", "VitDetConfig", MAPS, pretrain_image_size=32, window_block_indices=[0],
    use_relative_position_embeddings=True,
)  # fmt: skip


def make_sam(implementation):
    sizes = {**MAPS, "output_channels": 8, "global_attn_indexes": [1], "mlp_dim": 48}
    return making("SamVisionModel", "SamVisionConfig", sizes, attn_implementation=implementation)


def resnet():
    return transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 16], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage4"],
    )  # fmt: skip


def make_detr(name="Detr", **arguments):
    """DETR with a tiny ResNet, whose feature map is 32 times smaller than the image."""
    sizes = {"d_model": 32, "num_queries": 5, "num_labels": 3}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 48}
    sizes |= {"backbone_config": resnet(), **arguments}
    model = build(f"{name}ForObjectDetection", f"{name}Config", **sizes)
    with torch.no_grad():  # the features of a random ResNet are large: no attention would be soft
        model.model.input_projection.weight.mul_(0.02)
    return model


def make_segmenter():
    """DETR with a head for masks."""
    config = make_detr(encoder_attention_heads=8, decoder_attention_heads=8).config
    config.backbone_config.out_features = [f"stage{number}" for number in (1, 2, 3, 4)]
    torch.manual_seed(0)
    return perturb(transformers.DetrForSegmentation(config).eval())


def make_detector(name):
    backbone = {
        "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
        "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"],
    }  # fmt: skip

    def make(**arguments):
        sizes = {**DETECTOR, "backbone_config": transformers.RTDetrResNetConfig(**backbone)}
        model = build(f"{name}ForObjectDetection", f"{name}Config", **{**sizes, **arguments})
        with torch.no_grad():  # random features are large: no attention would be soft
            for parameter in model.model.encoder_input_proj.parameters():
                parameter.mul_(0.3)
        return model

    return make


def make_pair(name):
    """A vision tower and a text tower in one model."""
    return making(f"{name}Model", f"{name}Config", vision_config={**TOWER, "projection_dim": 32},
                  text_config=TEXT)  # fmt: skip


PATCHES = {(16, 40): (2, 5), (40, 16): (5, 2), (32, 32): (4, 4)}
FEATURES = {(96, 160): (3, 5), (160, 96): (5, 3)}
INTERPOLATE = {"interpolate_pos_encoding": True}
EMBEDDINGS, EMBEDDING = "position_embeddings", "position_embedding.weight"
BIAS_OF_BEIT = ("relative_position_bias_table", "position_bias")
LW_DETR = {"pretrain_image_size": 32, "num_windows": 4, "out_indices": [1, 2]}
in_windows = partial(Host, sizes={(32, 64): (4, 4)}, takes_grid=False, bias=TABLE)
of_pooled = partial(Host, sizes={(32, 64): None, (64, 32): None}, takes_grid=False)
TRANSFORMERS = {
    "ViT": Host(make_vit, {(16, 40): (2, 5)}, 1, absolute=EMBEDDINGS),
    "DeiT": Host(make_deit, {(16, 40): (2, 5)}, 2, absolute=EMBEDDINGS),
    "ViT of any size": Host(
        partial(make_vit, image_size=32), PATCHES, 1, INTERPOLATE, absolute=EMBEDDINGS,
        own_grid=(4, 4),
    ),
    "DINOv2": Host(make_dinov2, PATCHES, 1, absolute=EMBEDDINGS, own_grid=(4, 4)),
    "DINOv2 with registers": Host(
        make_dinov2_with_registers, PATCHES, 5, absolute=EMBEDDINGS, own_grid=(4, 4)
    ),
    "DINOv3": Host(
        making("DINOv3ViTModel", "DINOv3ViTConfig", TOWER, num_register_tokens=2), PATCHES, 3
    ),
    "DINOv3 backbone": Host(
        making("DINOv3ViTBackbone", "DINOv3ViTConfig", TOWER, num_register_tokens=2), PATCHES, 3
    ),
    "Sapiens 2": Host(
        making("Sapiens2Model", "Sapiens2Config", TOWER, num_register_tokens=2), PATCHES, 3
    ),
    "CLIP": Host(
        making("CLIPVisionModel", "CLIPVisionConfig", TOWER), PATCHES, 1, INTERPOLATE,
        absolute=EMBEDDING, own_grid=(4, 4),
    ),
    "SigLIP": Host(
        making("SiglipVisionModel", "SiglipVisionConfig", TOWER), PATCHES, 0, INTERPOLATE,
        absolute=EMBEDDING, own_grid=(4, 4),
    ),
    "BEiT": Host(
        making("BeitModel", "BeitConfig", TOWER, use_relative_position_bias=True), PATCHES, 1,
        bias=BIAS_OF_BEIT,
    ),
    "BEiT, shared": Host(
        making("BeitModel", "BeitConfig", TOWER, use_shared_relative_position_bias=True), PATCHES,
        1, bias=BIAS_OF_BEIT,
    ),
    "data2vec": Host(
        making(
            "Data2VecVisionModel", "Data2VecVisionConfig", TOWER, use_relative_position_bias=True,
            use_shared_relative_position_bias=True,
        ),
        {(32, 32): (4, 4)}, 1, bias=BIAS_OF_BEIT,
    ),
    "ViTMSN": Host(
        making("ViTMSNForImageClassification", "ViTMSNConfig", TOWER), PATCHES, 1, INTERPOLATE,
        absolute=EMBEDDINGS, own_grid=(4, 4),
    ),
    "ViTPose": Host(
        making("VitPoseBackbone", "VitPoseBackboneConfig", TOWER, image_size=(16, 40)),
        {(16, 40): (2, 5)}, absolute=EMBEDDINGS,
    ),
    "YOLOS": Host(
        making("YolosForObjectDetection", "YolosConfig", TOWER, image_size=[32, 48],
               num_detection_tokens=5),
        PATCHES, 6,
    ),
    "AST": Host(
        making("ASTForAudioClassification", "ASTConfig", TOWER, max_length=48, num_mel_bins=24,
               num_labels=5),
        {(24, 48): (2, 5)}, 2, name="input_values", absolute=EMBEDDINGS,
    ),
    "RF-DETR's DINOv2": Host(
        making("RfDetrDinov2Backbone", "RfDetrDinov2Config", TOWER, num_windows=2,
               out_indices=[1, 2]),
        {(32, 32): (4, 4), (48, 48): (6, 6)}, 4, takes_grid=False, absolute=EMBEDDINGS,
    ),
    "LW-DETR's ViT": Host(
        making("LwDetrViTBackbone", "LwDetrViTConfig", TOWER, LW_DETR),
        {(32, 64): (4, 8), (64, 32): (8, 4)}, takes_grid=False, absolute=EMBEDDINGS,
        own_grid=(4, 4),
    ),
    "DETR": Host(make_detr, FEATURES, smaller={"encoder_layers": 1, "decoder_layers": 1}),
    "Conditional DETR": Host(partial(make_detr, "ConditionalDetr"), FEATURES),
    "RT-DETR": Host(make_detector("RTDetr"), FEATURES),
    "RT-DETR v2": Host(make_detector("RTDetrV2"), FEATURES),
    "D-FINE": Host(make_detector("DFine"), FEATURES),
    "SAM": Host(make_sam("sdpa"), {(48, 48): (6, 6)}, takes_grid=False, bias=("rel_pos",),
                absolute="pos_embed"),
    "SAM, eager": Host(  # whose softmax is in float32
        make_sam("eager"), {(48, 48): (6, 6)}, takes_grid=False, is_described=False, rtol=1e-3,
        bias=("rel_pos",),
    ),
    "ViTDet": Host(
        partial(make_vitdet, use_absolute_position_embeddings=True),
        {(16, 40): (2, 5), (48, 48): (6, 6)}, takes_grid=False, bias=("rel_pos",),
        absolute=EMBEDDINGS, own_grid=(4, 4),
    ),
    "Swin": in_windows(make_swin, smaller={"depths": [2], "num_heads": [2]}),
    "Swin with an absolute encoding": in_windows(
        partial(make_swin, use_absolute_embeddings=True), absolute=EMBEDDINGS, own_grid=(8, 16)
    ),
    "Swin v2": in_windows(
        making("Swinv2ForImageClassification", "Swinv2Config", WINDOWS, num_labels=5),
        bias=("continuous_position_bias_mlp.2", "continuous_position_bias_mlp"),
    ),
    "MaskFormer's Swin": in_windows(
        making("MaskFormerSwinModel", "MaskFormerSwinConfig", WINDOWS), is_described=False
    ),
    "Donut's Swin": in_windows(making("DonutSwinModel", "DonutSwinConfig", WINDOWS)),
    "Swin2SR": in_windows(
        making("Swin2SRModel", "Swin2SRConfig", WINDOWS, image_size=32, num_feat=8,
               num_heads=[2, 2], patch_size=1),
        sizes={(16, 24): (4, 4)},
        bias=("continuous_position_bias_mlp.2", "continuous_position_bias_mlp"),
    ),
    "PVT": of_pooled(
        making("PvtForImageClassification", "PvtConfig", STAGES, num_labels=5, image_size=32,
               sequence_reduction_ratios=[2, 1]),
        sizes={(32, 32): None}, prefix=1,
    ),
    "PVT v2": of_pooled(
        making("PvtV2ForImageClassification", "PvtV2Config", STAGES, num_labels=5, image_size=32,
               sr_ratios=[2, 1]),
    ),
    "PVT v2, linear": of_pooled(
        making("PvtV2ForImageClassification", "PvtV2Config", STAGES, num_labels=5, image_size=32,
               sr_ratios=[2, 1], linear_attention=True),
    ),
    "GLPN": of_pooled(making("GLPNModel", "GLPNConfig", STAGES, sr_ratios=[2, 1])),
    "Segformer": of_pooled(
        making("SegformerForSemanticSegmentation", "SegformerConfig", STAGES, sr_ratios=[4, 2],
               patch_sizes=[7, 3], decoder_hidden_size=16),
    ),
}  # fmt: skip
HOSTS = {
    **{f"timm's {family}": host for family, host in TIMM.items()},
    **{f"torchvision's {family}": host for family, host in TORCHVISION.items()},
    **TRANSFORMERS,
}
