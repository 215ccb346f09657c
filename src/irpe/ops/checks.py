"""Errors for arguments that do not fit together, raised before anything is computed."""

import torch
from torch import Tensor

from irpe.core.buckets import BucketMap
from irpe.ops.tables import Tables


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    maps: tuple[BucketMap, ...],
    tables: Tables,
    attn_mask: Tensor | None,
    dropout_p: float,
) -> None:
    """Raises an error that names the first argument which does not fit the others."""
    _check_tokens(q, k, v)
    _check_maps(maps, q)
    for name, role in zip(("query", "key", "value", "bias"), tables.roles(), strict=True):
        _check_tables(f"{name}_tables", role, maps, q, is_vector=name != "bias")
    if attn_mask is not None:
        _check_mask(attn_mask, q)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p = {dropout_p!r} must be at least 0 and less than 1")


def _check_tokens(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.ndim != 4:
        raise ValueError(
            f"q of shape {_shape(q)} is not (batch, heads, tokens, dim): split the heads first"
        )
    for name, other in (("k", k), ("v", v)):
        if other.shape != q.shape:
            raise ValueError(
                f"{name} of shape {_shape(other)} differs from q of shape {_shape(q)}: an encoding "
                "relates the tokens of one grid to each other, so q, k and v have one shape"
            )
        if other.dtype != q.dtype:
            raise TypeError(f"{name} is {other.dtype} but q is {q.dtype}: cast one of them")


def _check_maps(maps: tuple[BucketMap, ...], q: Tensor) -> None:
    if not maps:
        raise ValueError("maps is empty: pass the maps that irpe.bucket_maps(spec, grid) returns")
    tokens = q.shape[2]
    for bucket_map in maps:
        if bucket_map.ids.shape != (tokens, tokens):
            raise ValueError(
                f"the grid of the maps has {bucket_map.ids.shape[0]} tokens but q has {tokens}: "
                "pass the grid of this input, and the number of its prefix tokens"
            )


def _check_tables(
    name: str, tables: tuple[Tensor, ...], maps: tuple[BucketMap, ...], q: Tensor, is_vector: bool
) -> None:
    if not tables:
        return
    if len(tables) != len(maps):
        raise ValueError(f"{name} holds {len(tables)} tables for {len(maps)} maps: one for each")
    heads, dim = q.shape[1], q.shape[3]
    are_shares = sum(table.shape[-1] for table in tables) == dim
    for table, bucket_map in zip(tables, maps, strict=True):
        width = table.shape[-1] if are_shares else dim
        rest = (bucket_map.num_buckets, width) if is_vector else (bucket_map.num_buckets,)
        if table.shape not in ((1, *rest), (heads, *rest)):
            raise ValueError(
                f"{name} holds a table of shape {_shape(table)}; for {heads} heads and these maps "
                f"it must be {(1, *rest)} or {(heads, *rest)}"
            )


def _check_mask(mask: Tensor, q: Tensor) -> None:
    pairs = (q.shape[0], q.shape[1], q.shape[2], q.shape[2])
    fits = mask.ndim <= 4 and all(
        size in (1, full) for size, full in zip(reversed(mask.shape), reversed(pairs), strict=False)
    )
    if not fits:
        raise ValueError(
            f"attn_mask of shape {_shape(mask)} cannot be broadcast to (batch, heads, tokens, "
            f"tokens) = {pairs}"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"attn_mask is {mask.dtype}: pass booleans, True where a key takes part, or numbers to "
            "add to the scores"
        )


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
