"""Two primitives carry every forward and backward: look values up per pair, and sum pairs up.

They are each other's adjoint. A pair (i, j) uses bucket I(i, j) of its owner, which is

- the query for z_{i, I(i, j)}, Eq. 28;
- the key for z_{j, I(i, j)}, the same for the other token;
- nobody for a bias: one set of buckets for all pairs.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from irpe.ops.shapes import Ids

Values = Float[Tensor, "*batch owners buckets"]
Numbers = Float[Tensor, "*batch query key"]


def lookup_plain(values: Values, ids: Ids, owner: str) -> Numbers:
    """Returns the value of each pair, in operations that any exporter knows.

    Args:
        values: One number for each owner and bucket.
        ids: The bucket of each pair.
        owner: "query", "key" or "nobody".
    """
    batch = values.shape[:-2]
    flat = values.reshape(math.prod(batch), *values.shape[-2:])
    if owner == "query":
        taken = flat.gather(2, ids.long().expand(flat.shape[0], -1, -1))
    else:
        places = _places(ids, values.shape[-1], owner).expand(flat.shape[0], -1)
        taken = flat.flatten(1).gather(1, places)
    return taken.view(*batch, *ids.shape)


def bucket_sum_plain(pairs: Numbers, ids: Ids, num_buckets: int, owner: str) -> Values:
    """Returns the sum of the pairs in each bucket, in operations that any exporter knows.

    Args:
        pairs: One number for each pair.
        ids: The bucket of each pair.
        num_buckets: How many buckets an owner has.
        owner: "query", "key" or "nobody".
    """
    batch, owners = pairs.shape[:-2], _num_owners(ids, owner)
    flat = pairs.reshape(math.prod(batch), *ids.shape).to(accumulation_dtype(pairs.dtype))
    if owner == "query":
        sums = flat.new_zeros(flat.shape[0], owners, num_buckets)
        sums = sums.scatter_add(2, ids.long().expand_as(flat), flat)
    else:
        flat = flat.flatten(1)
        sums = flat.new_zeros(flat.shape[0], owners * num_buckets)
        sums = sums.scatter_add(1, _places(ids, num_buckets, owner).expand_as(flat), flat)
    return sums.view(*batch, owners, num_buckets).to(pairs.dtype)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which sums are made: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def _num_owners(ids: Ids, owner: str) -> int | torch.SymInt:
    return {"query": ids.shape[0], "key": ids.shape[1], "nobody": 1}[owner]


def _places(ids: Ids, num_buckets: int, owner: str) -> Tensor:
    """Returns where the bucket of each pair is in the flattened (owner, bucket) values."""
    if owner == "key":
        ids = ids + torch.arange(ids.shape[1], device=ids.device) * num_buckets
    return ids.flatten().long()


@torch.library.custom_op("irpe::lookup", mutates_args=())
def lookup(values: Tensor, ids: Tensor, owner: str) -> Tensor:
    """Returns the value of each pair."""
    return lookup_plain(values, ids, owner)


@torch.library.custom_op("irpe::bucket_sum", mutates_args=())
def bucket_sum(pairs: Tensor, ids: Tensor, num_buckets: int, owner: str) -> Tensor:
    """Returns the sum of the pairs in each bucket."""
    return bucket_sum_plain(pairs, ids, num_buckets, owner)


@lookup.register_fake
def _(values: Tensor, ids: Tensor, owner: str) -> Tensor:
    return values.new_empty(*values.shape[:-2], *ids.shape)


@bucket_sum.register_fake
def _(pairs: Tensor, ids: Tensor, num_buckets: int | torch.SymInt, owner: str) -> Tensor:
    return pairs.new_empty(*pairs.shape[:-2], _num_owners(ids, owner), num_buckets)


def _lookup_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (ids,) = ctx.saved_tensors
    return bucket_sum(grad, ids, ctx.num_buckets, ctx.owner), None, None


def _save_for_lookup(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    values, ids, ctx.owner = inputs
    ctx.num_buckets = values.shape[-1]
    ctx.save_for_backward(ids)


def _bucket_sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    (ids,) = ctx.saved_tensors
    return lookup(grad, ids, ctx.owner), None, None, None


def _save_for_bucket_sum(ctx: Any, inputs: tuple[Tensor, Tensor, int, str], output: Tensor) -> None:
    _, ids, _, ctx.owner = inputs
    ctx.save_for_backward(ids)


lookup.register_autograd(_lookup_backward, setup_context=_save_for_lookup)
bucket_sum.register_autograd(_bucket_sum_backward, setup_context=_save_for_bucket_sum)
