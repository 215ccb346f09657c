"""Products with a table of vectors, shared by all heads or one for each."""

from jaxtyping import Float
from torch import Tensor

from irpe.ops.precision import cast, product
from irpe.ops.shapes import Tokens, VectorTable

Sums = Float[Tensor, "batch heads tokens rows"]


def table_matrix(table: VectorTable) -> Float[Tensor, "*heads rows dim"]:
    """Returns a shared table as a matrix: products with it are then one large product."""
    return table[0] if table.shape[0] == 1 else table


def table_gradient(sums: Sums, x: Tokens, table: VectorTable, scale: float) -> VectorTable:
    """Returns the gradient of a table: for each row the tokens, weighted by their sums.

    Args:
        sums: For each token, the sums of its pairs' gradients for each row.
        x: The tokens that the table meets.
        table: The table.
        scale: A factor of the result.
    """
    sums = cast(sums, x.dtype)
    if table.shape[0] == 1:
        return product(sums.flatten(0, 2).mT, x.flatten(0, 2), scale).unsqueeze(0)
    sums, x = (t.transpose(0, 1).flatten(1, 2) for t in (sums, x))  # heads, batch tokens, ...
    return product(sums.mT, x, scale)
