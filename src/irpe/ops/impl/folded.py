"""Maps that depend on one axis of the grid, as extra head dimensions of PyTorch's own attention.

The table row of a pair (i, j) then depends on token i and on the coordinate of key j, of which
there are few: b_ij is the inner product of what token i scores for each coordinate with the one-hot
coordinate of j. So PyTorch's fused kernel computes `cross` and `decomposed` in the operands' dtype,
forward and backward, and nothing of size n x n is formed. Values are one-hot columns as well: what
comes out of them are the sums of the weights for each coordinate.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float, Integer
from torch import Tensor

from irpe.core.bucket_map import BucketMap
from irpe.ops.call import AttentionCall, head_slices
from irpe.ops.precision import accumulation_dtype, cast, product, product_dtype
from irpe.ops.shapes import Tokens

_MOST_DIMENSIONS = 256  # of PyTorch's flash kernel, which wants a multiple of 8
_MULTIPLE = 8


def supports(call: AttentionCall) -> str | None:
    """Returns why the call cannot be computed here, or `None` if it can."""
    if not all(m.key_axis is not None and m.key_axis.of_queries for m in call.maps):
        return "it takes maps that depend on one axis of the grid each: method 'cross'"
    if call.bias_tables:  # in 16 bits their gradients had 2.2 times PyTorch's own error
        return "it takes tables of vectors, not of scalars"
    width = _width(call)
    if width > _MOST_DIMENSIONS:
        return f"it takes up to {_MOST_DIMENSIONS} dimensions with those of the axes, not {width}"
    return None


def attention(call: AttentionCall) -> Tokens:
    """Returns what the reference returns."""
    axes, dim = [_Axis(bucket_map) for bucket_map in call.maps], call.q.shape[-1]
    q_parts, k_parts, v_parts = [call.q], [call.k], [call.v]
    table_q = call.q if call.table_q is None else call.table_q
    table_k = call.k if call.table_k is None else call.table_k
    for axis, table, dims in _pairs(axes, call.key_tables, dim):
        q_parts.append(axis.multiply(table_q[..., dims], axis.rows(table, axis.ids).mT))
        k_parts.append(axis.one_hot(call.k))
    for axis, table, dims in _pairs(axes, call.query_tables, dim):
        q_parts.append(axis.one_hot(call.q))
        k_parts.append(axis.multiply(table_k[..., dims], axis.rows(table, axis.ids.mT).mT))
    v_parts += [axis.one_hot(call.v) for axis, _, _ in _pairs(axes, call.value_tables, dim)]

    width = _width(call)
    q, k, v = (_side_by_side(parts, width) for parts in (q_parts, k_parts, v_parts))
    z = F.scaled_dot_product_attention(q, k, v, call.mask, call.dropout_p, scale=call.scale)
    sizes = [part.shape[-1] for part in v_parts]
    out, *sums = z[..., : sum(sizes)].split(sizes, dim=-1)
    for (axis, table, dims), weights in zip(
        _pairs(axes, call.value_tables, dim), sums, strict=True
    ):
        added = axis.multiply(weights, axis.rows(table, axis.ids))
        before = dims.start or 0
        out = out + F.pad(added, (before, dim - before - added.shape[-1]))
    return out


class _Product(torch.autograd.Function):
    """Tokens times float32 matrices in the dtype of the tokens, their gradient in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrices: Tensor) -> Tensor:
        ctx.save_for_backward(x, matrices)
        return torch.einsum("bhcnl,hclr->bhcnr", x, _of_heads(matrices, x))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (grad,), (x, matrices) = gradients, ctx.saved_tensors
        dx = torch.einsum("bhcnr,hclr->bhcnl", grad, _of_heads(matrices, x))
        order, start = ((1, 2, 0, 3, 4), 2) if matrices.shape[0] > 1 else ((2, 0, 1, 3, 4), 1)
        left, right = (
            cast(each, product_dtype(each.dtype, each.device)).permute(order).flatten(start, 3)
            for each in (x, grad)
        )
        return dx, product(left.mT, right).view(matrices.shape)


def _of_heads(matrices: Tensor, x: Tensor) -> Tensor:
    return matrices.to(x.dtype).expand(x.shape[1], -1, -1, -1)


class _Axis:
    """A map by coordinates on its axis: those of the grid, then one for all prefix tokens.

    Args:
        bucket_map: The map.

    Attributes:
        ids: The table row of each pair of coordinates.
    """

    ids: Integer[Tensor, "query_coordinate key_coordinate"]

    def __init__(self, bucket_map: BucketMap) -> None:
        assert bucket_map.key_axis is not None
        grid, axis, _ = bucket_map.key_axis
        ids = bucket_map.compact_ids
        self._prefix = ids.shape[-1] - math.prod(grid)
        self._inside = (math.prod(grid[:axis]), grid[axis], math.prod(grid[axis + 1 :]))
        tokens = self._prefix + torch.arange(grid[axis], device=ids.device) * self._inside[2]
        if self._prefix:
            tokens = torch.cat([tokens, tokens.new_zeros(1)])
        self.ids = ids[tokens][:, tokens].long()

    def rows(
        self, table: Tensor, ids: Integer[Tensor, "coordinate other"]
    ) -> Float[Tensor, "heads_or_1 coordinate other *dim"]:
        """Returns the table row of each pair of coordinates, so that gradients add up exactly."""
        return table.to(accumulation_dtype(table.dtype))[:, ids]

    def multiply(
        self, x: Tokens, matrices: Float[Tensor, "heads_or_1 coordinate left right"]
    ) -> Tokens:
        """Returns each token times the matrix of its coordinate."""
        size = self._inside[1]
        patches = x[:, :, self._prefix :].unflatten(2, self._inside)
        found = _Product.apply(patches.transpose(2, 3).flatten(3, 4), matrices[:, :size])
        found = found.unflatten(3, (self._inside[0], -1)).transpose(2, 3).flatten(2, 4)
        if not self._prefix:
            return found
        of_prefix = _Product.apply(x[:, :, None, : self._prefix], matrices[:, size:])
        return torch.cat([of_prefix.squeeze(2), found], dim=2)

    def one_hot(self, like: Tokens) -> Tokens:
        """Returns the coordinate of each token as a unit vector."""
        before, size, after = self._inside
        inside = torch.arange(size, device=like.device).repeat_interleave(after).repeat(before)
        coordinates = F.pad(inside, (self._prefix, 0), value=size)
        unit = F.one_hot(coordinates, self.ids.shape[0]).to(like.dtype)
        return unit.expand(*like.shape[:2], -1, -1)


def _pairs(
    axes: list[_Axis], tables: tuple[Tensor, ...], dim: int
) -> list[tuple[_Axis, Tensor, slice]]:
    """Returns each axis with its table and the dimensions of it; nothing if there are no tables."""
    if not tables:
        return []
    return list(zip(axes, tables, head_slices(tables, dim), strict=True))


def _width(call: AttentionCall) -> int:
    """Returns the head dimension with those of all axes, as PyTorch's kernel wants it."""
    axes = [m.key_axis for m in call.maps if m.key_axis is not None]
    sizes = sum(axis.grid[axis.axis] + 1 for axis in axes)
    scores = sum(map(bool, (call.query_tables, call.key_tables)))
    width = call.q.shape[-1] + sizes * max(scores, int(bool(call.value_tables)))
    return math.ceil(width / _MULTIPLE) * _MULTIPLE


def _side_by_side(parts: list[Tensor], width: int) -> Tokens:
    joined = torch.cat(parts, dim=-1)
    return F.pad(joined, (0, width - joined.shape[-1]))
