"""What an encoding is: method, mode, targets, index function and sharing, as one value."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from irpe.core.encodings.protocol import (
    AttentionArguments,
    Encoding,
    HeadSize,
    OnGrid,
    vector_table_shapes,
)
from irpe.core.grid import Grid
from irpe.core.index import Clip, Piecewise, parse_index
from irpe.core.methods import METHODS
from irpe.errors import UserError, UserTypeError, check_choice

MODES = ("bias", "contextual")
TARGETS = ("q", "k", "v", "qk", "qv", "kv", "qkv")
_TIED, _UNSHARED = "+tied", "+unshared"
GRAMMAR = "METHOD-MODE-TARGETS[@RATIO | @ALPHA:BETA:GAMMA | @clipBETA][+tied][+unshared]"


@dataclass(frozen=True)
class RPESpec(Encoding):
    """A relative position encoding, checked when it is made; hashable, comparable, printable.

    Args:
        method: How a 2-D offset becomes a bucket: euclidean, quantization, cross or product.
        mode: "bias" learns a scalar per bucket (Eq. 14), "contextual" a vector (Eq. 15-17).
        targets: Which of queries, keys and values carry an encoding, in the order q, k, v.
        index: From distance to bucket; `None` takes the method's best in the paper.
        shared_heads: One table for all heads, or one for each.
        tied: One table for queries and keys together (Eq. 11); both must be targets.

    Examples:
        >>> import irpe
        >>> str(irpe.RPESpec(method="product", mode="contextual", targets="k"))
        'product-contextual-k@1.9'
    """

    method: str = "product"  # pyright: ignore[reportIncompatibleVariableOverride]
    mode: str = "contextual"
    targets: str = "k"
    index: Piecewise | Clip | None = None
    shared_heads: bool = True
    tied: bool = False
    any_positions = True

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS)
        check_choice("mode", self.mode, MODES)
        _check_targets(self.targets)
        if self.mode == "bias" and self.targets != "k":
            raise UserError(
                f"targets {self.targets!r} have no bias mode: a bias acts on the scores, through "
                "one table; write targets 'k', or mode 'contextual'"
            )
        if self.index is None:
            default = Piecewise.from_ratio(METHODS[self.method].ratio)
            object.__setattr__(self, "index", default)
        elif not isinstance(self.index, Piecewise | Clip):
            raise UserTypeError(f"index {self.index!r} must be a Piecewise, a Clip or None")
        if not isinstance(self.shared_heads, bool):
            raise UserTypeError(f"shared_heads = {self.shared_heads!r} must be True or False")
        _check_tied(self.tied, self.targets)

    @classmethod
    def parse(cls, text: str) -> "RPESpec":
        """Returns the spec that a text such as "product-contextual-qkv@1.9" stands for."""
        if not isinstance(text, str):
            raise UserTypeError(f"spec {text!r} is not a text of the form {GRAMMAR}")
        rest = text.removesuffix(_UNSHARED)
        head, at, tail = rest.removesuffix(_TIED).partition("@")
        parts = head.split("-")
        if len(parts) != 3:
            raise UserError(f"spec {text!r} is not of the form {GRAMMAR}")
        index = parse_index(tail) if at else None
        is_shared, is_tied = not text.endswith(_UNSHARED), rest.endswith(_TIED)
        return cls(*parts, index=index, shared_heads=is_shared, tied=is_tied)

    @property
    def index_function(self) -> Piecewise | Clip:
        """The index, never `None`."""
        assert self.index is not None
        return self.index

    def index_on(self, grid: Grid) -> Piecewise | Clip:
        """Returns the index, the same on every grid."""
        return self.index_function

    def learned_rows(self, ndim: int) -> tuple[int, ...]:
        """Returns the rows of the method's tables."""
        return METHODS[self.method].num_buckets(self.index_function.max_index, ndim)

    def parameter_shapes(self, size: HeadSize) -> dict[str, tuple[int, ...]]:
        """Returns one table per bucket map for each target, or one of scalars."""
        heads_or_1 = 1 if self.shared_heads else size.num_heads
        rows = self.num_buckets(size.ndim, size.num_prefix_tokens)
        if self.mode == "bias":
            return {f"bias_tables.{n}": (heads_or_1, count) for n, count in enumerate(rows)}
        targets = self.targets.replace("q", "") if self.tied else self.targets
        return vector_table_shapes(targets, rows, heads_or_1, size.head_dim)

    def arguments_on(self, at: OnGrid, parameters: Mapping[str, Any]) -> AttentionArguments:
        """Returns the tables, the same on every grid."""
        found = AttentionArguments(**parameters)
        # Eq. 11: p_ij is shared by queries and keys
        return found._replace(query_tables=found.key_tables) if self.tied else found

    def __str__(self) -> str:
        options = (_TIED if self.tied else "") + ("" if self.shared_heads else _UNSHARED)
        return f"{self.method}-{self.mode}-{self.targets}@{self.index}{options}"


def _check_tied(tied: bool, targets: str) -> None:
    if not isinstance(tied, bool):
        raise UserTypeError(f"tied = {tied!r} must be True or False")
    if tied and targets not in ("qk", "qkv"):
        raise UserError(
            f"targets {targets!r} cannot be tied: one table for queries and keys takes targets "
            "'qk' or 'qkv'"
        )


def _check_targets(targets: str) -> None:
    if targets in TARGETS:
        return
    ordered = "".join(letter for letter in "qkv" if letter in str(targets))
    only_known = ordered and not set(str(targets)) - set("qkv")
    hint = f"; write {ordered!r}" if only_known else ""
    raise UserError(f"targets {targets!r} is not one of {', '.join(TARGETS)}{hint}")
