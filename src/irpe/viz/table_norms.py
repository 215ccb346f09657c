"""The rows of the learned tables as the positions that they stand for.

Positions are those of the key, seen from the query: right and below are positive.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from irpe.core.encodings import Joined
from irpe.core.encodings.spec import RPESpec
from irpe.core.index import Clip, Index
from irpe.core.methods import METHODS
from irpe.errors import UserError
from irpe.nn.tables import RelativePositionEncoding

ROLES = ("query", "key", "value", "bias")
_AXES = ("rows", "columns")
_FARTHEST = 128  # patches: tables are laid out up to there


@dataclass(frozen=True)
class TableNorms:
    """How long the vectors of a table are, one value for each bucket.

    Args:
        values: The norm of each row, the mean of all heads; the value itself for a bias that the
            heads share. Two axes for the product method, one for the others.
        positions: For each axis the position or the distance nearest to the query that a bucket
            stands for, NaN if it stands for none.
        prefix: The norm of the prefix row, if there is one.
        is_signed: Whether the values may be negative.
    """

    values: Float[Tensor, "*buckets"]
    positions: tuple[float, ...]
    prefix: float | None
    is_signed: bool


def table_norms(encoding: RelativePositionEncoding) -> dict[str, TableNorms]:
    """Returns the norms of each table of an encoding, by its role and, if it has several, its axis.

    Args:
        encoding: The encoding, for grids of at most two axes.
    """
    if encoding.ndim > 2:
        raise UserError(f"the tables are for {encoding.ndim} axes: a picture has one or two")
    norms: dict[str, TableNorms] = {}
    for role in ROLES:
        tables = [table.detach().float().cpu() for table in getattr(encoding, f"{role}_tables")]
        for table, axis in zip(tables, _AXES, strict=False):
            name = f"{role}, {axis}" if len(tables) > 1 else role
            norms[name] = _norms(encoding, table)
    if not norms:
        why = "it rotates queries and keys" if encoding.spec.method is None else "they are computed"
        raise UserError(
            f"the encoding {encoding.spec} has no learned tables to draw, {why}: see what it does "
            "with irpe show weights, attention or locality"
        )
    return norms


def _norms(encoding: RelativePositionEncoding, table: Tensor) -> TableNorms:
    is_signed = table.ndim == 2 and len(table) == 1
    rows = table[0] if is_signed else _length(table).mean(0)
    prefix = float(rows[-1]) if encoding.num_prefix_tokens else None
    rows = rows[:-1] if encoding.num_prefix_tokens else rows
    method = encoding.spec.method
    if method == "product":
        side = round(len(rows) ** (1 / encoding.ndim))
        rows = rows.view((side,) * encoding.ndim)
    if method in ("product", "cross"):
        rows = rows.flip(tuple(range(rows.ndim)))  # from query minus key to key minus query
    return TableNorms(rows, _positions(encoding, rows.shape[0]), prefix, is_signed)


def _length(table: Tensor) -> Tensor:
    return table.abs() if table.ndim == 2 else table.norm(dim=-1)


def _positions(encoding: RelativePositionEncoding, count: int) -> tuple[float, ...]:
    spec = encoding.spec.tables if isinstance(encoding.spec, Joined) else encoding.spec
    index: Index = spec.index_function if isinstance(spec, RPESpec) else Clip(max(count // 2, 1))
    reach = min(math.ceil(index.saturation) + 1, _FARTHEST)
    along = torch.arange(reach + 1)
    if spec.method in ("product", "cross"):
        far = _nearest(index(along), along.double(), count // 2 + 1)
        return (*(-x for x in reversed(far[1:])), *far)
    offsets = torch.cartesian_prod(along, along) if encoding.ndim == 2 else along[:, None]
    assert spec.method is not None  # it has tables
    (ids,) = METHODS[spec.method].ids(offsets, index)
    return tuple(_nearest(ids, offsets.double().norm(dim=-1), count))


def _nearest(ids: Tensor, distances: Tensor, count: int) -> list[float]:
    """Returns the smallest distance of each bucket, NaN where it has none."""
    nearest = torch.full((count,), math.inf, dtype=torch.float64)
    nearest.scatter_reduce_(0, ids, distances, "amin")
    return nearest.masked_fill(nearest.isinf(), math.nan).tolist()
