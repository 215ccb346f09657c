"""The encoder of transformers' DETR."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.detr.modeling_detr import (
    DetrEncoderLayer,
    DetrModel,
    DetrSelfAttention,
    DetrSinePositionEmbedding,
)

from irpe.adapters.changes import Undo
from irpe.adapters.following import follow_grid, map_source
from irpe.adapters.hosts.transformers.attention import attend, make_site
from irpe.adapters.plan import Plan, Request


class RPEDetrAttention(DetrSelfAttention):
    """The self-attention of DETR's encoder with an encoding."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """Returns the attended tokens and, if asked for, the weights."""
        x = hidden_states if position_embeddings is None else hidden_states + position_embeddings
        return attend(self, x, hidden_states, attention_mask, kwargs)


class NoPositionEmbedding(nn.Module):
    """Stands where DETR has its absolute encoding: zeros, for the encoder and the decoder's keys.

    Args:
        dim: The dimension of a token.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(
        self,
        shape: torch.Size,
        device: torch.device | str,
        dtype: torch.dtype,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Returns zeros for a feature map of this shape."""
        return torch.zeros(shape[0], self.dim, *shape[-2:], device=device, dtype=dtype)


def add_sites(found: Plan, name: str, detr: Any, request: Request) -> None:
    """Adds the self-attentions of the encoder of a DETR, and what else changes in it."""
    if not isinstance(detr, DetrModel):
        return
    source = map_source(request.grid, None, detr, "input_projection")
    check = partial(_check, detr, request)
    layers: dict[str, Any] = {
        path: m for path, m in detr.named_modules(prefix=name) if isinstance(m, DetrEncoderLayer)
    }
    for path, layer in layers.items():
        site = make_site(f"{path}.self_attn", layer.self_attn, RPEDetrAttention, 0, source, check)
        found.sites.append(site)
    found.changes.append(partial(follow_grid, source, layers.values()))
    if request.grid is None:
        found.changes.append(partial(_refuse_embeddings, detr))
    if request.absolute != "keep":
        found.changes.append(partial(_replace_absolute, detr, request.absolute))


def _check(detr: Any, request: Request) -> None:
    if request.num_prefix_tokens:
        raise ValueError(
            f"num_prefix_tokens {request.num_prefix_tokens}: no tokens stand before the feature "
            "map of a DETR; leave it out"
        )
    has_sines = isinstance(detr.position_embedding, DetrSinePositionEmbedding)
    if request.absolute == "sinusoid" and has_sines:
        raise ValueError(
            "absolute 'sinusoid': this DETR has a fixed sinusoid already; use 'keep' or 'none'"
        )


def _refuse_embeddings(detr: DetrModel) -> Undo:
    return detr.register_forward_pre_hook(_check_inputs, with_kwargs=True).remove


def _check_inputs(detr: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before DETR: embeddings do not pass the module that the grid is measured at."""
    if kwargs.get("inputs_embeds") is not None:
        raise ValueError(
            "inputs_embeds do not have a grid of their own: pass pixel_values, or equip the model "
            "with grid=(rows, columns)"
        )


def _replace_absolute(detr: Any, absolute: str) -> Undo:
    """Changes the absolute encoding of the encoder and of the keys of the decoder."""
    learned, dim = detr.position_embedding, detr.config.d_model
    sines = partial(DetrSinePositionEmbedding, dim // 2, normalize=True)
    detr.position_embedding = NoPositionEmbedding(dim) if absolute == "none" else sines()
    return partial(setattr, detr, "position_embedding", learned)
