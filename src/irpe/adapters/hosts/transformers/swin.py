"""transformers' Swin transformers, 1 and 2."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers.models.swin.modeling_swin import SwinEmbeddings, SwinLayer
from transformers.models.swinv2.modeling_swinv2 import (
    Swinv2Embeddings,
    Swinv2Layer,
    Swinv2SelfAttention,
)

from irpe.adapters.changes import Change, Undo, drop_module, put_absolute, replace_module
from irpe.adapters.equipped import encoding_of
from irpe.adapters.grids import GridSource, grid_of
from irpe.adapters.hosts.transformers.attention import make_site
from irpe.adapters.plan import Plan, Request, check_window
from irpe.errors import UserError


class RPESwinv2SelfAttention(Swinv2SelfAttention):
    """Swin v2's cosine attention with an encoding, its own bias kept or dropped.

    The tables meet normalized queries and keys, and their scores have the learned temperature too.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = False,
    ) -> Any:
        """Returns the attended tokens of each window and, if asked for, the weights."""
        parts = (project(hidden_states) for project in (self.query, self.key, self.value))
        size = (self.num_attention_heads, self.attention_head_size)
        q, k, v = (x.unflatten(-1, size).transpose(1, 2) for x in parts)
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
        temperature = self.logit_scale.clamp(max=math.log(1 / 0.01)).exp()
        mask = self._own_bias()
        if attention_mask is not None:
            # Twice, as the library adds it.
            repeats = hidden_states.shape[0] // attention_mask.shape[0]
            shift = 2 * attention_mask.repeat(repeats, 1, 1).unsqueeze(1)
            mask = shift if mask is None else mask + shift
        encoding, grid = encoding_of(self), grid_of(self).current()
        dropout_p = self.dropout.p if self.training else 0.0
        arguments: dict[str, Any] = {"attn_mask": mask, "temperature": temperature}
        z = encoding(q, k, v, grid=grid, dropout_p=dropout_p, **arguments)
        out = z.transpose(1, 2).flatten(2)
        if not output_attentions:
            return (out,)
        return out, encoding.weights(q, k, grid=grid, **arguments)

    def _own_bias(self) -> Tensor | None:
        """Returns the continuous bias: 1, heads, tokens, tokens; `None` if it was dropped."""
        network = self._modules["continuous_position_bias_mlp"]
        if network is None:
            return None
        scores = network(self.relative_coords_table).view(-1, self.num_attention_heads)
        tokens = self.relative_position_index.shape[0]
        scores = scores[self.relative_position_index.view(-1)].view(tokens, tokens, -1)
        return 16 * torch.sigmoid(scores.permute(2, 0, 1).unsqueeze(0))

    def create_coords_table_and_index(self) -> tuple[Tensor, Tensor]:
        """Returns the inputs of the continuous bias, as they are if that was dropped."""
        if self._modules["continuous_position_bias_mlp"] is None:
            return self.relative_coords_table, self.relative_position_index
        return super().create_coords_table_and_index()


class NoBias(nn.Module):
    """Stands where Swin has its own bias, and adds nothing to a mask."""

    def forward(self) -> float:
        """Returns zero."""
        return 0.0


class RecordWindow:
    """A hook on the attention of a Swin layer that records its window, which small inputs shrink.

    Args:
        layer: The layer.
        source: Where the attention looks the grid up.
    """

    def __init__(self, layer: Any, source: GridSource) -> None:
        self.layer, self.source = layer, source

    def __call__(self, attention: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Records the grid of a window."""
        self.source.announce((self.layer.window_size, self.layer.window_size))


def add_sites(found: Plan, name: str, module: Any, request: Request) -> None:
    """Adds the attention of a layer, on the grid of a window, or changes the absolute encoding."""
    if isinstance(module, SwinEmbeddings | Swinv2Embeddings) and request.absolute != "keep":
        found.changes.append(partial(_replace_absolute, module, request.absolute))
    if isinstance(module, Swinv2Layer):
        _add_second(found, f"{name}.attention.self".lstrip("."), module.attention.self, request)
    if not isinstance(module, SwinLayer):
        return
    side: Any = module.window_size
    source = GridSource((side, side))
    changes: list[Change] = [partial(_follow_window, module, source)]
    if request.builtin_bias == "drop":
        changes.append(
            partial(replace_module, module.attention, "relative_position_bias", NoBias())
        )
    site = make_site(
        f"{name}.attention".lstrip("."),
        module.attention,
        0,
        source,
        check=partial(check_window, request, has_absolute=True),
        changes=changes,
        has_builtin_bias=True,
    )
    found.sites.append(site)


def _add_second(found: Plan, path: str, attention: Any, request: Request) -> None:
    """Adds the attention of a layer of Swin v2, whose window has one size."""
    changes: list[Change] = []
    if request.builtin_bias == "drop":
        changes.append(partial(drop_module, attention, "continuous_position_bias_mlp"))
    site = make_site(
        path,
        attention,
        0,
        GridSource(attention.window_size),
        equipped=RPESwinv2SelfAttention,
        check=partial(check_window, request, has_absolute=True),
        changes=changes,
        has_builtin_bias=True,
    )
    found.sites.append(site)


def _follow_window(layer: Any, source: GridSource) -> Undo:
    return layer.attention.register_forward_pre_hook(RecordWindow(layer, source)).remove


def _replace_absolute(embeddings: Any, absolute: str) -> Undo:
    if embeddings.position_embeddings is not None:
        return put_absolute(embeddings, "position_embeddings", embeddings.patch_grid, absolute)
    if absolute == "sinusoid":
        raise UserError(
            "absolute 'sinusoid': this Swin transformer has no absolute encoding to replace; use "
            "'keep' or 'none'"
        )
    return lambda: None
