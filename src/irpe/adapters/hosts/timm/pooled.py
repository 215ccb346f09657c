"""timm's attentions with fewer keys or queries than tokens: PVT v2, Twins, MViTv2."""

from functools import partial
from typing import Any

import torch
from timm.models import mvitv2, pvt_v2, twins
from torch import Tensor, nn

from irpe.adapters.changes import Change, drop_parameter, put_absolute
from irpe.adapters.grids import GridSource, grid_of
from irpe.adapters.hosts.timm.attending import attend, head_dim_of, project_out
from irpe.adapters.plan import Plan, Request, Site, check_window
from irpe.adapters.pooled import Pool, not_pooled, pooled_by, pooled_positions, pooled_to
from irpe.core.positions import Positions

_VECTORS = ("rel_pos_h", "rel_pos_w")  # MViTv2's own relative encoding


class RPEPvtAttention(pvt_v2.Attention):
    """The attention of PVT v2 with an encoding: keys are cells of the queries' grid."""

    def forward(self, x: Tensor, feat_size: list[int]) -> Tensor:
        """Returns the attended tokens; `feat_size` is their grid."""
        if self.pool is None:
            return _attend_reduced(self, x, feat_size, self.sr)
        return _attend_averaged(self, x, feat_size)


class RPESubSampleAttn(twins.GlobalSubSampleAttn):
    """Twins' attention to subsampled keys with an encoding."""

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """Returns the attended tokens; `size` is their grid."""
        return _attend_reduced(self, x, size, self.sr)


class RPEMultiScaleAttention(mvitv2.MultiScaleAttention):
    """The attention of MViTv2 with an encoding, its own kept or dropped."""

    def forward(self, x: Tensor, feat_size: list[int]) -> tuple[Tensor, list[int]]:
        """Returns the attended tokens and the grid of the queries."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        roles = zip(
            qkv,
            (self.pool_q, self.pool_k, self.pool_v),
            (self.norm_q, self.norm_k, self.norm_v),
            strict=True,
        )
        (q, queries), (k, keys), (v, _) = (
            _pool_heads(self, tokens, pool, norm, feat_size) for tokens, pool, norm in roles
        )
        positions = _record(self, pooled_positions(queries, keys, int(self.has_cls_token)))
        z = attend(self, q, k, v, positions, _own_scores(self, q, queries, keys))
        if self.residual_pooling:
            z = z + q.transpose(1, 2).flatten(2)
        return self.proj(z), list(queries.shape)


def _record(attention: nn.Module, positions: Positions) -> Positions:
    """Records positions for `irpe.summary`, and returns them."""
    if not torch.compiler.is_compiling():
        grid_of(attention).announce(positions)
    return positions


def _to_map(x: Tensor, size: Any) -> Tensor:
    """Returns tokens as a map: batch channels rows columns."""
    return x.transpose(1, 2).unflatten(2, tuple(size))


def _attend_reduced(attention: Any, x: Tensor, size: Any, reduce: Any) -> Tensor:
    """Returns attention to the keys that a convolution with a stride leaves, or to all."""
    if reduce is None:
        return _attend_to(attention, x, x, size, not_pooled(size))
    reduced = reduce(_to_map(x, size))
    context = attention.norm(reduced.flatten(2).transpose(1, 2))
    return _attend_to(attention, x, context, size, pooled_by(reduce, reduced.shape[-2:]))


def _attend_averaged(attention: Any, x: Tensor, size: Any) -> Tensor:
    """Returns attention to keys that are averages over cells: the linear attention of PVT v2."""
    reduced = attention.sr(attention.pool(_to_map(x, size)))
    context = attention.act(attention.norm(reduced.flatten(2).transpose(1, 2)))
    return _attend_to(attention, x, context, size, pooled_to(reduced.shape[-2:], size))


def _attend_to(attention: Any, x: Tensor, context: Tensor, size: Any, keys: Pool) -> Tensor:
    heads = (attention.num_heads, -1)
    q = attention.q(x).unflatten(-1, heads).transpose(1, 2)
    k, v = attention.kv(context).unflatten(-1, (2, *heads)).permute(2, 0, 3, 1, 4).unbind(0)
    positions = _record(attention, pooled_positions(not_pooled(size), keys))
    return project_out(attention, attend(attention, q, k, v, positions))


def _pool_heads(
    attention: Any, tokens: Tensor, pool: Any, norm: Any, size: list[int]
) -> tuple[Tensor, Pool]:
    """Returns pooled tokens, batch heads tokens dim, and how they were pooled."""
    how = not_pooled(size)
    if pool is not None:
        maps, prefix = mvitv2.reshape_pre_pool(tokens, size, attention.has_cls_token)
        maps = pool(maps)
        how = pooled_by(pool, maps.shape[-2:])
        tokens, _ = mvitv2.reshape_post_pool(maps, attention.num_heads, prefix)
    return (tokens if norm is None else norm(tokens)), how


def _own_scores(attention: Any, q: Tensor, queries: Pool, keys: Pool) -> Tensor | None:
    """Returns what MViTv2 adds to its scaled scores; `None` if it has none, or not any more."""
    vectors = [attention._parameters.get(name) for name in _VECTORS]
    if vectors[0] is None:
        return None
    count = int(attention.has_cls_token)
    num_keys = count + keys.shape[0] * keys.shape[1]
    scores = q.new_zeros(*q.shape[:3], num_keys)
    sizes = list(queries.shape), list(keys.shape)
    return mvitv2.cal_rel_pos_type(scores, q, attention.has_cls_token, *sizes, *vectors)


_EQUIPPED: dict[type[nn.Module], type[nn.Module]] = {
    pvt_v2.Attention: RPEPvtAttention,
    twins.GlobalSubSampleAttn: RPESubSampleAttn,
    mvitv2.MultiScaleAttention: RPEMultiScaleAttention,
}


def add_sites(found: Plan, name: str, module: nn.Module, request: Request) -> None:
    """Adds an attention that pools, or changes the absolute encoding of MViTv2."""
    if isinstance(module, mvitv2.MultiScaleVit) and request.absolute != "keep":
        _change_absolute(found, module, request)
    equipped = next((new for old, new in _EQUIPPED.items() if isinstance(module, old)), None)
    if equipped is not None:
        found.sites.append(_site_of(name, module, equipped, request))


def _change_absolute(found: Plan, vit: Any, request: Request) -> None:
    if vit.pos_embed is not None:
        change = partial(put_absolute, vit, "pos_embed", vit.patch_dims, request.absolute)
        found.changes.append(change)


def _site_of(name: str, module: Any, equipped: type[nn.Module], request: Request) -> Site:
    has_vectors = module._parameters.get(_VECTORS[0]) is not None
    changes: list[Change] = []
    if has_vectors and request.builtin_bias == "drop":
        changes = [partial(drop_parameter, module, vector) for vector in _VECTORS]
    is_mvit = isinstance(module, mvitv2.MultiScaleAttention)
    kind = "MultiScaleVit" if is_mvit else "this model"
    return Site(
        name=name,
        attention=module,
        equipped_class=equipped,
        num_heads=module.num_heads,
        head_dim=head_dim_of(module),
        num_prefix_tokens=int(getattr(module, "has_cls_token", False)),
        grid=GridSource(None),
        changes=changes,
        check=partial(check_window, request, has_absolute=is_mvit, kind=kind),
        has_builtin_bias=has_vectors,
    )
