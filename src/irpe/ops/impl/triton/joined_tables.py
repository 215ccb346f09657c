"""The tables of a role as one: their rows one after the other, as wide as a head."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor

from irpe.ops.call import head_slices
from irpe.ops.precision import cast, product, product_dtype
from irpe.ops.shapes import ScalarTable, Tokens, VectorTable
from irpe.ops.table_products import table_gradient, table_matrix

RowSums = Float[Tensor, "batch heads rows tokens"]


def join_tables(tables: Sequence[Tensor]) -> Tensor | None:
    """Returns tables in one, the rows of the first map first; one for each head if any is."""
    if not tables:
        return None
    heads = max(table.shape[0] for table in tables)
    same = [table.expand(heads, *table.shape[1:]) for table in tables]
    return torch.cat(same, dim=1) if len(same) > 1 else same[0].contiguous()


def join_role(tables: Sequence[VectorTable], dim: int) -> VectorTable | None:
    """Returns the vector tables of a role in one, zeros where a table has no dimensions."""
    starts = [dims.start or 0 for dims in head_slices(tables, dim)]
    return join_tables(
        [
            F.pad(table, (start, dim - start - table.shape[-1]))
            for table, start in zip(tables, starts, strict=True)
        ]
    )


def row_products(x: Tokens, table: VectorTable) -> Float[Tensor, "batch heads tokens rows"]:
    """Returns z of each token and row, Eq. 27, in float32."""
    dtype = product_dtype(x.dtype, x.device)
    return product(cast(x, dtype), table_matrix(cast(table, dtype)).mT)


def split_gradient(
    sums: RowSums, x: Tokens, tables: Sequence[VectorTable], scale: float
) -> list[VectorTable]:
    """Returns the gradient of each table of a role, in float32.

    Args:
        sums: For each row and token, the sums of its pairs' gradients.
        x: The tokens that the tables meet.
        tables: The tables.
        scale: A factor of the result.
    """
    joined = join_role(tables, x.shape[-1])
    if joined is None:
        return []
    x = cast(x, product_dtype(x.dtype, x.device))
    found = table_gradient(sums.mT, x, joined, scale)
    parts = found.split([table.shape[1] for table in tables], dim=1)
    slices = head_slices(tables, x.shape[-1])
    return [
        part[..., dims].sum_to_size(table.shape).clone()  # what an operator returns is its own
        for part, dims, table in zip(parts, slices, tables, strict=True)
    ]


def split_bias_gradient(
    sums: RowSums, tables: Sequence[ScalarTable], scale: float
) -> list[ScalarTable]:
    """Returns the gradient of each bias table, in float32."""
    if not tables:
        return []
    parts = (sums.sum((0, 3)) * scale).split([table.shape[1] for table in tables], dim=1)
    return [
        part.sum_to_size(table.shape).clone() for part, table in zip(parts, tables, strict=True)
    ]
