"""Small models of transformers with random weights, one for each family, and their inputs."""

from dataclasses import dataclass, field

import torch
import transformers
from adapters.hosts import library_models
from adapters.small_models import images, perturb

TOWER = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "patch_size": 8, "image_size": 32,
}  # fmt: skip
MAPS = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8,
    "image_size": 48, "window_size": 4,
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


def build(kind, config, **arguments):
    """A model in eval mode, moved away from its initial weights."""
    torch.manual_seed(0)
    made = getattr(transformers, config)(**arguments)
    return perturb(getattr(transformers, kind)(made).eval())


def make_tower(kind, config, **more):
    return lambda **arguments: build(kind, config, **{**TOWER, **more, **arguments})


def make_sam(implementation):
    sizes = {**MAPS, "output_channels": 8, "global_attn_indexes": [1], "mlp_dim": 48}
    sizes["attn_implementation"] = implementation
    return lambda **arguments: build("SamVisionModel", "SamVisionConfig", **{**sizes, **arguments})


def make_vitdet(**arguments):
    more = {
        "pretrain_image_size": 32,
        "window_block_indices": [0],
        "use_relative_position_embeddings": True,
    }
    return build("VitDetModel", "VitDetConfig", **{**MAPS, **more, **arguments})


def make_swinv2(**arguments):
    sizes = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
    sizes |= {"image_size": (32, 64), "patch_size": 4, "num_labels": 5}
    return build("Swinv2ForImageClassification", "Swinv2Config", **{**sizes, **arguments})


def make_detector(name):
    backbone = {
        "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
        "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"],
    }  # fmt: skip

    def make(**arguments):
        resnet = transformers.RTDetrResNetConfig(**backbone)
        sizes = {**DETECTOR, "backbone_config": resnet, **arguments}
        model = build(f"{name}ForObjectDetection", f"{name}Config", **sizes)
        with torch.no_grad():  # random features are large: no attention would be soft
            for parameter in model.model.encoder_input_proj.parameters():
                parameter.mul_(0.3)
        return model

    return make


def make_conditional_detr(**arguments):
    config = library_models.make_detr().config.to_dict()
    names = (*(name for name in config if name.startswith(("encoder", "decoder"))), "d_model")
    sizes = {name: config[name] for name in names} | {"num_queries": 5, "num_labels": 3}
    backbone = transformers.ResNetConfig.from_dict(config["backbone_config"])
    sizes |= {"backbone_config": backbone, **arguments}
    model = build("ConditionalDetrForObjectDetection", "ConditionalDetrConfig", **sizes)
    with torch.no_grad():
        model.model.input_projection.weight.mul_(0.02)
    return model


def make_pair(name):
    """A vision tower and a text tower in one model."""

    def make():
        vision = {**TOWER, "projection_dim": 32}
        return build(f"{name}Model", f"{name}Config", vision_config=vision, text_config=TEXT)

    return make


def make_swin(kind, config):
    sizes = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
    sizes |= {"image_size": (32, 64), "patch_size": 4}
    return lambda **arguments: build(kind, config, **{**sizes, **arguments})


def make_swin2sr(**arguments):
    sizes = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
    sizes |= {"image_size": 32, "num_feat": 8}
    return build("Swin2SRModel", "Swin2SRConfig", **{**sizes, **arguments})


STAGES = {
    "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [16, 32],
    "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
}  # fmt: skip


def make_pvt(**arguments):
    more = {"patch_sizes": [4, 2], "strides": [4, 2], "sequence_reduction_ratios": [2, 1]}
    config = {**STAGES, **more, "image_size": 32, "num_labels": 5, **arguments}
    return build("PvtForImageClassification", "PvtConfig", **config)


def make_pvt_v2(**arguments):
    more = {"patch_sizes": [4, 2], "strides": [4, 2], "sr_ratios": [2, 1], "num_labels": 5}
    config = {**STAGES, **more, "image_size": 32, **arguments}
    return build("PvtV2ForImageClassification", "PvtV2Config", **config)


def make_glpn(**arguments):
    more = {"patch_sizes": [4, 2], "strides": [4, 2], "sr_ratios": [2, 1]}
    return build("GLPNModel", "GLPNConfig", **{**STAGES, **more, **arguments})


@dataclass(frozen=True)
class Family:
    """How a model is made and called.

    Args:
        make: Makes the model.
        sizes: Sizes of inputs and the grids that they give; the first is not square if may be.
        prefix: The tokens of the grid's own row: those before and after the patches.
        options: What else the model is called with.
        takes_grid: Whether `equip` may be passed a grid.
        spectrogram: Whether the input is frequencies over time.
        is_described: Whether its configuration says all that there is to say about it.
        rtol: Which difference is rounding in float64.
    """

    make: object
    sizes: dict
    prefix: int = 0
    options: dict = field(default_factory=dict)
    takes_grid: bool = True
    spectrogram: bool = False
    is_described: bool = True
    rtol: float = 1e-6

    def inputs(self, size=None, dtype=torch.float32):
        size = next(iter(self.sizes)) if size is None else size
        x = images(*size).to(dtype)
        if self.spectrogram:
            return {"input_values": x[:, 0].mT, **self.options}
        return {"pixel_values": x, **self.options}

    @property
    def grid(self):
        return next(iter(self.sizes.values()))


LW_DETR = {"pretrain_image_size": 32, "num_windows": 4, "out_indices": [1, 2]}
PATCHES = {(16, 40): (2, 5), (40, 16): (5, 2), (32, 32): (4, 4)}
FEATURES = {(96, 160): (3, 5), (160, 96): (5, 3)}
INTERPOLATE = {"interpolate_pos_encoding": True}
FAMILIES = {
    "DINOv3": Family(
        make_tower("DINOv3ViTModel", "DINOv3ViTConfig", num_register_tokens=2), PATCHES, 3
    ),
    "DINOv3 backbone": Family(
        make_tower("DINOv3ViTBackbone", "DINOv3ViTConfig", num_register_tokens=2), PATCHES, 3
    ),
    "CLIP": Family(make_tower("CLIPVisionModel", "CLIPVisionConfig"), PATCHES, 1, INTERPOLATE),
    "SigLIP": Family(
        make_tower("SiglipVisionModel", "SiglipVisionConfig"), PATCHES, 0, INTERPOLATE
    ),
    "BEiT": Family(
        make_tower("BeitModel", "BeitConfig", use_relative_position_bias=True), PATCHES, 1
    ),
    "ViTMSN": Family(
        make_tower("ViTMSNForImageClassification", "ViTMSNConfig"), PATCHES, 1, INTERPOLATE
    ),
    "YOLOS": Family(
        make_tower(
            "YolosForObjectDetection", "YolosConfig", image_size=[32, 48], num_detection_tokens=5
        ),
        PATCHES,
        6,
    ),
    "AST": Family(
        make_tower(
            "ASTForAudioClassification", "ASTConfig", max_length=48, num_mel_bins=24, num_labels=5
        ),
        {(24, 48): (2, 5)},
        2,
        spectrogram=True,
    ),
    "RT-DETR": Family(make_detector("RTDetr"), FEATURES),
    "RT-DETR v2": Family(make_detector("RTDetrV2"), FEATURES),
    "D-FINE": Family(make_detector("DFine"), FEATURES),
    "Conditional DETR": Family(make_conditional_detr, FEATURES),
    "SAM": Family(make_sam("sdpa"), {(48, 48): (6, 6)}, takes_grid=False),
    "SAM, eager": Family(  # whose softmax is in float32
        make_sam("eager"), {(48, 48): (6, 6)}, takes_grid=False, is_described=False, rtol=1e-3
    ),
    "ViTDet": Family(make_vitdet, {(16, 40): (2, 5), (48, 48): (6, 6)}, takes_grid=False),
    "Swin v2": Family(make_swinv2, {(32, 64): (4, 4)}, takes_grid=False),
    "data2vec": Family(
        make_tower(
            "Data2VecVisionModel",
            "Data2VecVisionConfig",
            use_relative_position_bias=True,
            use_shared_relative_position_bias=True,
        ),
        {(32, 32): (4, 4)},
        1,
    ),
    "ViTPose": Family(
        make_tower("VitPoseBackbone", "VitPoseBackboneConfig", image_size=(16, 40), patch_size=8),
        {(16, 40): (2, 5)},
    ),
    "Sapiens 2": Family(
        make_tower("Sapiens2Model", "Sapiens2Config", num_register_tokens=2), PATCHES, 3
    ),
    "RF-DETR's DINOv2": Family(
        make_tower("RfDetrDinov2Backbone", "RfDetrDinov2Config", num_windows=2, out_indices=[1, 2]),
        {(32, 32): (4, 4), (48, 48): (6, 6)},
        4,
        takes_grid=False,
    ),
    "LW-DETR's ViT": Family(
        make_tower("LwDetrViTBackbone", "LwDetrViTConfig", **LW_DETR),
        {(32, 64): (4, 8), (64, 32): (8, 4)},
        takes_grid=False,
    ),
    "MaskFormer's Swin": Family(
        make_swin("MaskFormerSwinModel", "MaskFormerSwinConfig"),
        {(32, 64): (4, 4)},
        takes_grid=False,
        is_described=False,
    ),
    "Donut's Swin": Family(
        make_swin("DonutSwinModel", "DonutSwinConfig"), {(32, 64): (4, 4)}, takes_grid=False
    ),
    "Swin2SR": Family(make_swin2sr, {(16, 24): (4, 4)}, takes_grid=False),
    "PVT": Family(make_pvt, {(32, 32): (4, 4)}, 1, takes_grid=False),
    "PVT v2": Family(make_pvt_v2, {(32, 64): (4, 8), (64, 32): (8, 4)}, takes_grid=False),
    "PVT v2, linear": Family(
        lambda **arguments: make_pvt_v2(linear_attention=True, **arguments),
        {(32, 64): (4, 8)},
        takes_grid=False,
    ),
    "GLPN": Family(make_glpn, {(32, 64): (4, 8), (64, 32): (8, 4)}, takes_grid=False),
}


def predict(model, inputs):
    """All tensors that a model returns, in one."""
    found = []

    def collect(value):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            found.append(value.flatten())
        elif isinstance(value, (tuple, list)):
            for each in value:
                collect(each)

    collect(model(**inputs).to_tuple())
    return torch.cat(found)
