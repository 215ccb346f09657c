"""Small host models with random weights, and what tests compare of them."""

import itertools

import timm
import torch
from torch import nn

from irpe.adapters.grids import LAST


def perturb(model, seed=0, size=0.2):
    """Moves every parameter, so that no zero and no tiny layer scale hides the attention."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(size * noise.to(parameter))
    return model


def make_vit(name="vit_tiny_patch16_224", **arguments):
    """A vision transformer of timm on a 4x4 grid, in eval mode."""
    sizes = {"depth": 2, "img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 2}
    torch.manual_seed(0)
    return perturb(timm.create_model(name, **{**sizes, "num_classes": 5, **arguments}).eval())


def make_swin(**arguments):
    """A Swin transformer of timm, with windows that are shifted in its first stage."""
    sizes = {"img_size": 32, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": 16}
    name = "swin_tiny_patch4_window7_224"
    torch.manual_seed(0)
    return perturb(timm.create_model(name, **{**sizes, "num_classes": 5, **arguments}).eval())


def make_layer(batch_first=True, dropout=0.0, **arguments):
    """An encoder layer of torch.nn, in eval mode."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "nhead": 2, "dim_feedforward": 24, "batch_first": batch_first}
    return perturb(nn.TransformerEncoderLayer(**sizes, dropout=dropout, **arguments).eval())


def make_encoder(num_layers=2, norm=False, enable_nested_tensor=False, **arguments):
    """An encoder of torch.nn, in eval mode."""
    norm = nn.LayerNorm(16) if norm else None
    layer = make_layer(**arguments)
    encoder = nn.TransformerEncoder(layer, num_layers, norm, enable_nested_tensor)
    return perturb(encoder.eval())


_clips = itertools.count(100)


def unseen_spec(text="product-contextual-qkv"):
    """An encoding that no test has used before, so that nothing is cached for it."""
    return f"{text}@clip{next(_clips)}"


def images(height=32, width=32, batch=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, height, width, generator=generator)


def tokens(count=6, batch=2, dim=16, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, count, dim, generator=generator)


def state_of(model):
    """All that `equip` may touch, by identity: classes, attributes, parameters in order, hooks."""

    def identity(value):
        if isinstance(value, dict):
            return [(key, id(item)) for key, item in value.items()]
        return sorted(value) if isinstance(value, set) else id(value)

    return {
        name: (type(module), {k: identity(v) for k, v in vars(module).items() if k != LAST})
        for name, module in model.named_modules()
    }


def gradients(model, x, forward=None):
    """The output and the gradients of all parameters that take part."""
    model.zero_grad()
    out = (model if forward is None else forward)(x)
    out.square().sum().backward()
    return {"out": out.detach()} | {name: p.grad for name, p in model.named_parameters()}
