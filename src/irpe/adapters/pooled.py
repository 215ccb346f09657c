"""Attentions that pool their queries or keys: where the pooled tokens are."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from irpe.core.constants import traced_as_constant
from irpe.core.grid import Grid
from irpe.core.places import PooledGrid
from irpe.core.positions import Positions


class Pool(NamedTuple):
    """How a map of tokens becomes another one.

    Args:
        shape: The tokens along each axis afterwards.
        stride: The distance between neighbours, in tokens before.
        first: The position of the first token, in tokens before.
    """

    shape: tuple[int, ...]
    stride: tuple[float, ...]
    first: tuple[float, ...]


def not_pooled(shape: Sequence[int]) -> Pool:
    """Returns the tokens of a map as they are."""
    axes = len(shape)
    return Pool(tuple(shape), (1.0,) * axes, (0.0,) * axes)


def pooled_by(layer: Any, shape: Sequence[int]) -> Pool:
    """Returns what a convolution or a pooling layer makes of a map: each output at its window.

    Args:
        layer: The layer, with its kernel, stride and padding.
        shape: The shape of what it is given.
    """
    axes = len(shape)
    kernel, stride, padding = (
        _by_axis(size, axes) for size in (layer.kernel_size, layer.stride, layer.padding)
    )
    first = tuple((k - 1) / 2 - p for k, p in zip(kernel, padding, strict=True))
    windows = zip(shape, kernel, stride, padding, strict=True)
    return Pool(tuple((n + int(2 * p - k)) // int(s) + 1 for n, k, s, p in windows), stride, first)


def pooled_to(shape: Sequence[int], before: Sequence[int]) -> Pool:
    """Returns a map that was pooled to a shape: cells of equal size.

    Args:
        shape: The shape afterwards.
        before: The shape before.
    """
    stride = tuple(old / new for old, new in zip(before, shape, strict=True))
    return Pool(tuple(shape), stride, tuple((step - 1) / 2 for step in stride))


def pooled_positions(queries: Pool, keys: Pool, num_prefix_tokens: int = 0) -> Positions:
    """Returns the positions of pooled tokens; neighbours of the finer side are 1.0 apart.

    Args:
        queries: How the queries were pooled.
        keys: How the keys were.
        num_prefix_tokens: The tokens before both.
    """
    return _constant_positions(tuple(queries), tuple(keys), num_prefix_tokens)


@traced_as_constant
def _constant_positions(
    queries: tuple[Any, ...], keys: tuple[Any, ...], num_prefix_tokens: int
) -> Positions:
    """Takes plain tuples: the compiler makes no constants of named ones."""
    return _cached_positions(Pool(*queries), Pool(*keys), num_prefix_tokens)


@lru_cache(maxsize=256)
def _cached_positions(queries: Pool, keys: Pool, num_prefix_tokens: int) -> Positions:
    unit = tuple(min(pair) for pair in zip(queries.stride, keys.stride, strict=True))
    return Positions(_places(queries, unit), _places(keys, unit), num_prefix_tokens)


def _places(side: Pool, unit: tuple[float, ...]) -> Grid | PooledGrid:
    stride = tuple(s / u for s, u in zip(side.stride, unit, strict=True))
    first = tuple(f / u for f, u in zip(side.first, unit, strict=True))
    is_plain = set(stride) == {1.0} and set(first) == {0.0}
    return Grid(side.shape) if is_plain else PooledGrid(side.shape, stride, first)


def _by_axis(size: Any, axes: int) -> tuple[float, ...]:
    return tuple(map(float, size)) if isinstance(size, Sequence) else (float(size),) * axes
