"""The DETR models that the paper's authors published: names of the original DETR release."""

import re

from torch import Tensor, nn

from irpe.adapters.equip import equip
from irpe.core.encodings.spec import RPESpec
from irpe.core.index import Piecewise
from irpe.extras import require

_NAME = re.compile(r"rpe-(\d+(?:\.\d+)?)-(product|cross)-(ctx|bias)-([01])-([qkv]+)")
_MODES = {"ctx": "contextual", "bias": "bias"}
_NUM_LABELS = 91  # COCO's category ids; one more stands for no object

# From the original release to transformers, in this order.
_RENAMES = [
    (r"^backbone\.0\.body\.", "model.backbone.model."),
    (r"^input_proj\.", "model.input_projection."),
    (r"^query_embed\.", "model.query_position_embeddings."),
    (r"^class_embed\.", "class_labels_classifier."),
    (r"^bbox_embed\.", "bbox_predictor."),
    (r"^transformer\.decoder\.norm\.", "model.decoder.layernorm."),
    (r"^transformer\.", "model."),
    (r"(\.encoder\.layers\.\d+)\.norm2\.", r"\1.final_layer_norm."),
    (r"(\.decoder\.layers\.\d+)\.norm2\.", r"\1.encoder_attn_layer_norm."),
    (r"(\.layers\.\d+)\.norm1\.", r"\1.self_attn_layer_norm."),
    (r"(\.layers\.\d+)\.norm3\.", r"\1.final_layer_norm."),
    (r"(\.layers\.\d+)\.linear([12])\.", r"\1.mlp.fc\2."),
    (r"\.multihead_attn\.", ".encoder_attn."),
    (r"_attn\.out_proj\.", "_attn.o_proj."),
]


def parse_detr_name(name: str) -> RPESpec | None:
    """Returns the encoding that a name such as "rpe-1.9-product-ctx-1-k" stands for, if it is one.

    The parts are ratio, method, mode, one table for all heads (1) or one for each (0), targets.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    ratio, method, mode, is_shared, targets = match.groups()
    index = Piecewise.from_ratio(float(ratio))
    return RPESpec(method, _MODES[mode], targets, index, shared_heads=is_shared == "1")


def build_detr(spec: RPESpec) -> nn.Module:
    """Returns transformers' DETR with a ResNet-50, for COCO, with an encoding."""
    transformers = require("transformers", "transformers")
    config = transformers.DetrConfig(num_labels=_NUM_LABELS)
    return equip(transformers.DetrForObjectDetection(config), spec)


def rename_detr(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of an original DETR by transformers' names, q, k and v apart.

    What it does not know keeps its name, so that it is missed where the model is filled.
    """
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for pattern, replacement in _RENAMES:
            name = re.sub(pattern, replacement, name)
        head, in_proj, kind = name.partition(".in_proj_")
        if not in_proj or tensor.ndim == 0 or len(tensor) % 3:
            renamed[name] = tensor
            continue
        for letter, part in zip("qkv", tensor.chunk(3), strict=True):
            renamed[f"{head}.{letter}_proj.{kind}"] = part.clone()
    return renamed
