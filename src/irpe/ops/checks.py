"""From arguments to a checked call: errors for what does not fit, before anything is computed."""

import math
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn

from irpe.core.bucket_map import BucketMap
from irpe.errors import UserError, UserTypeError
from irpe.ops.call import AttentionCall
from irpe.ops.precision import cast, compute_dtype
from irpe.ops.shapes import Keys, Mask, ScalarTable, Tokens, VectorTable


def check_call(
    q: Tokens,
    k: Keys,
    v: Keys,
    maps: Sequence[BucketMap],
    *,
    query_tables: Sequence[VectorTable] | None = None,
    key_tables: Sequence[VectorTable] | None = None,
    value_tables: Sequence[VectorTable] | None = None,
    bias_tables: Sequence[ScalarTable] | None = None,
    attn_mask: Mask | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    table_q: Tokens | None = None,
    table_k: Keys | None = None,
    dtype: torch.dtype | None = None,
) -> AttentionCall:
    """Returns the call, or raises an error that names the first argument that does not fit.

    Arguments as in `rpe_attention`. `dtype` is what is computed in; as `None` the dtype in which
    `scaled_dot_product_attention` would compute, also under autocast.
    """
    _check_tokens(q, k, v, table_q, table_k)
    shape, keys = q.shape, k.shape[2]
    maps = tuple(maps)
    for bucket_map in maps:
        _check_map(bucket_map, q, keys)
    dtype = compute_dtype(q) if dtype is None else dtype
    of_query, of_key, of_value, of_bias = [
        () if tables is None or not len(tables) else _rows_in_use(name, tables, maps, q, dtype)
        for name, tables in (
            ("query_tables", query_tables),
            ("key_tables", key_tables),
            ("value_tables", value_tables),
            ("bias_tables", bias_tables),
        )
    ]
    if table_q is not None and not of_key:
        raise UserError("table_q without key_tables changes nothing: leave table_q out")
    if table_k is not None and not of_query:
        raise UserError("table_k without query_tables changes nothing: leave table_k out")
    if attn_mask is not None:
        _check_mask(attn_mask, (*shape[:3], keys), q)
        attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
        attn_mask = attn_mask if attn_mask.dtype == torch.bool else cast(attn_mask, dtype)
    if not 0.0 <= dropout_p < 1.0:
        raise UserError(f"dropout_p = {dropout_p!r} must be at least 0 and less than 1")
    factor = shape[3] ** -0.5 if scale is None else float(scale)
    if scale is not None and not -math.inf < factor < math.inf:
        raise UserError(f"scale = {scale!r} must be finite; None takes 1 / sqrt(dim)")
    if q.dtype != dtype:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        table_q = None if table_q is None else table_q.to(dtype)
        table_k = None if table_k is None else table_k.to(dtype)
    return AttentionCall(
        q,
        k,
        v,
        table_q,
        table_k,
        attn_mask,
        of_query,
        of_key,
        of_value,
        of_bias,
        maps,
        factor,
        dropout_p,
        torch.randint(2**62, ()) if dropout_p else None,
    )


def check_has_tables(call: AttentionCall) -> None:
    """Raises an error if there is no table at all."""
    if not (call.query_tables or call.key_tables or call.value_tables or call.bias_tables):
        raise UserError(
            "no tables: pass query_tables, key_tables, value_tables or bias_tables; attention "
            "without an encoding is torch.nn.functional.scaled_dot_product_attention"
        )


def _check_tokens(
    q: Tensor, k: Tensor, v: Tensor, table_q: Tensor | None, table_k: Tensor | None
) -> None:
    shape, of_keys = q.shape, k.shape
    if len(shape) != 4:
        raise UserError(
            f"q of shape {_shape(q)} is not (batch, heads, tokens, dim): split the heads first"
        )
    if not q.is_floating_point():
        raise UserTypeError(f"q is {q.dtype}: queries, keys and values are floating-point tensors")
    if len(of_keys) != 4 or of_keys[:2] != shape[:2] or of_keys[3] != shape[3]:
        raise UserError(
            f"k of shape {_shape(k)} does not fit q of shape {_shape(q)}: they may differ in the "
            "number of tokens alone"
        )
    others = [("k", k, k, "k"), ("v", v, k, "k")]
    if table_q is not None:
        others.append(("table_q", table_q, q, "q"))
    if table_k is not None:
        others.append(("table_k", table_k, k, "k"))
    dtype, device = q.dtype, q.device
    for name, other, like, of in others:
        if other.shape != like.shape:
            raise UserError(
                f"{name} of shape {_shape(other)} differs from {of} of shape {_shape(like)}: they "
                "have one shape"
            )
        if other.dtype != dtype:
            raise UserTypeError(f"{name} is {other.dtype} but q is {dtype}: cast one of them")
        if other.device != device:
            _raise_device(name, other, q)


def _check_map(bucket_map: BucketMap, q: Tensor, keys: int) -> None:
    ids, queries = bucket_map.compact_ids, q.shape[2]
    rows, columns = ids.size(-2), ids.size(-1)  # of a constant, a compiler knows no shape
    if rows != queries or columns != keys:
        has = f"{queries}" if queries == keys else f"{queries} queries and {keys} keys"
        of = f"{rows} tokens" if rows == columns else f"{rows} queries and {columns} keys"
        raise UserError(
            f"the grid of the maps has {of} but q has {has}: pass the grid of this input, and "
            "the number of its prefix tokens"
        )
    if ids.ndim == 3 and ids.size(0) != q.shape[0]:
        raise UserError(
            f"the maps are for a batch of {ids.size(0)} but q has {q.shape[0]} images: make them "
            "for this batch"
        )
    if ids.device != q.device:
        _raise_device("maps", ids, q)


def _rows_in_use(
    name: str,
    tables: Sequence[Tensor],
    maps: tuple[BucketMap, ...],
    q: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Returns the rows in use of checked tables, in a dtype."""
    if isinstance(tables, Tensor):
        raise UserTypeError(
            f"{name} is one tensor of shape {_shape(tables)}: pass a list with one table for each "
            "map, such as [table]"
        )
    if not maps:
        raise UserError("maps is empty: pass the maps that irpe.bucket_maps(spec, grid) returns")
    if len(tables) != len(maps):
        raise UserError(f"{name} holds {len(tables)} tables for {len(maps)} maps: one for each")
    heads, dim, is_vector = q.shape[1], q.shape[3], name != "bias_tables"
    splits_head = is_vector and len(tables) > 1 and sum(x.shape[-1] for x in tables) == dim
    found: list[Tensor] = []
    for table, bucket_map in zip(tables, maps, strict=True):
        is_plain = type(table) is nn.Parameter or type(table) is Tensor
        if not is_plain and not torch.compiler.is_compiling() and hasattr(table, "full_tensor"):
            raise UserTypeError(
                f"{name} holds a table that is sharded between processes: give fully_shard a "
                "module that is called, fully_shard(attention.rpe), its attention or its block, "
                "and call that"
            )
        shape, rows = table.size(), bucket_map.num_buckets
        width = (table.size(-1) if splits_head else dim,) if is_vector else ()
        if shape != (1, rows, *width) and shape != (heads, rows, *width):
            raise UserError(
                f"{name} holds a table of shape {_shape(table)}; for {heads} heads and these maps "
                f"it must be {(1, rows, *width)} or {(heads, rows, *width)}"
            )
        if not table.is_floating_point():
            raise UserTypeError(f"{name} holds a table of {table.dtype}: tables are floating-point")
        if table.device != q.device:
            _raise_device(name, table, q)
        if bucket_map.num_used_buckets != rows:
            table = table.index_select(1, bucket_map.used_rows)
        found.append(table if table.dtype == dtype else table.to(dtype))
    return tuple(found)


def _check_mask(mask: Tensor, pairs: tuple[int, ...], q: Tensor) -> None:
    fits = mask.ndim <= 4 and all(
        size in (1, full) for size, full in zip(reversed(mask.shape), reversed(pairs), strict=False)
    )
    if not fits:
        raise UserError(
            f"attn_mask of shape {_shape(mask)} cannot be broadcast to (batch, heads, queries, "
            f"keys) = {pairs}"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise UserTypeError(
            f"attn_mask is {mask.dtype}: pass booleans, True where a key takes part, or scores to "
            "add"
        )
    if mask.device != q.device:
        _raise_device("attn_mask", mask, q)


def _raise_device(name: str, tensor: Tensor, q: Tensor) -> NoReturn:
    raise UserError(
        f"{name} on {tensor.device} but q on {q.device}: move one of them, for maps with "
        "irpe.bucket_maps(..., device=q.device)"
    )


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
