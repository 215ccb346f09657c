"""Two primitives carry every forward and backward: gather a score per pair, and sum pairs up.

They are each other's adjoint. A pair (i, j) uses bucket I(i, j) of its owner, which is

- the query for z_{i, I(i, j)}, Eq. 28;
- the key for z_{j, I(i, j)}, the same for the other token;
- nobody for a bias: one set of buckets for all pairs.

Both are plain operators: any exporter, compiler and transform of PyTorch knows them.
"""

from typing import Literal

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from irpe.ops.precision import accumulation_dtype, cast
from irpe.ops.shapes import ScalarTable

Owner = Literal["query", "key", "nobody"]
Values = Float[Tensor, "*batch owners buckets"]
Pairs = Float[Tensor, "*batch query key"]


def gather(values: Values, ids: Integer[Tensor, "*#batch query key"], owner: Owner) -> Pairs:
    """Returns the value of each pair.

    Args:
        values: One element for each owner and bucket.
        ids: The bucket of each pair; with batch axes that broadcast to those of `values`, or none.
        owner: Whose bucket it is.
    """
    if owner == "query":
        return torch.gather(values, -1, ids.long().expand(*values.shape[:-1], ids.shape[-1]))
    batch, (queries, keys) = values.shape[:-2], ids.shape[-2:]
    index = _flat_ids(ids, values.shape[-1], owner).expand(*batch, queries * keys)
    return torch.gather(values.flatten(-2), -1, index).view(*batch, queries, keys)


def bucket_sum(
    pairs: Pairs, ids: Integer[Tensor, "*#batch query key"], num_buckets: int, owner: Owner
) -> Values:
    """Returns the sum of the pairs in each bucket, in float32 at least.

    Args:
        pairs: One element for each pair.
        ids: The bucket of each pair; with batch axes that broadcast to those of `pairs`, or none.
        num_buckets: How many buckets an owner has.
        owner: Whose bucket it is.
    """
    *batch, queries, keys = pairs.shape
    owners = {"query": queries, "key": keys, "nobody": 1}[owner]
    dtype = accumulation_dtype(pairs.dtype)
    pairs = cast(pairs, dtype)
    sums = pairs.new_zeros(*batch, owners, num_buckets)
    if owner == "query":
        return sums.scatter_add(-1, ids.long().expand(pairs.shape), pairs)
    index = _flat_ids(ids, num_buckets, owner).expand(*batch, queries * keys)
    return sums.flatten(-2).scatter_add(-1, index, pairs.flatten(-2)).view(sums.shape)


def add_bucket_sum_(
    sums: Values, pairs: Pairs, ids: Integer[Tensor, "*#batch query key"], owner: Owner
) -> None:
    """Adds the sum of the pairs in each bucket to sums, in place; no gradient passes."""
    if owner == "query":
        sums.scatter_add_(-1, ids.long().expand(pairs.shape), pairs)
    else:
        index = _flat_ids(ids, sums.shape[-1], owner).expand(*pairs.shape[:-2], -1)
        flat = sums.view(*sums.shape[:-2], sums.shape[-2] * sums.shape[-1])
        flat.scatter_add_(-1, index, pairs.flatten(-2))


def gather_bias(
    table: ScalarTable, ids: Integer[Tensor, "*batch query key"]
) -> Float[Tensor, "*batch heads_or_1 query key"]:
    """Returns the scalar of each pair: `gather` where the buckets are nobody's."""
    values = table.unsqueeze(1)
    if ids.ndim == 4:  # the images of a batch differ
        values = values.expand(ids.shape[0], -1, -1, -1)
    return gather(values, ids, "nobody")


def bias_sum(
    pairs: Pairs, ids: Integer[Tensor, "*batch query key"], table: ScalarTable
) -> ScalarTable:
    """Returns the sums of the pairs in the buckets of a table: the adjoint of `gather_bias`."""
    heads_or_1, rows = table.shape
    if ids.ndim == 2:  # what shares a bucket is added up before it is spread over buckets
        axes = (0, 1) if heads_or_1 == 1 else 0
        pairs = pairs.sum(axes, dtype=accumulation_dtype(pairs.dtype)).view(-1, *ids.shape)
        return bucket_sum(pairs, ids, rows, "nobody").squeeze(-2)
    sums = bucket_sum(pairs, ids, rows, "nobody").squeeze(-2).sum(0)
    return sums.sum_to_size(heads_or_1, rows)


def _flat_ids(ids: Tensor, num_buckets: int, owner: Owner) -> Integer[Tensor, "*batch pairs"]:
    """Returns the index of each pair's bucket in the flattened (owner, bucket) values."""
    ids = ids.long()
    if owner == "key":
        ids = ids + torch.arange(ids.shape[-1], device=ids.device) * num_buckets
    return ids.flatten(-2)
