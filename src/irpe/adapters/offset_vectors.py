"""Decomposed encodings of hosts (SAM, ViTDet) as tables of ours, which compute the same.

Such a host learns a vector R for each offset of each axis and adds q_i R^row + q_i R^column to the
scores *after* scaling them, from a tensor with an element for each pair of tokens. That is
`cross-contextual-k` with a table row for every offset, where the tables are R sqrt(d); no such
tensor is made.

Exact on the grid that the host was made for. On other grids the host interpolates its vectors,
while a table row belongs to an offset on every grid.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from irpe.core.encodings import AnyEncoding, RPESpec
from irpe.core.index import Index
from irpe.errors import UserError
from irpe.nn.tables import RelativePositionEncoding

OffsetVectors = Float[Tensor, "offsets dim"]  # of one axis: the offsets 1 - size, ..., size - 1


def convert_decomposed(
    attention: nn.Module, names: Sequence[str], encoding: RelativePositionEncoding
) -> None:
    """Copies the vectors of an attention, rows first, into the key tables of its encoding."""
    vectors = [attention.get_parameter(name) for name in names]
    check_convertible(encoding.spec, [(len(rows) + 1) // 2 for rows in vectors])
    index = _index_of(encoding.spec)
    with torch.no_grad():
        for table, rows in zip(encoding.key_tables, vectors, strict=True):
            table.copy_(table_of(rows, index).expand_as(table))


def grid_of_vectors(attention: nn.Module, names: Sequence[str]) -> tuple[int, ...] | None:
    """Returns the grid that an attention has vectors for; `None` if it has none."""
    vectors = [attention._parameters.get(name) for name in names]
    sizes = [(len(each) + 1) // 2 for each in vectors if each is not None]
    return tuple(sizes) if len(sizes) == len(vectors) else None


def table_of(vectors: OffsetVectors, index: Index) -> Float[Tensor, "buckets dim"]:
    """Returns the table of one axis; its rows beyond the host's offsets repeat the outermost."""
    farthest = (len(vectors) - 1) // 2
    offsets = torch.arange(-farthest, farthest + 1, device="cpu")  # also on the meta device
    table = torch.empty(2 * index.max_index + 1, vectors.shape[1]).to(vectors)
    buckets = index(offsets) + index.max_index
    first, last = int(buckets[0]), int(buckets[-1])
    table[: first + 1], table[last:] = vectors[0], vectors[-1]
    table[buckets.to(table.device)] = vectors
    return table * vectors.shape[1] ** 0.5


def check_convertible(spec: AnyEncoding, grid: Sequence[int]) -> None:
    """Raises an error unless an encoding can hold vectors for every offset of a grid."""
    farthest = max(grid) - 1
    is_held = False
    if isinstance(spec, RPESpec) and (spec.method, spec.mode) == ("cross", "contextual"):
        buckets = spec.index_function(torch.arange(farthest + 1, device="cpu"))
        is_exact = len(buckets.unique()) == farthest + 1
        is_held = is_exact and "k" in spec.targets and not spec.tied
    if not is_held:
        raise UserError(
            f"builtin_bias 'convert': encoding '{spec}' cannot hold the host's own encoding, a "
            f"vector for each offset of up to {farthest} rows or columns: use "
            f"'cross-contextual-k@clip{max(farthest, 1)}'"
        )


def _index_of(spec: AnyEncoding) -> Index:
    assert isinstance(spec, RPESpec)
    return spec.index_function
