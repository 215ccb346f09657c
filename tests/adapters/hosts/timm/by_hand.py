"""The stock forward of an attention with the encoding called by hand in its place: an oracle.

The host's own class runs with `scaled_dot_product_attention` replaced, so that queries and keys are
those that the host computes. Where it rotates them, those before the rotation are kept.
"""

from contextlib import ExitStack
from unittest.mock import patch

import timm.layers.attention
import timm.models.eva
import timm.models.vision_transformer_sam
import torch
import torch.nn.functional as F  # noqa: N812
from timm.layers import apply_rot_embed_cat
from timm.models import swin_transformer_v2

from irpe.adapters.equipped import equipped_attentions
from irpe.adapters.grids import grid_of


def calls_of(model, x):
    """How the equipped attentions are called: module, arguments, named arguments, result, grid."""
    calls = []

    def note(attention, args, kwargs, result):
        calls.append((attention, args, kwargs, result, grid_of(attention).current()))

    with ExitStack() as stack, torch.no_grad():
        for attention in equipped_attentions(model).values():
            handle = attention.register_forward_hook(note, with_kwargs=True)
            stack.callback(handle.remove)
        model(x)
    return calls


def stock_forward(attention, args, kwargs, grid):
    """What the host's own class computes, with the encoding added by hand."""
    kept = []

    def rotate(x, *arguments, **options):
        kept.append(x)
        return apply_rot_embed_cat(x, *arguments, **options)

    def attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
        return attention_by_hand(attention.rpe, grid, kept, q, k, v, attn_mask, scale)

    if isinstance(attention, swin_transformer_v2.WindowAttention):
        return cosine_by_hand(attention, grid, *args, **kwargs)
    equipped_class = type(attention)
    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(patch.object(F, "scaled_dot_product_attention", attend))
        for module in (timm.models.eva, timm.layers.attention, timm.models.vision_transformer_sam):
            stack.enter_context(patch.object(module, "apply_rot_embed_cat", rotate))
        stack.callback(setattr, attention, "__class__", equipped_class)
        attention.__class__ = equipped_class.__base__
        return attention(*args, **kwargs)


def attention_by_hand(encoding, grid, kept, q, k, v, mask, scale):
    """Eq. 5 and 13-17 with the scores that `RelativePositionEncoding` gives."""
    flat = q.ndim == 3  # batch and heads in one axis
    heads = encoding.size.num_heads
    q, k, v = (x.unflatten(0, (-1, heads)) if flat else x for x in (q, k, v))
    kept = [x.unflatten(0, (-1, heads)) if flat else x for x in kept]
    table_q, table_k = (
        _before_rotation(x, part) for x, part in zip((q, k), kept or (q, k), strict=True)
    )
    b = encoding.scores(table_q, table_k, grid=grid)
    e = (q @ k.mT + b) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        e = e + (mask.unflatten(0, (-1, heads)) if flat and mask.ndim == 3 else mask)
    z = values_by_hand(encoding, grid, e.softmax(-1), v)
    return z.flatten(0, 1) if flat else z


def values_by_hand(encoding, grid, a, v):
    """Eq. 17: the values and the table rows of their offsets, weighted."""
    z = a @ v
    for bucket_map, table in zip(encoding.maps(grid), encoding.value_tables, strict=True):
        rows = table[:, bucket_map.ids].expand(a.shape[1], -1, -1, -1)
        z = z + torch.einsum("bhij,hijd->bhid", a, rows)
    return z


def _before_rotation(x, part):
    """The tokens of x, those of the patches as they were before the rotation."""
    part = part.repeat_interleave(x.shape[1] // part.shape[1], dim=1)
    return torch.cat([x[:, :, : x.shape[2] - part.shape[2]], part], dim=2)


@torch.no_grad()
def cosine_by_hand(attention, grid, x, mask=None):
    """The attention of Swin v2, which calls nothing that could be replaced."""
    bias = torch.cat((attention.q_bias, attention.k_bias, attention.v_bias))
    qkv = F.linear(x, attention.qkv.weight, bias).unflatten(-1, (3, attention.num_heads, -1))
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    table = attention.cpb_mlp(attention.relative_coords_table).flatten(0, 2)
    own = 16 * table[attention.relative_position_index].permute(2, 0, 1).sigmoid()
    if mask is not None:
        own = own + mask.repeat(len(x) // len(mask), 1, 1)[:, None]
    factor = attention.logit_scale.exp().clamp(max=100.0)
    e = (q @ k.mT + attention.rpe.scores(q, k, grid=grid)) * factor + own
    z = values_by_hand(attention.rpe, grid, e.softmax(-1), v)
    return attention.proj(z.transpose(1, 2).flatten(2))
