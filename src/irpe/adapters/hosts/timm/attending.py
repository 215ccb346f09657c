"""What the forwards of timm's attentions share: heads, dropout, and the way back to channels."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from irpe.adapters.equipped import encoding_of
from irpe.adapters.grids import grid_of
from irpe.errors import UserError
from irpe.nn.where import Where


def split_heads(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values, batch heads tokens dim, of what one projection gives."""
    q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def project_with_bias(attention: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values; those of Eva and BEiT have no learned bias for keys."""
    if attention.q_bias is None:
        return split_heads(attention.qkv(x), attention.num_heads)
    bias = torch.cat((attention.q_bias, attention.k_bias, attention.v_bias))
    if attention.qkv_bias_separate:  # bit-equal to a sum that is made after the product
        return split_heads(attention.qkv(x) + bias, attention.num_heads)
    return split_heads(F.linear(x, attention.qkv.weight, bias), attention.num_heads)


def attend(
    attention: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Where,
    attn_mask: Tensor | None = None,
    rotate: Callable[[Tensor], Tensor] | None = None,
    temperature: Tensor | None = None,
) -> Tensor:
    """Returns the attended tokens of an equipped attention before its projection.

    Args:
        attention: The attention, with `attn_drop` and, where it has no temperature, `scale`.
        q: Queries, batch heads tokens dim, before a rotation.
        k: Keys.
        v: Values.
        grid: The grid of the tokens, or their positions.
        attn_mask: As in `irpe.rpe_attention`.
        rotate: The rotation of queries and keys, if the attention has one.
        temperature: The learned factor of the scores of each head, if it has one.
    """
    dropout = getattr(attention, "attn_drop", None)  # DaViT has none
    table_q, table_k = (None, None) if rotate is None else (q, k)
    z = encoding_of(attention)(
        q if rotate is None else rotate(q),
        k if rotate is None else rotate(k),
        v,
        grid=grid,
        attn_mask=attn_mask,
        dropout_p=dropout.p if dropout is not None and attention.training else 0.0,
        scale=attention.scale if temperature is None else None,
        table_q=table_q,
        table_k=table_k,
        temperature=temperature,
    )
    return z.transpose(1, 2).flatten(2)


def project_out(attention: Any, z: Tensor) -> Tensor:
    """Returns attended tokens after the projection and its dropout."""
    return attention.proj_drop(attention.proj(z))


def gate_out(attention: Any, x: Tensor, z: Tensor) -> Tensor:
    """Returns attended tokens after the norm and the gate that some attentions have."""
    gate = getattr(attention, "gate", None)  # not in older releases of timm
    z = attention.norm(z)
    return project_out(attention, z if gate is None else z * gate(x).sigmoid())


def check_not_causal(is_causal: bool) -> None:
    """Raises an error for an order of tokens, which images do not have."""
    if is_causal:
        raise UserError("is_causal=True: tokens of an image have no order; pass attn_mask")


def map_grid(attention: nn.Module, shape: Sequence[int]) -> tuple[int, int]:
    """Returns the grid of a map that an attention gets, and records it for `irpe.summary`."""
    rows, columns = shape
    if not torch.compiler.is_compiling():
        grid_of(attention).announce((rows, columns))
    return rows, columns


def head_dim_of(attention: Any) -> int:
    """Returns the dimension of one head."""
    for name in ("head_dim", "dim_head", "key_dim"):
        if hasattr(attention, name):
            return getattr(attention, name)
    return attention.proj.in_features // attention.num_heads


def add_masks(*masks: Tensor | None) -> Tensor | None:
    """Returns the sum of the masks that there are."""
    given = [mask for mask in masks if mask is not None]
    return sum(given[1:], given[0]) if given else None
