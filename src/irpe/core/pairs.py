"""The bucket of every pair of positions, without an offset for each pair at once."""

import torch
from jaxtyping import Integer
from torch import Tensor

from irpe.core.index import Index
from irpe.core.methods import METHODS
from irpe.core.positions import Positions

_PAIRS_AT_ONCE = 2**18  # bounds the offsets, 8 bytes for each axis, that exist at a time


def ids_of_pairs(
    method: str,
    index: Index,
    positions: Positions,
    prefix_ids: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
) -> tuple[Integer[Tensor, "*batch query key"], ...]:
    """Returns the table row of every pair, for each table of a method.

    Args:
        method: The name of the method.
        index: From distance to bucket.
        positions: Where queries and keys are.
        prefix_ids: For each table, the row of pairs with a prefix token.
        dtypes: For each table, an integer type that holds its rows.
    """
    queries, keys = positions.places()
    device = keys.device if keys.device.type != "cpu" else queries.device
    queries, keys = queries.to(device), keys.to(device)
    before = positions.prefixes
    lead = () if positions.batch is None else (positions.batch,)
    shape = (*lead, *positions.num_tokens)
    found = tuple(
        torch.full(shape, row, dtype=dtype, device=device)
        for row, dtype in zip(prefix_ids, dtypes, strict=True)
    )
    step = max(1, _PAIRS_AT_ONCE // (keys.shape[-2] * (positions.batch or 1)))
    for start in range(0, queries.shape[-2], step):
        part = queries[..., start : start + step, :]
        offsets = part.unsqueeze(-2) - keys.unsqueeze(-3)
        rows = slice(before[0] + start, before[0] + start + part.shape[-2])
        for ids, of_part in zip(found, METHODS[method].ids(offsets, index), strict=True):
            ids[..., rows, before[1] :] = of_part.to(ids.dtype)
    return found
