"""Models of transformers that cannot be equipped, and the reasons that the errors give."""

import importlib
import inspect
from pathlib import Path

import pytest
import torch
import transformers
from adapters.small_models import state_of

import irpe
from irpe.adapters.hosts.transformers import detr, masked, pooled, sam, vit
from irpe.adapters.hosts.transformers.refusals import REFUSED

SPEC = "product-contextual-k"
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS = {
    "Timesformer": (transformers.TimesformerConfig, SIZES, "frames and over patches in turn"),
    "ResNet": (transformers.ResNetConfig, {}, "it has no self-attention"),
}


@pytest.mark.parametrize(("name", "case"), MODELS.items(), ids=MODELS)
def test_reasons(name, case):
    config, sizes, reason = case
    with torch.device("meta"):
        model = getattr(transformers, f"{name}Model")(config(**sizes))
    before = state_of(model)
    with pytest.raises(ValueError, match=rf"{name}Model cannot be equipped: .*{reason}\. Supp"):
        irpe.equip(model, SPEC)
    assert state_of(model) == before


@pytest.mark.parametrize("grid", [None, (4, 4)])
def test_cross_attention_is_not_taken_for_self_attention(grid):
    aria = importlib.import_module("transformers.models.aria.modeling_aria")
    config = transformers.AriaConfig(vision_config=transformers.Idefics3VisionConfig(**SIZES))
    with torch.device("meta"):
        projector = aria.AriaProjector(config)
    with pytest.raises(ValueError, match="AriaCrossAttention compares learned queries"):
        irpe.equip(projector, SPEC, grid=grid)


@pytest.mark.slow
def test_the_library_has_all_classes_that_are_named():
    for path in REFUSED:
        module, _, name = path.rpartition(".")
        assert inspect.isclass(getattr(importlib.import_module(module), name))
    blocks = {tower.block for tower in vit._TOWERS.values()} | set(detr._MODELS.values())
    tables = (
        vit._TOWERS, detr._MODELS, detr._HYBRID, sam._FORWARDS, sam._ABSOLUTE, masked._ENCODERS,
        masked._WITH_DECODER, pooled._ATTENTIONS,
    )  # fmt: skip
    names = blocks.union(*tables)
    folder = inspect.getfile(transformers.models).removesuffix("__init__.py")
    text = "".join(path.read_text() for path in Path(folder).rglob("*.py"))
    assert not [name for name in names if f"\nclass {name}(" not in text]
