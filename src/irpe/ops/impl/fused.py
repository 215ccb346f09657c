"""The efficient form with a forward and a backward of its own, in blocks of pairs.

For a large image nothing of size (heads, n, n) exists: the weights live block by block and are
computed again in the backward pass. Where they are small, they are kept instead. Only lookups and
bucket sums happen inside a block; the products with the tables, n k d operations, happen once.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from irpe.core.buckets import BucketMap
from irpe.ops.blockwise import Blockwise
from irpe.ops.lookup import accumulation_dtype
from irpe.ops.precision import without_autocast
from irpe.ops.shapes import Mask, Tokens
from irpe.ops.tables import Tables


def attention(
    q: Tokens,
    k: Tokens,
    v: Tokens,
    maps: tuple[BucketMap, ...],
    tables: Tables,
    attn_mask: Mask | None,
    dropout_p: float,
    scale: float,
) -> Tokens:
    """Returns what the reference returns."""
    used = tables.used(maps)
    ids = [bucket_map.compact_ids for bucket_map in maps]
    seed = torch.randint(2**62, ()) if dropout_p else None
    roles = [list(role) for role in (used.query, used.key, used.value, used.bias)]
    out, _ = fused_attention(
        q, k, v, *roles, ids, attn_mask, seed, dropout_p, scale, *_repeats(maps),
        _keeps_weights(q, k, v, used),
    )  # fmt: skip
    return out


def _repeats(maps: tuple[BucketMap, ...]) -> tuple[list[int], list[Tensor]]:
    """Returns the grid and the distinct rows of the map, or nothing where no buckets repeat."""
    first, grid = maps[0], list(maps[0].grid or ())
    if len(maps) == 1 and first.row_ids is not None and first.row_numbers is not None:
        return grid, [first.row_ids, first.row_numbers]
    axes = [(m.axis, m.grid) for m in maps]
    is_by_axis = axes == [(number, first.grid) for number in range(len(grid))]
    return grid if is_by_axis else [], []


def _keeps_weights(q: Tensor, k: Tensor, v: Tensor, tables: Tables) -> bool:
    """Keeps the weights for a backward pass if they take no more than q, k, v and the output."""
    tensors = (q, k, v, *tables.query, *tables.key, *tables.value, *tables.bias)
    is_training = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return is_training and q.shape[2] <= 4 * q.shape[3]


@torch.library.custom_op("irpe::attention", mutates_args=())
def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_tables: Sequence[Tensor],
    key_tables: Sequence[Tensor],
    value_tables: Sequence[Tensor],
    bias_tables: Sequence[Tensor],
    ids: Sequence[Tensor],
    attn_mask: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    scale: float,
    grid: Sequence[int],
    rows: Sequence[Tensor],
    keeps_weights: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the output, and the weights if they are to be kept, else an empty tensor."""
    tables = Tables(tuple(query_tables), tuple(key_tables), tuple(value_tables), tuple(bias_tables))
    call = Blockwise(q, k, v, tables, ids, attn_mask, seed, dropout_p, scale, grid, rows)
    return call.forward(keeps_weights)


@fused_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    keeps_weights = args[-1]
    shape = (*q.shape[:3], k.shape[2]) if keeps_weights else (0,)
    batch, heads, tokens, dim = v.shape
    out = v.new_empty(batch, tokens, heads, dim).transpose(1, 2)
    return out, q.new_empty(shape, dtype=accumulation_dtype(q.dtype))


@torch.library.custom_op("irpe::attention_backward", mutates_args=())
def fused_attention_backward(
    grad: Tensor,
    weights: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_tables: Sequence[Tensor],
    key_tables: Sequence[Tensor],
    value_tables: Sequence[Tensor],
    bias_tables: Sequence[Tensor],
    ids: Sequence[Tensor],
    attn_mask: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    scale: float,
    grid: Sequence[int],
    rows: Sequence[Tensor],
    mask_needs_grad: bool,
) -> list[Tensor]:
    """Returns the gradients of q, k, v, of all tables in order, and of the mask if it needs one."""
    tables = Tables(tuple(query_tables), tuple(key_tables), tuple(value_tables), tuple(bias_tables))
    call = Blockwise(q, k, v, tables, ids, attn_mask, seed, dropout_p, scale, grid, rows)
    with without_autocast(q):  # a backward pass may run inside autocast
        return call.backward(grad, weights, mask_needs_grad)


@fused_attention_backward.register_fake
def _(
    grad: Tensor,
    weights: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_tables: Sequence[Tensor],
    key_tables: Sequence[Tensor],
    value_tables: Sequence[Tensor],
    bias_tables: Sequence[Tensor],
    ids: Sequence[Tensor],
    attn_mask: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    scale: float,
    grid: Sequence[int],
    rows: Sequence[Tensor],
    mask_needs_grad: bool,
) -> list[Tensor]:
    inputs = [q, k, v, *query_tables, *key_tables, *value_tables, *bias_tables]
    if mask_needs_grad and attn_mask is not None:
        inputs.append(attn_mask)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, query, key, value, bias, ids, attn_mask, seed, dropout_p, scale, grid, rows, _ = inputs
    ctx.set_materialize_grads(False)  # no zeros of the size of the weights, which have no gradient
    groups = (query, key, value, bias, ids, rows)
    ctx.lengths = [len(group) for group in groups]
    ctx.dropout_p, ctx.scale, ctx.grid = dropout_p, scale, grid
    ctx.save_for_backward(output[1], attn_mask, seed, q, k, v, *itertools.chain(*groups))


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    weights, attn_mask, seed, q, k, v, *rest = ctx.saved_tensors
    grad = torch.zeros_like(v) if grad is None else grad
    query, key, value, bias, ids, rows = _split(rest, ctx.lengths)
    mask_needs_grad = attn_mask is not None and ctx.needs_input_grad[8]
    gradients = fused_attention_backward(
        grad, weights, q, k, v, query, key, value, bias, ids, attn_mask, seed,
        ctx.dropout_p, ctx.scale, ctx.grid, rows, mask_needs_grad,
    )  # fmt: skip
    dq, dk, dv, *rest = gradients
    *tables, left = _split(rest, [*ctx.lengths[:4], len(rest)])
    of_grid = None if ctx.grid else []  # an empty list counts as one of tensors
    of_ids, of_rows = [None] * len(ids), [None] * len(rows)
    of_mask = left[0] if left else None
    return dq, dk, dv, *tables, of_ids, of_mask, None, None, None, of_grid, of_rows, None


def _split(items: Sequence[Tensor], lengths: Sequence[int]) -> list[list[Tensor]]:
    iterator = iter(items)
    return [list(itertools.islice(iterator, length)) for length in lengths]


fused_attention.register_autograd(_backward, setup_context=_save)
