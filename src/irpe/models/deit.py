"""The DeiT models that the paper's authors published, by their names, in timm's registry."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import register_model
from torch import nn

from irpe.adapters.equip import equip
from irpe.errors import MissingFileError
from irpe.models.layout import WHERE, fill, read_checkpoint

# What each model is: timm's name of the plain one, and the encoding (50 buckets: 7 x 7, and one for
# the class token).
DEITS = {
    f"deit_{size}_patch16_224_ctx_product_50_shared_{targets}": (
        f"deit_{size}_patch16_224",
        f"product-contextual-{targets}@1.9",
    )
    for size, targets in (
        ("tiny", "k"), ("small", "k"), ("small", "qk"), ("small", "qkv"), ("base", "k"),
        ("base", "qkv"),
    )
}  # fmt: skip


def _entrypoint(name: str) -> Callable[..., nn.Module]:
    plain, spec = DEITS[name]

    def create(pretrained: bool = False, **arguments: Any) -> nn.Module:
        file = _find_file(name, arguments.get("cache_dir")) if pretrained else None
        model = equip(timm.create_model(plain, **arguments), spec)
        if file is not None:
            fill(model, read_checkpoint(file), file)
        return model

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"Returns {plain} with {spec}, a model that the authors published."
    return create


def _find_file(name: str, directory: str | Path | None) -> Path:
    path = Path(directory or Path(torch.hub.get_dir(), "checkpoints")) / f"{name}.pth"
    if not path.is_file():
        raise MissingFileError(
            f"{path} does not exist: fetch {WHERE}{path.name} and put it there, or create the "
            "model with pretrained=False"
        )
    return path


for _name in DEITS:
    register_model(_entrypoint(_name))
