"""What an encoding answers for itself, so that modules and cost formulas ask and do not know it."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from irpe.core.index import Index
from irpe.core.positions import Grid
from irpe.core.rotation import Rotation
from irpe.errors import UserError, UserTypeError

_MOST_ELEMENTS = 2**34  # 64 GiB in float32, for one attention
ROLES = {"q": "query_tables", "k": "key_tables", "v": "value_tables"}
TABLE_LISTS = (*ROLES.values(), "bias_tables")


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


class AttentionArguments(NamedTuple):
    """What an encoding gives `rpe_attention` on a grid.

    Args:
        query_tables: One for each map, or none; so the next three, as in `rpe_attention`.
        key_tables: See there.
        value_tables: See there.
        bias_tables: See there.
        query_shift: What is added to the queries first, if anything.
        rotation: How queries and keys are turned before their product, if they are. The tables meet
            them before that.
    """

    query_tables: Sequence[Tensor] = ()
    key_tables: Sequence[Tensor] = ()
    value_tables: Sequence[Tensor] = ()
    bias_tables: Sequence[Tensor] = ()
    query_shift: Tensor | None = None
    rotation: Rotation | None = None


class AttentionEncoding(Protocol):
    """A relative position encoding of an attention: a frozen value."""

    @property
    def method(self) -> str | None:
        """The method that makes bucket maps of offsets, `None` without tables."""
        ...

    @property
    def mode(self) -> str:
        """Whether pairs have scalars or vectors, or none of these: bias, contextual, rotation."""
        ...

    @property
    def targets(self) -> str:
        """Which of queries, keys and values carry the encoding."""
        ...

    @property
    def keeps_output(self) -> bool:
        """Whether a trained model returns the same as before when it has just been equipped."""
        ...

    @property
    def any_positions(self) -> bool:
        """Whether tokens may be anywhere: index and tables do not depend on a grid."""
        ...

    def index_on(self, grid: Grid) -> Index | None:
        """Returns the index function on a grid, `None` if every offset has a row of its own."""
        ...

    def num_buckets(self, ndim: int, num_prefix_tokens: int) -> tuple[int, ...]:
        """Returns the learned rows of each table, the prefix row included where there is one."""
        ...

    def parameter_shapes(self, size: HeadSize) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of what is learned, by name; "key_tables.0" is the first of a list."""
        ...

    def initialize(self, parameters: Mapping[str, Tensor]) -> None:
        """Sets the parameters to their initial values."""
        ...

    def arguments_on(
        self,
        grid: Grid | Sequence[int],
        parameters: Mapping[str, Tensor],
        size: HeadSize,
        like: Tensor,
    ) -> AttentionArguments:
        """Returns what attention is called with on a grid: a pure function of the parameters.

        Args:
            grid: The grid.
            parameters: What is learned, by name.
            size: The sizes of the attention.
            like: A tensor with the device and dtype of the queries.
        """
        ...

    def extra_macs(self, shape: Sequence[int], grid: Grid, used_rows: Sequence[int]) -> int:
        """Returns the multiply-accumulates beside plain attention, in closed form.

        Args:
            shape: The shape of the queries: batch, heads, tokens, dim.
            grid: The grid.
            used_rows: For each map, the rows in use, or the tokens if these are fewer.
        """
        ...


def check_table_size(encoding: object, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises an error for tables that no machine can hold."""
    elements = sum(math.prod(shape) for shape in shapes.values())
    if elements > _MOST_ELEMENTS:
        raise UserError(
            f"{encoding}: its tables would have {elements:,} elements, {elements * 4 / 2**30:,.0f} "
            "GiB in float32: write a smaller ratio or beta"
        )


def zero_parameters(parameters: Mapping[str, Tensor]) -> None:
    """Sets all parameters to zero: attention is then what it is without an encoding."""
    for parameter in parameters.values():
        nn.init.zeros_(parameter)


def vector_table_shapes(
    targets: str, rows: Sequence[int], heads_or_1: int, width: int
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of one table per map for each target."""
    return {
        f"{ROLES[target]}.{number}": (heads_or_1, count, width)
        for target in targets
        for number, count in enumerate(rows)
    }


def arguments_of(parameters: Mapping[str, Tensor]) -> AttentionArguments:
    """Returns the tables, which have the names of their lists, in the order of their maps."""
    tables: dict[str, list[Tensor]] = {}
    for name, table in parameters.items():
        tables.setdefault(name.partition(".")[0], []).append(table)
    query, key, value, bias = (tables.get(name, ()) for name in TABLE_LISTS)
    return AttentionArguments(query, key, value, bias)


def vector_table_macs(
    targets: str, shape: Sequence[int], width: int, used_rows: Sequence[int]
) -> int:
    """Returns the cost of Eq. 27: each token meets each row in use, for each target."""
    batch, heads, tokens, _ = shape
    return len(targets) * batch * heads * tokens * width * sum(used_rows)


def check_splits_head(encoding: object, head_dim: int, parts: int) -> None:
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
