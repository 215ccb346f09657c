"""`load_published`: the models that the paper's authors published, from their files."""

import os
from pathlib import Path

import timm
from torch import nn

from irpe.errors import UserError
from irpe.models.deit import DEITS
from irpe.models.detr import build_detr, parse_detr_name
from irpe.models.layout import fill, read_checkpoint


def load_published(path: str | os.PathLike[str], model: str | nn.Module | None = None) -> nn.Module:
    """Returns the model of a checkpoint that the paper's authors published, in eval mode.

    Args:
        path: The file, for example deit_small_patch16_224_ctx_product_50_shared_k.pth.
        model: The authors' name of the model, if the file has another; or an equipped model of
            timm or a DETR of transformers, which is filled in place.

    Examples:
        >>> import irpe
        >>> name = "deit_small_patch16_224_ctx_product_50_shared_k"
        >>> model = irpe.load_published(f"{name}.pth")  # doctest: +SKIP
    """
    path = Path(path)
    tensors = read_checkpoint(path)
    if not isinstance(model, nn.Module):
        model = _create(path.name.removesuffix(".pth") if model is None else model)
    return fill(model, tensors, path)


def _create(name: str) -> nn.Module:
    if name in DEITS:
        return timm.create_model(name)
    spec = parse_detr_name(name)
    if spec is None:
        raise UserError(
            f"{name!r} is not a model that the authors published: pass as model= (--model) one of "
            f"{', '.join(DEITS)}, rpe-1.9-product-ctx-1-k, rpe-2.0-product-ctx-1-k"
        )
    return build_detr(spec)
