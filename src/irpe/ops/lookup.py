"""Two primitives carry every forward and backward: look values up per pair, and sum pairs up.

They are each other's adjoint. Both see the values of one head as one row of numbers; `places` says
which of them a pair of tokens uses:

- `place_by_query` for z_{i, I(i, j)}: each query has buckets of its own (Eq. 28);
- `place_by_key` for z_{j, I(i, j)}: each key has buckets of its own;
- the bucket ids themselves where all pairs share the buckets (bias).
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from irpe.ops.shapes import Ids

Values = Float[Tensor, "*batch places"]
Numbers = Float[Tensor, "*batch query key"]


def place_by_query(ids: Ids, num_buckets: int) -> Ids:
    """Returns the place of bucket (i, I(i, j)) in the flattened (query, bucket) values."""
    return torch.arange(ids.shape[0], device=ids.device)[:, None] * num_buckets + ids


def place_by_key(ids: Ids, num_buckets: int) -> Ids:
    """Returns the place of bucket (j, I(i, j)) in the flattened (key, bucket) values."""
    return torch.arange(ids.shape[1], device=ids.device) * num_buckets + ids


def lookup_plain(values: Values, places: Ids) -> Numbers:
    """Returns `values[..., places[i, j]]` for every pair, in operations that any exporter knows."""
    flat = values.reshape(math.prod(values.shape[:-1]), values.shape[-1])
    taken = flat.gather(1, _same_for_all(places, flat))
    return taken.view(*values.shape[:-1], *places.shape)


def bucket_sum_plain(pairs: Numbers, places: Ids, num_places: int) -> Values:
    """Returns the sum of the pairs at each place, in operations that any exporter knows."""
    batch = pairs.shape[:-2]
    flat = pairs.reshape(math.prod(batch), -1).to(accumulation_dtype(pairs.dtype))
    sums = flat.new_zeros(flat.shape[0], num_places)
    sums = sums.scatter_add(1, _same_for_all(places, flat), flat)
    return sums.view(*batch, num_places).to(pairs.dtype)


def _same_for_all(places: Tensor, flat: Tensor) -> Tensor:
    return places.flatten().long().expand(flat.shape[0], -1)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which sums are made: at least float32."""
    return torch.promote_types(dtype, torch.float32)


@torch.library.custom_op("irpe::lookup", mutates_args=())
def lookup(values: Tensor, places: Tensor) -> Tensor:
    """Returns `values[..., places[i, j]]` for every pair."""
    return lookup_plain(values, places)


@torch.library.custom_op("irpe::bucket_sum", mutates_args=())
def bucket_sum(pairs: Tensor, places: Tensor, num_places: int) -> Tensor:
    """Returns the sum of the pairs at each place."""
    return bucket_sum_plain(pairs, places, num_places)


@lookup.register_fake
def _(values: Tensor, places: Tensor) -> Tensor:
    return values.new_empty(*values.shape[:-1], *places.shape)


@bucket_sum.register_fake
def _(pairs: Tensor, places: Tensor, num_places: int | torch.SymInt) -> Tensor:
    return pairs.new_empty(*pairs.shape[:-2], num_places)


def _lookup_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (places,) = ctx.saved_tensors
    return bucket_sum(grad, places, ctx.num_places), None


def _save_for_lookup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    values, places = inputs
    ctx.num_places = values.shape[-1]
    ctx.save_for_backward(places)


def _bucket_sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (places,) = ctx.saved_tensors
    return lookup(grad, places), None, None


def _save_for_bucket_sum(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


lookup.register_autograd(_lookup_backward, setup_context=_save_for_lookup)
bucket_sum.register_autograd(_bucket_sum_backward, setup_context=_save_for_bucket_sum)
