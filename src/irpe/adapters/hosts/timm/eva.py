"""timm's Eva, attentions that rotate queries and keys: DINOv3, EVA-02, Perception Encoder, ..."""

from functools import partial
from typing import Any

import torch
from timm.layers.attention import AttentionRope
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models.eva import EvaAttention
from torch import Tensor

from irpe.adapters.grids import grid_of
from irpe.adapters.hosts.timm.attending import (
    attend,
    check_not_causal,
    gate_out,
    project_with_bias,
    split_heads,
)


class RPEEvaAttention(EvaAttention):
    """Eva's attention with an encoding, whose tables meet queries and keys before the rotation."""

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Returns the attended tokens."""
        check_not_causal(is_causal)
        if self.qkv is None:
            return _attend(self, x, _project_apart(self, x), rope, attn_mask)
        return _attend(self, x, project_with_bias(self, x), rope, attn_mask)


class RPERopeAttention(AttentionRope):
    """timm's rotary attention with an encoding; fewer heads of keys are repeated for the queries.

    Tables meet queries and keys before the rotation.
    """

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Returns the attended tokens."""
        check_not_causal(is_causal)
        if self.qkv is None:
            return _attend(self, x, _project_apart(self, x), rope, attn_mask)
        return _attend(self, x, split_heads(self.qkv(x), self.num_heads), rope, attn_mask)


def _project_apart(attention: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values of three projections."""
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    q, k, v = (
        projection(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for projection in projections
    )
    return q, k, v


def _attend(
    attention: Any,
    x: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    rope: Tensor | None,
    attn_mask: Tensor | None,
) -> Tensor:
    q, k, v = qkv
    q, k = attention.q_norm(q).type_as(v), attention.k_norm(k).type_as(v)
    groups = attention.num_heads // k.shape[1]
    if groups > 1:
        k, v = (part.repeat_interleave(groups, dim=1) for part in (k, v))
    rotate = None if rope is None else partial(_rotate, attention, rope)
    z = attend(attention, q, k, v, grid_of(attention).current(), attn_mask, rotate)
    return gate_out(attention, x, z)


def _rotate(attention: Any, rope: Tensor, x: Tensor) -> Tensor:
    """Returns queries or keys, batch heads tokens dim, rotated but for the prefix tokens."""
    count = attention.num_prefix_tokens
    half = getattr(attention, "rotate_half", False)
    rotated = apply_rot_embed_cat(x[:, :, count:], rope, half=half).type_as(x)
    return torch.cat([x[:, :, :count], rotated], dim=2) if count else rotated
