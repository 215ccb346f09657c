"""transformers' Swin transformers, 1 and 2, and their copies that compute softmax themselves."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from irpe.adapters.answer import answer_with_weights
from irpe.adapters.grids import InputGrid
from irpe.adapters.host import Own, Row
from irpe.adapters.hosts.transformers.attention_interface import REGISTERED


class NoBias(nn.Module):
    """Stands where Swin has its own bias, and adds nothing to a mask."""

    def __init__(self, _: object = None) -> None:
        super().__init__()

    def forward(self) -> float:
        """Returns zero."""
        return 0.0


def square_window(attention: nn.Module, hidden_states: Tensor, *args: Any, **_: Any) -> InputGrid:
    """Returns the grid of a window, which is a square, and which small inputs shrink."""
    side = math.isqrt(hidden_states.shape[1])
    assert side * side == hidden_states.shape[1]
    return side, side


def _heads_of(attention: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values: batch heads tokens dim."""
    size = (attention.num_attention_heads, attention.attention_head_size)
    parts = (project(x) for project in (attention.query, attention.key, attention.value))
    q, k, v = (part.unflatten(-1, size).transpose(1, 2) for part in parts)
    return q, k, v


def _with_shift(bias: Tensor | None, shift: Tensor | None, num_windows: int) -> Tensor | None:
    """Returns a bias with the mask of shifted windows, for all windows of a batch."""
    if shift is None:
        return bias
    shift = shift.repeat(num_windows // shift.shape[0], 1, 1).unsqueeze(1)
    return shift if bias is None else bias + shift


def forward_copied(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    output_attentions: bool | None = False,
) -> Any:
    """The forward of MaskFormer's and Donut's Swin."""
    q, k, v = _heads_of(self, hidden_states)
    size = self.relative_position_index.shape[0]
    bias = self.relative_position_bias_table[self.relative_position_index.view(-1)]
    bias = bias.view(size, size, -1).permute(2, 0, 1).unsqueeze(0)
    mask = _with_shift(bias, attention_mask, hidden_states.shape[0])
    dropout_p = self.dropout.p if self.training else 0.0
    z, weights = answer_with_weights(q, k, v, mask, dropout_p, with_weights=bool(output_attentions))
    out = z.transpose(1, 2).flatten(2)
    return (out, weights) if output_attentions else (out,)


def forward_cosine(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    output_attentions: bool | None = False,
) -> Any:
    """The forward of Swin v2, whose scores have a learned temperature, those of tables too."""
    q, k, v = _heads_of(self, hidden_states)
    shift = None if attention_mask is None else 2 * attention_mask  # as the library adds it
    mask = _with_shift(_continuous_bias(self), shift, hidden_states.shape[0])
    z, weights = answer_with_weights(
        normalize(q, dim=-1),
        normalize(k, dim=-1),
        v,
        mask,
        self.dropout.p if self.training else 0.0,
        temperature=self.logit_scale.clamp(max=math.log(1 / 0.01)).exp(),
        with_weights=bool(output_attentions),
    )
    out = z.transpose(1, 2).flatten(2)
    return (out, weights) if output_attentions else (out,)


def _continuous_bias(attention: Any) -> Tensor | None:
    """Returns the continuous bias: 1, heads, tokens, tokens; `None` if it was dropped."""
    network = attention.continuous_position_bias_mlp
    if network is None:
        return None
    scores = network(attention.relative_coords_table).view(-1, attention.num_attention_heads)
    index = attention.relative_position_index
    scores = scores[index.view(-1)].view(*index.shape, -1)
    return 16 * torch.sigmoid(scores.permute(2, 0, 1).unsqueeze(0))


def _coordinates(self: Any) -> tuple[Tensor, Tensor]:
    """Returns the inputs of the continuous bias, as they are if that was dropped."""
    if self.continuous_position_bias_mlp is None:
        return self.relative_coords_table, self.relative_position_index
    return type(self).__bases__[0].create_coords_table_and_index(self)


def _window_of(attention: Any) -> tuple[int, ...]:
    return attention.relative_position_bias.window_size


_COSINE = Row(
    Own("window_size"),
    forward_cosine,
    bias=("continuous_position_bias_mlp",),
    body={"create_coords_table_and_index": _coordinates},
)
_COPIED = Row(square_window, forward_copied, bias=("relative_position_bias_table",))
ROWS = {
    "SwinAttention": Row(
        square_window,
        bias=("relative_position_bias",),
        no_bias=NoBias,
        body=REGISTERED.body,
        first_grid=_window_of,
    ),
    "Swinv2SelfAttention": _COSINE,
    "Swin2SRSelfAttention": _COSINE,
    "MaskFormerSwinSelfAttention": _COPIED,
    "DonutSwinSelfAttention": _COPIED,
}


def _patch_grid(embeddings: Any) -> Any:
    own = getattr(embeddings, "patch_grid", None)
    return embeddings.patch_embeddings.num_patches if own is None else own


ABSOLUTE = {
    f"{name}Embeddings": ("position_embeddings", _patch_grid)
    for name in ("Swin", "Swinv2", "MaskFormerSwin", "DonutSwin", "Swin2SR")
}
