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
from timm.models.gcvit import WindowAttentionGlobal
from timm.models.swin_transformer_v2 import WindowAttention
from timm.models.swin_transformer_v2_cr import WindowMultiHeadAttention

from irpe.adapters.equipped import equipped_attentions
from irpe.adapters.grids import recorded_grid, source_of


def calls_of(model, x):
    """How the equipped attentions are called: module, arguments, named arguments, result, grid."""
    calls = []

    def note(attention, args, kwargs, result):
        source = source_of(attention)
        grid = recorded_grid(attention) if source is None else source.of_attention(args[0])
        calls.append((attention, args, kwargs, result, grid))

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

    if isinstance(attention, WindowAttentionGlobal):
        return global_by_hand(attention, grid, *args, **kwargs)
    if isinstance(attention, WindowAttention | WindowMultiHeadAttention):
        return cosine_by_hand(attention, grid, *args, **kwargs)
    equipped_class = type(attention)
    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(patch.object(F, "scaled_dot_product_attention", attend))
        for module in (timm.models.eva, timm.layers.attention, timm.models.vision_transformer_sam):
            stack.enter_context(patch.object(module, "apply_rot_embed_cat", rotate))
        if hasattr(attention, "fused_attn"):
            stack.callback(setattr, attention, "fused_attn", attention.fused_attn)
            attention.fused_attn = True
        stack.callback(setattr, attention, "__class__", equipped_class)
        attention.__class__ = equipped_class.__base__
        return attention(*args, **kwargs)


def attention_by_hand(encoding, grid, kept, q, k, v, mask, scale):
    """Eq. 5 and 13-17 with the scores that `RelativePositionEncoding` gives."""
    lead, heads = q.shape[:-2], encoding.size.num_heads
    flat = q.ndim == 3  # batch and heads in one axis
    if q.ndim == 5:  # batch windows heads tokens dim
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
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
    return z.reshape(*lead, *z.shape[-2:])


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
    qkv = attention.qkv(x)
    if hasattr(attention, "q_bias"):
        qkv = qkv + torch.cat((attention.q_bias, attention.k_bias, attention.v_bias))
    q, k, v = qkv.unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    if hasattr(attention, "cpb_mlp"):
        table = attention.cpb_mlp(attention.relative_coords_table).flatten(0, 2)
        own = 16 * table[attention.relative_position_index].permute(2, 0, 1).sigmoid()
    else:
        own = attention.meta_mlp(attention.relative_coordinates_log).T
        own = own.unflatten(1, (q.shape[2], q.shape[2]))
    if mask is not None:
        own = own + mask.repeat(len(x) // len(mask), 1, 1)[:, None]
    factor = attention.logit_scale.exp().clamp(max=100.0).view(-1, 1, 1)
    e = (q @ k.mT + attention.rpe.scores(q, k, grid=grid)) * factor + own
    z = values_by_hand(attention.rpe, grid, e.softmax(-1), v)
    return attention.proj(z.transpose(1, 2).flatten(2))


@torch.no_grad()
def global_by_hand(attention, grid, x, q_global=None):
    """The attention of GCViT, which calls nothing that could be replaced either."""
    parts = attention.qkv(x).unflatten(-1, (-1, attention.num_heads, attention.head_dim))
    *q, k, v = parts.permute(2, 0, 3, 1, 4)
    if not q:  # all windows of an image have its queries
        of_image = q_global.reshape(len(q_global), -1, attention.num_heads, attention.head_dim)
        q = [of_image.transpose(1, 2).repeat_interleave(len(x) // len(q_global), dim=0)]
    b = attention.rpe.scores(q[0], k, grid=grid)
    e = (q[0] @ k.mT + b) * attention.head_dim**-0.5 + attention.rel_pos.get_bias()
    z = values_by_hand(attention.rpe, grid, e.softmax(-1), v)
    return attention.proj(z.transpose(1, 2).flatten(2))
