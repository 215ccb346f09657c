"""What an encoding answers about itself, so that modules and cost formulas only ask."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from irpe.core.augmentation import NONE, Augmentation
from irpe.core.grid import Grid
from irpe.core.index import Index
from irpe.core.positions import Sample
from irpe.core.rotation import Rotation
from irpe.errors import UserError, UserTypeError, check_is_holdable

KINDS = {"q": "query_tables", "k": "key_tables", "v": "value_tables"}
TABLE_LISTS = (*KINDS.values(), "bias_tables")


class HeadSize(NamedTuple):
    """The sizes that the parameters of one attention depend on.

    Args:
        num_heads: The heads of the attention.
        head_dim: The dimension of one head.
        num_prefix_tokens: How many tokens stand before the patches.
        ndim: The number of axes of the grid.
    """

    num_heads: int
    head_dim: int
    num_prefix_tokens: int
    ndim: int


class OnGrid(NamedTuple):
    """Where the tokens of an attention are, and what is computed with.

    Args:
        shape: The shape of the grid.
        size: The sizes of the attention.
        device: The device of the queries.
        dtype: Their dtype.
        sample: The random numbers of a pass in training, for an encoding that augments positions.
    """

    shape: tuple[int, ...]
    size: HeadSize
    device: torch.device
    dtype: torch.dtype
    sample: Sample | None = None


class AttentionArguments(NamedTuple):
    """What an encoding gives `rpe_attention` on a grid.

    Args:
        query_tables: One for each map, or none; so the next three, as in `rpe_attention`.
        key_tables: See there.
        value_tables: See there.
        bias_tables: See there.
        query_shift: What is added to the queries first, if anything.
        rotation: How queries and keys are rotated before their product, if they are. Tables are
            multiplied with the unrotated ones.
    """

    query_tables: Sequence[Tensor] = ()
    key_tables: Sequence[Tensor] = ()
    value_tables: Sequence[Tensor] = ()
    bias_tables: Sequence[Tensor] = ()
    query_shift: Tensor | None = None
    rotation: Rotation | None = None


class Encoding(ABC):
    """A relative position encoding of an attention: a frozen value, which prints as its text.

    Attributes:
        method: The method that makes bucket maps of offsets; `None` without tables.
        mode: Whether pairs have scalars, vectors or neither: bias, contextual, rotation.
        targets: Which of queries, keys and values carry the encoding.
        keeps_output: Whether a trained model returns the same as before when it has just been
            equipped.
        any_positions: Whether tokens may be anywhere: index and tables do not depend on a grid.
        takes_rotation: Whether queries and keys may be rotated as well, by another encoding or by
            the host.
        augmentation: How positions change at random in training.
    """

    method: str | None = "product"
    mode: str = "contextual"
    targets: str = "k"
    keeps_output: bool = True
    any_positions: bool = False
    takes_rotation: bool = True
    augmentation: Augmentation = NONE

    def index_on(self, grid: Grid) -> Index | None:
        """Returns the index function on a grid, `None` if every offset has a row of its own."""
        return None

    @abstractmethod
    def learned_rows(self, ndim: int) -> tuple[int, ...]:
        """Returns the learned rows of each table, without that of prefix tokens."""

    def num_buckets(self, ndim: int, num_prefix_tokens: int) -> tuple[int, ...]:
        """Returns the learned rows of each table, the prefix row included where there is one."""
        return tuple(rows + (num_prefix_tokens > 0) for rows in self.learned_rows(ndim))

    def parameter_shapes(self, size: HeadSize) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of what is learned, by name; "key_tables.0" is the first of a list."""
        rows = self.num_buckets(size.ndim, size.num_prefix_tokens)
        return vector_table_shapes(self.targets, rows, 1, size.head_dim)

    def initialize(self, parameters: Mapping[str, Tensor]) -> None:
        """Sets the parameters to zero, or to other initial values; names as `parameter_shapes`."""
        for parameter in parameters.values():
            nn.init.zeros_(parameter)

    def arguments_on(self, at: OnGrid, parameters: Mapping[str, Any]) -> AttentionArguments:
        """Returns what attention is called with on a grid: a pure function of the parameters.

        Args:
            at: Where the tokens are.
            parameters: What is learned, by name: tensors, and lists of tables.
        """
        return AttentionArguments(**parameters)

    def extra_macs(self, shape: Sequence[int], grid: Grid, used_rows: Sequence[int]) -> int:
        """Returns the multiply-accumulates beside plain attention, in closed form.

        By Eq. 27 each token is multiplied with each row in use, for each target; a bias is gathered
        and added, and a rotation is elementwise.

        Args:
            shape: The shape of the queries: batch, heads, tokens, dim.
            grid: The grid.
            used_rows: For each map, the rows in use, or the tokens if these are fewer.
        """
        has_vectors = self.mode == "contextual"
        return len(self.targets) * math.prod(shape) * sum(used_rows) if has_vectors else 0


def check_table_size(encoding: Encoding, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises an error for tables that no machine can hold."""
    elements = sum(math.prod(shape) for shape in shapes.values())
    check_is_holdable("tables of", encoding, elements, "write a smaller ratio or beta")


def vector_table_shapes(
    targets: str, rows: Sequence[int], heads_or_1: int, width: int
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of one table per map for each target."""
    return {
        f"{KINDS[target]}.{number}": (heads_or_1, count, width)
        for target in targets
        for number, count in enumerate(rows)
    }


def check_splits_head(encoding: Encoding, head_dim: int, parts: int) -> None:
    """Raises an error unless a head can be split into equal parts."""
    if head_dim % parts:
        raise UserError(
            f"{encoding}: heads of dimension {head_dim} cannot be split between the axes of the "
            f"grid: it must be a multiple of {parts}"
        )


def check_whole_number(name: str, value: int, least: int) -> None:
    """Raises an error unless a value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserTypeError(f"{name} = {value!r} must be a whole number of {least} or more")
    if value < least:
        raise UserError(f"{name} = {value!r} must be {least} or more")
