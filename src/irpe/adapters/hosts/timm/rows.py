"""timm's classes of attention, a row each; most run their own forward."""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from timm.models import mvitv2
from torch import Tensor

from irpe.adapters.answer import answer, current_call
from irpe.adapters.grids import InputGrid
from irpe.adapters.host import Given, Own, Row
from irpe.adapters.offset_vectors import grid_of_vectors
from irpe.core.grid import Grid, PooledGrid
from irpe.core.positions import pooled_positions

_MAP, _CHANNELS_LAST = Given(2), Given(1, 3)
_VECTORS = ("rel_pos_h", "rel_pos_w")  # of SAM and MViTv2, for each offset of an axis


def forward_cosine(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """The forward of Swin v2, whose scores have a learned temperature; x is windows of tokens."""
    q, k, v = _project(self, x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    temperature = self.logit_scale.clamp(max=math.log(1.0 / 0.01)).exp().view(-1, 1, 1)
    masks = [_own_bias_of_cosine(self)]
    if mask is not None:  # of shifted windows
        masks.append(mask.repeat(x.shape[0] // mask.shape[0], 1, 1).unsqueeze(1))
    given = [each for each in masks if each is not None]
    mask = sum(given[1:], given[0]) if given else None
    dropout_p = self.attn_drop.p if self.training else 0.0
    z = answer(q, k, v, mask, dropout_p, temperature=temperature)
    return self.proj_drop(self.proj(z.transpose(1, 2).flatten(2)))


def _project(attention: Any, x: Tensor) -> Tensor:
    """Returns queries, keys and values; keys have no learned bias."""
    if getattr(attention, "q_bias", None) is None:
        return attention.qkv(x)
    bias = torch.cat((attention.q_bias, attention.k_bias, attention.v_bias))
    if attention.qkv_bias_separate:  # bit-equal to a sum that is made after the product
        return attention.qkv(x) + bias
    return F.linear(x, attention.qkv.weight, bias)


def _own_bias_of_cosine(attention: Any) -> Tensor | None:
    """Returns the continuous bias, 1 heads tokens tokens, of an attention that has one still."""
    modules = attention._modules
    if "meta_mlp" in modules:
        has_bias = modules["meta_mlp"] is not None
        return attention._relative_positional_encodings() if has_bias else None
    if modules["cpb_mlp"] is None:
        return None
    table = attention.cpb_mlp(attention.relative_coords_table).view(-1, attention.num_heads)
    bias = table[attention.relative_position_index].permute(2, 0, 1)
    return 16 * bias.sigmoid().unsqueeze(0)


def forward_global(self: Any, x: Tensor, q_global: Tensor | None = None) -> Tensor:
    """The forward of GCViT, also with queries of the whole image; x is windows of tokens."""
    heads = (self.num_heads, -1)
    qkv = self.qkv(x).unflatten(-1, (2 if self.use_global else 3, *heads))
    *q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    if not q:
        assert q_global is not None
        of_image = q_global.repeat_interleave(x.shape[0] // q_global.shape[0], dim=0)
        q = [of_image.reshape(*x.shape[:2], *heads).transpose(1, 2)]
    mask = None if self.rel_pos is None else self.rel_pos.get_bias()
    z = answer(q[0], k, v, mask, self.attn_drop.p if self.training else 0.0)
    return self.proj_drop(self.proj(z.transpose(1, 2).flatten(2)))


def forward_multiscale(self: Any, x: Tensor, feat_size: list[int]) -> tuple[Tensor, list[int]]:
    """The forward of MViTv2, which pools queries and keys: returns tokens and the queries' grid."""
    qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
    pools, norms = (self.pool_q, self.pool_k, self.pool_v), (self.norm_q, self.norm_k, self.norm_v)
    q, k, v = (_pool_heads(self, *each, feat_size) for each in zip(qkv, pools, norms, strict=True))
    positions: Any = current_call().grid
    queries, keys = (list(side.shape) for side in positions.sides)
    z = answer(q, k, v, _scores_of_vectors(self, q, queries, keys), scale=self.scale)
    if self.residual_pooling:
        z = z + q
    return self.proj(z.transpose(1, 2).flatten(2)), queries


def _pool_heads(attention: Any, tokens: Tensor, pool: Any, norm: Any, size: list[int]) -> Tensor:
    """Returns pooled tokens: batch heads tokens dim."""
    if pool is not None:
        maps, prefix = mvitv2.reshape_pre_pool(tokens, size, attention.has_cls_token)
        tokens, _ = mvitv2.reshape_post_pool(pool(maps), attention.num_heads, prefix)
    return tokens if norm is None else norm(tokens)


def _scores_of_vectors(
    attention: Any, q: Tensor, queries: list[int], keys: list[int]
) -> Tensor | None:
    """Returns what MViTv2 adds to its scaled scores; `None` if it has none."""
    if attention.rel_pos_type != "spatial":
        return None
    count = int(attention.has_cls_token)
    scores = q.new_zeros(*q.shape[:3], count + keys[0] * keys[1])
    vectors = (getattr(attention, name) for name in _VECTORS)
    return mvitv2.cal_rel_pos_type(scores, q, attention.has_cls_token, queries, keys, *vectors)


def _none() -> str:
    return "none"


def pooled_keys(attention: Any, x: Tensor, size: Any) -> InputGrid:
    """Returns positions where keys are cells of the queries' grid: PVT v2, Twins."""
    keys = queries = Grid(tuple(size))
    if getattr(attention, "pool", None) is not None:  # averages over cells
        pool = attention.pool.output_size
        pool = (pool, pool) if isinstance(pool, int) else tuple(pool)
        keys = PooledGrid(pool, tuple(n / m for n, m in zip(queries.shape, pool, strict=True)))
    elif attention.sr is not None:
        keys = PooledGrid.after(attention.sr, queries.shape)
    return pooled_positions(queries, keys)


def pooled_both(attention: Any, x: Tensor, size: Any) -> InputGrid:
    """Returns positions where queries and keys are pooled: MViTv2."""
    queries, keys = (
        Grid(tuple(size)) if pool is None else PooledGrid.after(pool, size)
        for pool in (attention.pool_q, attention.pool_k)
    )
    return pooled_positions(queries, keys, int(attention.has_cls_token))


_rotary = partial(Row, rotates="apply_rot_embed_cat")
ROWS = {
    f"timm.{name}": row
    for name, row in {
        "layers.attention.Attention": Row(),
        "layers.attention.AttentionRope": _rotary(),
        "models.eva.EvaAttention": _rotary(),
        "models.beit.Attention": Row(bias=("relative_position_bias_table",)),
        "models.vision_transformer_relpos.RelPosAttention": Row(bias=("rel_pos",)),
        "models.vision_transformer_sam.Attention": _rotary(
            _CHANNELS_LAST,
            bias=_VECTORS,
            off={"use_rel_pos": bool},
            is_decomposed=True,
            first_grid=partial(grid_of_vectors, names=_VECTORS),
        ),
        "models.swin_transformer.WindowAttention": Row(
            Own("window_size"), bias=("relative_position_bias_table",)
        ),
        "models.swin_transformer_v2.WindowAttention": Row(
            Own("window_size"), forward_cosine, bias=("cpb_mlp",)
        ),
        "models.swin_transformer_v2_cr.WindowMultiHeadAttention": Row(
            Own("window_size"), forward_cosine, bias=("meta_mlp",)
        ),
        "models.maxxvit.Attention2d": Row(_MAP, bias=("rel_pos",)),
        "models.maxxvit.AttentionCl": Row(_CHANNELS_LAST, bias=("rel_pos",)),
        "models.visformer.Attention": Row(_MAP),
        "models.fastvit.Attention": Row(_MAP),
        "models.volo.Attention": Row(_CHANNELS_LAST),
        "models.twins.LocallyGroupedAttn": Row(Own("ws")),
        "models.twins.GlobalSubSampleAttn": Row(pooled_keys),
        "models.davit.WindowAttention": Row(Own("window_size")),
        "models.tiny_vit.Attention": Row(
            Own("resolution"), bias=("attention_biases",), off={"attention_bias_cache": dict}
        ),
        "models.gcvit.WindowAttentionGlobal": Row(
            Own("window_size"), forward_global, bias=("rel_pos",)
        ),
        "models.pvt_v2.Attention": Row(pooled_keys),
        "models.mvitv2.MultiScaleAttention": Row(
            pooled_both, forward_multiscale, bias=_VECTORS, off={"rel_pos_type": _none}
        ),
    }.items()
}


def size_of(attention: Any) -> tuple[int, int]:
    """Returns the number of heads of an attention and the dimension of one."""
    for name in ("head_dim", "dim_head", "key_dim"):
        if hasattr(attention, name):
            return attention.num_heads, getattr(attention, name)
    return attention.num_heads, attention.proj.in_features // attention.num_heads
