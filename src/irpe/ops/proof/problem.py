"""Random calls of a signature: small ones to prove on, those of real sizes to time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from irpe.core.bucket_map import BucketMap, KeyAxis, smallest_dtype
from irpe.ops.call import AttentionCall
from irpe.ops.proof.signature import Signature

_KINDS = ("query", "key", "value", "bias")
_SEED = 7
DROPOUT = 0.25


class Sizes(NamedTuple):
    """The sizes of a call: images, heads, queries and keys."""

    batch: int
    heads: int
    queries: int
    keys: int


class Problem(NamedTuple):
    """A random call of a signature.

    Args:
        signature: The signature.
        maps: The bucket maps.
        parts: The tensors of the call by name, and the gradient of its output.
    """

    signature: Signature
    maps: Sequence[BucketMap]
    parts: dict[str, Tensor]

    @property
    def leaves(self) -> dict[str, Tensor]:
        """What needs a gradient, by name."""
        return {name: part for name, part in self.parts.items() if part.requires_grad}

    def call(self) -> AttentionCall:
        """Returns the call."""
        parts, has_dropout = self.parts, self.signature.dropout
        query_tables, key_tables, value_tables, bias_tables = (
            tuple(part for name, part in parts.items() if name.startswith(f"{kind} table"))
            for kind in _KINDS
        )
        return AttentionCall(
            parts["q"], parts["k"], parts["v"], parts.get("table_q"), parts.get("table_k"),
            parts.get("mask"), query_tables, key_tables, value_tables, bias_tables,
            tuple(self.maps), self.signature.dim**-0.5,
            DROPOUT if has_dropout else 0.0, torch.tensor(_SEED) if has_dropout else None,
        )  # fmt: skip

    def to(self, dtype: torch.dtype) -> "Problem":
        """Returns the problem with the same values in another dtype, its leaves anew."""
        return self._replace(parts={name: _copy(x, dtype) for name, x in self.parts.items()})

    def without_dropout(self) -> "Problem":
        """Returns the problem with all weights."""
        return self._replace(signature=self.signature._replace(dropout=""))

    def with_values(self, values: Tensor) -> "Problem":
        """Returns the problem in inference with other values and value tables of zeros."""
        parts = {name: _copy(x.detach()) for name, x in self.parts.items()}
        zeros = {name: x.zero_() for name, x in parts.items() if name.startswith("value table")}
        return self._replace(
            parts=parts | zeros | {"v": values.expand_as(parts["v"]).to(parts["v"])}
        )


def _copy(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    made = x.detach().clone().to(dtype if x.is_floating_point() else None)
    return made.requires_grad_(x.requires_grad)


class _Small(NamedTuple):
    """A grid that is not square, with prefix tokens."""

    rows: int
    columns: int
    prefix: int


# Some tiles of 64 or 32 tokens with a rest, and less than one tile; by whether sizes are aligned.
_SMALL = {
    "odd": (_Small(6, 12, 1), _Small(2, 5, 3)),
    "aligned": (_Small(6, 13, 2), _Small(3, 5, 1)),
}


def small_problems(signature: Signature, device: torch.device) -> list[Problem]:
    """Returns the small problems that a signature is proved on."""
    found: list[Problem] = []
    for small in _SMALL[signature.alignment]:
        keys = small.prefix + small.rows * small.columns
        queries = keys + 16 if signature.shape == "rectangular" else keys
        maps = _small_maps(signature, small, queries)
        if keys > 64:  # one head where the reference would take more than 50 MB
            sizes = Sizes(2, 2 if signature.dim <= 64 else 1, queries, keys)
        else:  # the largest error of few elements is a matter of chance
            sizes = Sizes(4, 4, queries, keys)
        found.append(random_problem(signature, sizes, maps, device))
    return found


def random_problem(
    signature: Signature, sizes: Sizes, maps: Sequence[BucketMap], device: torch.device
) -> Problem:
    """Returns a random call of a signature and of sizes."""
    batch, heads, queries, keys = sizes
    make = _Parts(signature, torch.Generator(device).manual_seed(0))
    rotated = [f"table_{name}" for name in signature.rotated.split(" and ") if name]
    for name in ("q", "k", "v", *rotated):
        make.tokens(name, batch, heads, queries if name.endswith("q") else keys)
    for kind in _KINDS:
        make.tables(kind, heads, maps)
    make.mask(sizes)
    made = make.parts | {"grad": make.random(*make.parts["q"].shape).to(make.dtype)}
    return Problem(signature, [m.to(device) for m in maps], made)


@dataclass
class _Parts:
    """Makes the tensors of a problem."""

    signature: Signature
    generator: torch.Generator
    parts: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def __post_init__(self) -> None:
        self.dtype = getattr(torch, self.signature.dtype)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.generator.device)

    def leaf(self, name: str, made: Tensor) -> None:
        self.parts[name] = made.to(self.dtype).requires_grad_(self.signature.training)

    def tokens(self, name: str, batch: int, heads: int, count: int) -> None:
        dim = self.signature.dim
        if self.signature.layout == "tokens first":
            made = self.random(batch, count, heads, dim).transpose(1, 2)
        elif self.signature.layout == "strided":
            made = self.random(batch, heads, dim, count).mT
        else:
            made = self.random(batch, heads, count, dim)
        self.leaf(name, made)

    def tables(self, kind: str, heads: int, maps: Sequence[BucketMap]) -> None:
        owner, _, split = getattr(self.signature, kind).partition(" ")
        if not owner:
            return
        lead, dim = (1 if owner == "shared" else heads), self.signature.dim
        widths = [int(width) for width in split.split("+")] if split else [dim] * len(maps)
        for index, (m, width) in enumerate(zip(maps, widths, strict=True)):
            if kind == "bias":
                made = self.random(lead, m.num_used_buckets)
            else:  # so that scores of all kinds are alike
                made = self.random(lead, m.num_used_buckets, width) * dim**-0.5
            self.leaf(f"{kind} table {index}", made)

    def mask(self, sizes: Sizes) -> None:
        if not self.signature.mask:
            return
        kind, axes = self.signature.mask.split()
        shape = [1 if axis == "1" else size for axis, size in zip(axes, sizes, strict=True)]
        made = self.random(*shape)
        if kind == "boolean":
            made = made > -0.5
            if axes[2] == "q":
                made[:1, :, :1] = False  # a query without keys
            self.parts["mask"] = made
        elif kind == "scores":
            self.parts["mask"] = made.to(self.dtype)
        else:
            self.leaf("mask", made)


def _small_maps(signature: Signature, small: _Small, queries: int) -> list[BucketMap]:
    """Returns maps with as many table rows as the signature says, whether they occur or not."""
    count, *kinds = signature.maps.split(maxsplit=1)
    rows = max(2, 2**signature.bits // int(count) - 1)
    keys = small.prefix + small.rows * small.columns
    position = torch.arange(max(queries, keys)) - small.prefix
    coordinates = [position // small.columns, position % small.columns]
    is_prefix = position < 0
    maps: list[BucketMap] = []
    for index in range(int(count)):
        axis = index % 2 if "by axis" in kinds else None
        ids = torch.zeros(queries, keys, dtype=torch.long)
        for along in coordinates if axis is None else [coordinates[axis]]:
            offsets = along[:queries, None] - along[:keys]
            ids = ids * (2 * keys) + offsets
        ids = (ids * (index + 1)) % (rows - 1)
        ids[is_prefix[:queries, None] | is_prefix[:keys]] = rows - 1
        if "by image" in kinds:
            ids = torch.stack([ids, ids.flip(0)] * 2)[: 2 if keys > 64 else 4]
        grid = (small.rows, small.columns)
        key_axis = None if axis is None else KeyAxis(grid, axis, queries == keys)
        maps.append(BucketMap.of_rows_in_use(ids.to(smallest_dtype(rows)), rows, key_axis))
    return maps
