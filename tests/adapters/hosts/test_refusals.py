"""What a host cannot have, and models that cannot be equipped: errors that leave a model alone."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
import timm
import torch
import transformers
from adapters.hosts.table import HOSTS, SPEC, build
from adapters.small_models import make_vit, state_of
from timm.models import naflexvit

import irpe
from irpe.adapters.hosts.transformers import _ABSOLUTE as ABSOLUTE
from irpe.adapters.hosts.transformers import _ROWS as ROWS
from irpe.adapters.hosts.transformers import detr, masked, vit
from irpe.adapters.refusals import REFUSED as CLASSES


def make_dropping():
    return make_vit(patch_drop_rate=0.5)


def make_naflex():
    sizes = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "reg_tokens": 2}
    return naflexvit.NaFlexVit(naflexvit.NaFlexVitCfg(**sizes), num_classes=5)


def make_vitmae():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8}
    return build("ViTMAEModel", "ViTMAEConfig", **sizes, intermediate_size=8, image_size=32)


NONE, SINUSOID = {"absolute": "none"}, {"absolute": "sinusoid"}
CONVERT, DROP, PREFIX = (
    {"builtin_bias": "convert"},
    {"builtin_bias": "drop"},
    {"num_prefix_tokens": 1},
)
OFFSETS = {"spec": "cross-contextual-k@clip7"} | CONVERT
NO_ABSOLUTE = "no absolute encoding to replace"
CANNOT_HAVE = [
    ("timm's DINOv3", NONE, NO_ABSOLUTE),
    ("timm's DINOv3", {"spec": "rope-axial"}, r"rotates queries and keys, as blocks\.0"),
    ("timm's BEiT", CONVERT, "Beit is not a vector for each offset"),
    ("timm's BEiT", {"grid": (5, 2)}, r"whose grid is \(2, 5\)"),
    ("timm's RelPos", SINUSOID, NO_ABSOLUTE),
    ("timm's RelPos, shared", DROP | {"layers": [0]}, r"share one relative.*layers \[0\] alone"),
    ("timm's Qwen3", NONE, "resamples its absolute encoding"),
    ("timm's SAM", CONVERT, "cannot hold the host's own encoding"),
    ("timm's SAM", OFFSETS | {"spec": "cross-contextual-k@clip6"}, "contextual-k@clip7'"),
    ("timm's SAM", {"grid": (4, 8)}, "Attention works on windows or maps"),
    ("timm's SAM", PREFIX, "Attention works on windows or maps"),
    ("timm's SAM that rotates", OFFSETS, "VisionTransformerSAM has no relative encoding"),
    ("timm's Swin", {"grid": (4, 4)}, "WindowAttention works on windows"),
    ("timm's Swin", PREFIX, "WindowAttention works on windows"),
    ("timm's Swin", SINUSOID, NO_ABSOLUTE),
    ("timm's PVT v2", {"grid": (4, 5)}, "whose grid it knows"),
    ("timm's MViTv2", PREFIX, "leave it to the model"),
    ("timm's MViTv2", CONVERT, "not a vector for each"),
    (make_dropping, {"grid": (4, 5)}, "leave grid out"),
    (make_dropping, {"num_prefix_tokens": 2}, "2: patch_drop keeps the first"),
    (make_dropping, {"spec": "cpvt"}, "convolves the whole grid"),
    (make_naflex, {"grid": (3, 4)}, "leave grid out"),
    (make_naflex, PREFIX, "1: NaFlexVit has others"),
    (make_naflex, NONE, "use 'keep'"),
    ("torchvision's VisionTransformer", {"grid": (2, 8)}, r"whose grid is \(4, 4\)"),
    ("torchvision's VisionTransformer", {"grid": (16,)}, r"whose grid is \(4, 4\)"),
    ("torchvision's SwinTransformer", {"grid": (4, 4)}, "WindowAttention works on windows"),
    ("torchvision's SwinTransformer", SINUSOID, NO_ABSOLUTE),
    ("DINOv3", SINUSOID, "DINOv3ViTModel has no absolute encoding to replace; use 'keep'"),
    ("DINOv3", {"spec": "rope-axial"}, r"rotates queries and keys, as model\.layer\.0"),
    ("BEiT", SINUSOID, "BeitModel has no absolute encoding to replace; use 'keep'"),
    ("BEiT", CONVERT, "is not a vector for each"),
    ("CLIP", CONVERT, "has no relative encoding"),
    ("YOLOS", SINUSOID, "is that of its detection tokens too; use 'keep'"),
    ("LW-DETR's ViT", {"grid": (4, 4)}, "cuts images into windows"),
    ("LW-DETR's ViT", PREFIX, "cuts images into windows"),
    ("DETR", PREFIX, "num_prefix_tokens 1"),
    ("DETR", SINUSOID, "has a fixed sinusoid already; use 'keep' or 'none'"),
    ("RT-DETR", SINUSOID, "has a fixed sinusoid already; use 'keep' or 'none'"),
    ("SAM", {"grid": (6, 6)}, "SamVisionSdpaAttention works on windows"),
    ("SAM", PREFIX, "SamVisionSdpaAttention works on windows"),
    ("SAM", OFFSETS | {"spec": "cross-contextual-k@clip4"}, r"up to 5 .*-contextual-k@clip5'"),
    ("Swin", {"grid": (4, 4)}, "SwinAttention works on windows"),
    ("Swin", SINUSOID, NO_ABSOLUTE),
    ("Swin v2", CONVERT, "is not a vector for each"),
    ("Segformer", {"grid": (4, 4)}, "SegformerAttention works on windows or maps"),
    ("PVT", NONE, "resamples an absolute encoding in every stage"),
    (make_vitmae, {"grid": (2, 8)}, r"grid \(2, 8\).*\(4, 4\); leave grid out"),
    (make_vitmae, {"num_prefix_tokens": 3}, "num_prefix_tokens 3: .* has 1 before"),
    (make_vitmae, NONE, "distinguishes masked patches.*use 'keep'"),
]


def name_of(value):
    """Returns the same name in every process, also of what makes a model."""
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("host", "arguments", "message"), CANNOT_HAVE, ids=name_of)
def test_what_a_host_cannot_have_leaves_it_unchanged(host, arguments, message):
    model = HOSTS[host].make() if isinstance(host, str) else host()
    before = state_of(model)
    with pytest.raises(irpe.UserError, match=message):
        irpe.equip(model, **{"spec": SPEC, **arguments})
    assert state_of(model) == before


REFUSED = {
    "vit_dwee_patch16_reg1_gap_256": "DiffAttention subtracts two attention maps",
    "vit_base_patch16_xp_224": "ParallelScalingBlock computes attention inside the block",
    "convit_tiny": "timm.models.convit.GPSA mixes attention by content",
    "cait_xxs24_224": "TalkingHeadAttn mixes the scores of all heads",
    "xcit_nano_12_p16_224": "timm.models.xcit.XCA attends over channels",
    "levit_128s": "timm.models.levit.Attention has values of another dimension",
    "pit_ti_224": "PoolingVisionTransformer passes its attention tokens without their grid",
    "resnet18": "it has no self-attention",
    "TimesformerModel": "frames and over patches in turn",
    "ResNetModel": "it has no self-attention",
}


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_models_with_other_attentions_are_refused(name, reason):
    with torch.device("meta"):
        if name.endswith("Model"):
            sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
            sizes = {} if "ResNet" in name else sizes
            config = getattr(transformers, name.replace("Model", "Config"))(**sizes)
            model = getattr(transformers, name)(config)
        else:
            model = timm.create_model(name)
    before, kind = state_of(model), type(model).__qualname__
    message = rf"{kind} cannot be equipped: .*{re.escape(reason)}.* Supported are "
    with pytest.raises(irpe.UserError, match=message):
        irpe.equip(model, SPEC)
    assert state_of(model) == before


@pytest.mark.parametrize("grid", [None, (4, 4)])
def test_cross_attention_is_not_taken_for_self_attention(grid):
    aria = importlib.import_module("transformers.models.aria.modeling_aria")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.AriaConfig(vision_config=transformers.Idefics3VisionConfig(**sizes))
    with torch.device("meta"):
        projector = aria.AriaProjector(config)
    with pytest.raises(irpe.UserError, match="AriaCrossAttention compares learned queries"):
        irpe.equip(projector, SPEC, grid=grid)


def test_reasons_are_given_for_classes_that_exist():
    for path in CLASSES:
        module, _, name = path.rpartition(".")
        assert inspect.isclass(getattr(importlib.import_module(module), name))


def test_the_library_has_all_classes_that_are_named():
    tables = (
        vit._TOWERS, detr._MODELS, detr._HYBRID, masked._ENCODERS, masked._WITH_DECODER, ABSOLUTE,
        ROWS,
    )  # fmt: skip
    blocks = {tower.block for tower in vit._TOWERS.values()} | {*detr._MODELS.values()}
    folder = inspect.getfile(transformers.models).removesuffix("__init__.py")
    text = "".join(path.read_text() for path in Path(folder).rglob("*.py"))
    assert not [name for name in blocks.union(*tables) if f"\nclass {name}(" not in text]
