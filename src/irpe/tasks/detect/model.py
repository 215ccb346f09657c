"""The DETR of a configuration: built by transformers, equipped, and filled with initial weights."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import DetrConfig, DetrForObjectDetection

from irpe.adapters.equip import equip
from irpe.errors import UserError
from irpe.tasks.detect.backbone import (
    FrozenBackbone,
    check_trainable,
    fill_backbone,
    freeze_first_layers,
)
from irpe.tasks.detect.config import DetectorConfig
from irpe.tasks.transformers_arguments import check_arguments
from irpe.train.run import read_weights, start_from

_FIXED = {"auxiliary_loss", "backbone_config"}  # by the configuration of the run


def layer_predictions(detr: Any, inputs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the class logits and boxes of every decoder layer, as the loss needs them.

    Args:
        detr: The model.
        inputs: Images, or feature maps of its frozen backbone.
        mask: True inside an image.

    Returns:
        Both by layer, image, query, and the values of each.
    """
    outputs = detr.model(inputs, pixel_mask=mask)
    # transformers normalizes the state of the last layer once more
    states = outputs.intermediate_hidden_states[:-1], outputs.last_hidden_state[None]
    classify, locate = detr.class_labels_classifier, detr.bbox_predictor
    logits, boxes = zip(*((classify(s), locate(s).sigmoid()) for s in states), strict=True)
    return torch.cat(logits).float(), torch.cat(boxes).float()


def build_detector(config: DetectorConfig, is_filled: bool = True) -> nn.Module:
    """Returns the model to train; its random start follows from torch's random state."""
    _check_arguments(config.model_args)
    names = dict(enumerate(config.classes))
    arguments: dict[str, Any] = {
        "backbone": config.backbone,
        "auxiliary_loss": True,
        "num_labels": len(names),
        "id2label": names,
        "label2id": {name: label for label, name in names.items()},
        **config.model_args,
    }
    try:
        model: Any = DetrForObjectDetection(DetrConfig(**arguments))
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"backbone {config.backbone!r} with {dict(config.model_args)}: {error}"
        ) from error
    _initialize(model)
    if config.backbone_lr:
        check_trainable(config.backbone)
        freeze_first_layers(model.model.backbone.model)
    else:
        model.model.backbone = FrozenBackbone(config.backbone)
    if is_filled and config.initial is None:
        fill_backbone(model.model.backbone.model, config)
    if (config.encoding, config.absolute) != ("none", "keep"):
        equip(model, config.encoding, absolute=config.absolute)
    if is_filled and config.initial is not None:
        start_from(model, read_weights(Path(config.initial)), config.initial)
    return model


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises an error for what transformers would ignore, or fail on later."""
    check_arguments(arguments, DetrConfig, "DETR", _FIXED)
    try:
        config = DetrConfig(**arguments)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise UserError(f"model_args {dict(arguments)}: {error}") from error
    for name in ("encoder_attention_heads", "decoder_attention_heads"):
        heads = getattr(config, name)
        if heads < 1 or config.d_model % heads:
            raise UserError(
                f"model_args: d_model = {config.d_model} is not divisible by {name} = {heads}"
            )


def _initialize(model: Any) -> None:
    """Initializes as DETR does: Xavier for layers, normal queries, torch's own rule for heads.

    DETR has the weights of q, k and v in one matrix, whose bound is smaller.
    """
    detr = model.model
    for layers in (detr.encoder, detr.decoder):
        for name, parameter in layers.named_parameters():
            if parameter.ndim > 1:
                is_joint = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
                nn.init.xavier_uniform_(parameter, gain=math.sqrt(0.5) if is_joint else 1.0)
    nn.init.normal_(detr.query_position_embeddings.weight)
    for head in (detr.input_projection, model.class_labels_classifier, model.bbox_predictor):
        for module in head.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.reset_parameters()
