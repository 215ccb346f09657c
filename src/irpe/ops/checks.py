"""Errors for arguments that do not fit together, raised before anything is computed."""

import math

import torch
from torch import Tensor

from irpe.core.buckets import BucketMap
from irpe.errors import UserError, UserTypeError
from irpe.ops.call import AttentionCall, Tables


def check_arguments(call: AttentionCall) -> None:
    """Raises an error that names the first argument which does not fit the others."""
    _check_tokens(call)
    _check_maps(call.maps, call)
    for name, role in zip(("query", "key", "value", "bias"), call.tables.roles(), strict=True):
        _check_tables(f"{name}_tables", role, call, is_vector=name != "bias")
    if call.mask is not None:
        _check_mask(call.mask, call)
    if not 0.0 <= call.dropout_p < 1.0:
        raise UserError(f"dropout_p = {call.dropout_p!r} must be at least 0 and less than 1")
    if not math.isfinite(call.scale):
        raise UserError(f"scale = {call.scale!r} must be finite; None takes 1 / sqrt(dim)")


def check_has_tables(tables: Tables) -> None:
    """Raises an error if there is no table at all."""
    if not tables.all():
        raise UserError(
            "no tables: pass query_tables, key_tables, value_tables or bias_tables; attention "
            "without an encoding is torch.nn.functional.scaled_dot_product_attention"
        )


def _check_tokens(call: AttentionCall) -> None:
    q, k = call.q, call.k
    if q.ndim != 4:
        raise UserError(
            f"q of shape {_shape(q)} is not (batch, heads, tokens, dim): split the heads first"
        )
    if not q.is_floating_point():
        raise UserTypeError(f"q is {q.dtype}: queries, keys and values are floating-point tensors")
    if k.ndim != 4 or (*k.shape[:2], k.shape[3]) != (*q.shape[:2], q.shape[3]):
        raise UserError(
            f"k of shape {_shape(k)} does not fit q of shape {_shape(q)}: they may differ in the "
            "number of tokens alone"
        )
    for name, other, like, of in (
        ("v", call.v, k, "k"),
        ("table_q", call.table_q, q, "q"),
        ("table_k", call.table_k, k, "k"),
    ):
        if other.shape != like.shape:
            raise UserError(
                f"{name} of shape {_shape(other)} differs from {of} of shape {_shape(like)}: they "
                "have one shape"
            )
    others = (("k", k), ("v", call.v), ("table_q", call.table_q), ("table_k", call.table_k))
    for name, other in others:
        if other.dtype != q.dtype:
            raise UserTypeError(f"{name} is {other.dtype} but q is {q.dtype}: cast one of them")
        _check_device(name, other, q)


def _check_maps(maps: tuple[BucketMap, ...], call: AttentionCall) -> None:
    if not maps and call.tables.all():
        raise UserError("maps is empty: pass the maps that irpe.bucket_maps(spec, grid) returns")
    batch, _, queries, _ = call.q.shape
    keys = call.k.shape[2]
    for bucket_map in maps:
        *of_batch, rows, columns = bucket_map.compact_ids.shape
        if (rows, columns) != (queries, keys):
            has = f"{queries}" if queries == keys else f"{queries} queries and {keys} keys"
            of = f"{rows} tokens" if rows == columns else f"{rows} queries and {columns} keys"
            raise UserError(
                f"the grid of the maps has {of} but q has {has}: pass the grid of this input, and "
                "the number of its prefix tokens"
            )
        if of_batch and of_batch != [batch]:
            raise UserError(
                f"the maps are for a batch of {of_batch[0]} but q has {batch} images: make them "
                "for this batch"
            )
        _check_device("maps", bucket_map.compact_ids, call.q)


def _check_tables(
    name: str, tables: tuple[Tensor, ...], call: AttentionCall, is_vector: bool
) -> None:
    if not tables:
        return
    maps = call.maps
    if len(tables) != len(maps):
        raise UserError(f"{name} holds {len(tables)} tables for {len(maps)} maps: one for each")
    heads, dim = call.q.shape[1], call.q.shape[3]
    splits_head = is_vector and sum(table.shape[-1] for table in tables) == dim
    for table, bucket_map in zip(tables, maps, strict=True):
        if not torch.compiler.is_compiling() and hasattr(table, "full_tensor"):  # a DTensor
            raise UserTypeError(
                f"{name} holds a table that is sharded between processes: give fully_shard a "
                "module that is called, fully_shard(attention.rpe), its attention or its block, "
                "and call that"
            )
        width = table.shape[-1] if splits_head else dim
        rest = (bucket_map.num_buckets, width) if is_vector else (bucket_map.num_buckets,)
        if table.shape not in ((1, *rest), (heads, *rest)):
            raise UserError(
                f"{name} holds a table of shape {_shape(table)}; for {heads} heads and these maps "
                f"it must be {(1, *rest)} or {(heads, *rest)}"
            )
        if not table.is_floating_point():
            raise UserTypeError(f"{name} holds a table of {table.dtype}: tables are floating-point")
        _check_device(name, table, call.q)


def _check_mask(mask: Tensor, call: AttentionCall) -> None:
    pairs = (*call.q.shape[:3], call.k.shape[2])
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
    _check_device("attn_mask", mask, call.q)


def _check_device(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.device != q.device:
        raise UserError(
            f"{name} on {tensor.device} but q on {q.device}: move one of them, for maps with "
            "irpe.bucket_maps(..., device=q.device)"
        )


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
