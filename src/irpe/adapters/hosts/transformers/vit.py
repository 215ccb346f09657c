"""transformers' ViT, DeiT and DINOv2, with and without registers."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.models.deit.modeling_deit import DeiTAttention, DeiTEmbeddings, DeiTLayer
from transformers.models.dinov2.modeling_dinov2 import (
    Dinov2Attention,
    Dinov2Embeddings,
    Dinov2Layer,
)
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import (
    Dinov2WithRegistersAttention,
    Dinov2WithRegistersEmbeddings,
    Dinov2WithRegistersLayer,
)
from transformers.models.vit.modeling_vit import ViTAttention, ViTEmbeddings, ViTLayer

from irpe.adapters.changes import put_absolute
from irpe.adapters.following import follow_grid, map_source
from irpe.adapters.hosts.transformers.attention import attend, make_site
from irpe.adapters.plan import Plan, Request


def _forward(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Returns the attended tokens and, if asked for, the weights."""
    return attend(self, hidden_states, hidden_states, attention_mask, kwargs)


class RPEViTAttention(ViTAttention):
    """ViT's attention with an encoding."""

    forward = _forward


class RPEDeiTAttention(DeiTAttention):
    """DeiT's attention with an encoding."""

    forward = _forward


class RPEDinov2Attention(Dinov2Attention):
    """DINOv2's attention with an encoding."""

    forward = _forward


class RPEDinov2WithRegistersAttention(Dinov2WithRegistersAttention):
    """The attention of DINOv2 with registers, with an encoding."""

    forward = _forward


# By the embeddings: the block of the model, and the class that the attention in it gets.
_MODELS: dict[type[nn.Module], tuple[type[nn.Module], type[nn.Module]]] = {
    ViTEmbeddings: (ViTLayer, RPEViTAttention),
    DeiTEmbeddings: (DeiTLayer, RPEDeiTAttention),
    Dinov2Embeddings: (Dinov2Layer, RPEDinov2Attention),
    Dinov2WithRegistersEmbeddings: (Dinov2WithRegistersLayer, RPEDinov2WithRegistersAttention),
}


def add_sites(found: Plan, name: str, vit: Any, request: Request) -> None:
    """Adds the attentions of a vision transformer, and what else changes in it."""
    classes = _classes_of(vit)
    if classes is None:
        return
    layer_class, equipped_class = classes
    embeddings = vit.embeddings
    patches, count = embeddings.patch_embeddings, request.num_prefix_tokens
    grid = tuple(a // b for a, b in zip(patches.image_size, patches.patch_size, strict=True))
    source = map_source(request.grid, grid, vit, "embeddings.patch_embeddings.projection")
    count = _count_prefix_tokens(embeddings) if count is None else count
    layers: dict[str, Any] = {
        path: m for path, m in vit.named_modules(prefix=name) if isinstance(m, layer_class)
    }
    for path, layer in layers.items():
        site = make_site(f"{path}.attention", layer.attention, equipped_class, count, source)
        found.sites.append(site)
    found.changes.append(partial(follow_grid, source, layers.values()))
    if request.absolute != "keep":
        found.changes.append(
            partial(put_absolute, embeddings, "position_embeddings", grid, request.absolute)
        )


def _classes_of(vit: nn.Module) -> tuple[type[nn.Module], type[nn.Module]] | None:
    embeddings = getattr(vit, "embeddings", None)
    for kind, classes in _MODELS.items():
        if isinstance(embeddings, kind):
            return classes
    return None


def _count_prefix_tokens(embeddings: Any) -> int:
    names = ("cls_token", "distillation_token", "register_tokens")
    tokens = [getattr(embeddings, name, None) for name in names]
    return sum(token.shape[1] for token in tokens if token is not None)
