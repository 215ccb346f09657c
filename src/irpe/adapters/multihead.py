"""torch's MultiheadAttention with an encoding, alone and inside the models that are built on it."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from irpe.adapters.answer import answer_with_weights
from irpe.adapters.equipped import encoding_of
from irpe.adapters.grids import check_told
from irpe.adapters.host import Row
from irpe.adapters.swaps import Swap, set_attribute
from irpe.errors import UserError


def forward(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Returns the attended tokens and, if asked for, the weights, as torch's own does."""
    if key is not query or value is not query:
        raise UserError(
            "query, key and value differ: an encoding relates the tokens of one grid to each "
            "other; leave cross-attention out with layers="
        )
    if is_causal and attn_mask is None:
        raise UserError("is_causal=True is a hint about attn_mask: pass the mask too")
    is_batched = query.ndim == 3
    x = query if is_batched else query.unsqueeze(0)
    x = x if self.batch_first or not is_batched else x.transpose(0, 1)
    check_told(self, x.shape[1] - encoding_of(self).num_prefix_tokens)
    qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
    qkv = qkv.unflatten(-1, (3, self.num_heads, -1))  # batch tokens 3 heads dim
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)

    mask = _combined_mask(attn_mask, key_padding_mask, q)
    dropout_p = self.dropout if self.training else 0.0
    z, weights = answer_with_weights(q, k, v, mask, dropout_p, with_weights=need_weights)
    out = self.out_proj(z.transpose(1, 2).flatten(2))
    if weights is not None and average_attn_weights:
        weights = weights.mean(dim=1)
    if not is_batched:
        return out.squeeze(0), None if weights is None else weights.squeeze(0)
    return (out if self.batch_first else out.transpose(0, 1)), weights


ROW = Row(forward=forward)


def find_row(kind: type) -> Row | None:
    """Returns the row of torch's attention."""
    return ROW if kind is nn.MultiheadAttention else None


def leave_fast_path(attention: nn.MultiheadAttention) -> list[Swap]:
    """Makes TransformerEncoderLayer call the attention in eval mode too.

    Its fused path for inference reads the weights and never calls the attention. It is not taken
    for attentions whose q, k and v have weights of their own; nothing else reads this attribute.
    """
    return set_attribute(attention, "_qkv_same_embed_dim", False)


def _combined_mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor
) -> Tensor | None:
    """Returns torch.nn's two masks as one for SDPA; in torch.nn True means that a key is masked."""
    parts: list[Tensor] = []
    if attn_mask is not None:
        per_head = attn_mask.ndim == 3
        parts.append(attn_mask.unflatten(0, (-1, q.shape[1])) if per_head else attn_mask)
    if key_padding_mask is not None:
        parts.append(key_padding_mask.reshape(-1, 1, 1, key_padding_mask.shape[-1]))
    if not parts:
        return None
    if all(part.dtype == torch.bool for part in parts):
        return ~(parts[0] if len(parts) == 1 else parts[0] | parts[1])
    additive = [
        torch.zeros_like(part, dtype=q.dtype).masked_fill_(part, float("-inf"))
        if part.dtype == torch.bool
        else part
        for part in parts
    ]
    return additive[0] if len(additive) == 1 else additive[0] + additive[1]
