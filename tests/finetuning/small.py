"""Small models and images that the tests of other people's training code share."""

import torch
from adapters.small_models import perturb
from torch import nn

import irpe

SPEC = "product-contextual-qkv"
CLASSES = 3


def labelled(count=8, height=32, width=48):
    """Images that are not square, with labels, as a list of the dictionaries of transformers."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(count, 3, height, width, generator=generator)
    return [{"pixel_values": x, "labels": i % CLASSES} for i, x in enumerate(pixels)]


SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "patch_size": 8}


def make_dinov2(**arguments):
    """A DINOv2 of transformers, whose tensors have other names in files than in the model."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Dinov2Config(**SIZES, image_size=32, num_labels=CLASSES)
    return perturb(transformers.Dinov2ForImageClassification(config, **arguments))


def make_transformers_vit():
    """A ViT of transformers, whose tensors have other names in files too."""
    import transformers

    torch.manual_seed(0)
    config = transformers.ViTConfig(**SIZES, image_size=(32, 48), num_labels=CLASSES)
    return perturb(transformers.ViTForImageClassification(config))


def tables_of(model):
    return {name: p for name, p in model.named_parameters() if ".rpe." in name}


def equipped(model, spec=SPEC, fill=True, **arguments):
    """The model with tables that are not zero."""
    irpe.equip(model, spec, **arguments)
    for table in tables_of(model).values() if fill else ():
        nn.init.normal_(table)
    return model
