"""The encodings that the paper compares with, by name, and how any text becomes an encoding.

Shaw's and Huang's are values of `RPESpec`. The others share what it tells: method, mode, targets,
sharing, and the index on a grid.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from irpe.core.choices import did_you_mean
from irpe.core.grid import Grid
from irpe.core.index import Clip, Cut, Index
from irpe.core.methods import METHODS
from irpe.core.spec import GRAMMAR, MODES, RPESpec


def _check_int(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} = {value!r} must be a whole number of {least} or more")
    if value < least:
        raise ValueError(f"{name} = {value!r} must be {least} or more")


@dataclass(frozen=True)
class Sasa:
    """SASA's encoding, Eq. 12: a row vector beside a column vector, each with its share of a head.

    Args:
        size: The longest axis that the tables cover: every offset on it has a row of its own.
    """

    size: int = 32
    method: ClassVar[str] = "cross"
    mode: ClassVar[str] = "contextual"
    targets: ClassVar[str] = "k"
    shared_heads: ClassVar[bool] = True
    tied: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_int("size", self.size, 2)

    @property
    def index(self) -> Index:
        """The identity, on the offsets that the tables cover."""
        return Clip(self.size - 1)

    def index_on(self, grid: Grid) -> Index:
        """Returns the index, or raises an error if the grid is larger than the tables."""
        longest = max(grid.shape)
        if longest > self.size:
            raise ValueError(
                f"grid {grid} is larger than the tables of {self}: an offset beyond them has no "
                f"row; equip the model with 'sasa@{longest}' before it is trained"
            )
        return self.index

    def num_buckets(self, ndim: int, num_prefix_tokens: int) -> tuple[int, ...]:
        """Returns the rows of each table, the prefix row included where there is one."""
        return (2 * self.size - 1 + (num_prefix_tokens > 0),) * ndim

    def __str__(self) -> str:
        return f"sasa@{self.size}"


@dataclass(frozen=True)
class AxialDeepLab:
    """Axial-DeepLab's position-sensitive terms: q, k and v, per axis, zero beyond a threshold.

    Args:
        threshold: The longest offset along an axis that has a row.
    """

    threshold: int = 3
    method: ClassVar[str] = "cross"
    mode: ClassVar[str] = "contextual"
    targets: ClassVar[str] = "qkv"
    shared_heads: ClassVar[bool] = True
    tied: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_int("threshold", self.threshold, 1)

    @property
    def index(self) -> Index:
        """The identity up to the threshold; one index for everything beyond."""
        return Cut(self.threshold)

    def index_on(self, grid: Grid) -> Index:
        """Returns the index, the same on every grid."""
        return self.index

    def num_buckets(self, ndim: int, num_prefix_tokens: int) -> tuple[int, ...]:
        """Returns the learned rows of each table, the prefix row included where there is one."""
        return (2 * self.threshold + 1 + (num_prefix_tokens > 0),) * ndim

    def __str__(self) -> str:
        return f"axial-deeplab@{self.threshold}"


@dataclass(frozen=True)
class TransformerXL:
    """Transformer-XL's encoding, Eq. 10: projected sines of the offset, and two learned vectors."""

    method: ClassVar[str] = "product"
    mode: ClassVar[str] = "contextual"
    targets: ClassVar[str] = "k"
    shared_heads: ClassVar[bool] = True
    tied: ClassVar[bool] = False
    index: ClassVar[Index | None] = None

    def index_on(self, grid: Grid) -> None:
        """Returns no index: every offset of a grid is told apart."""

    def num_buckets(self, ndim: int, num_prefix_tokens: int) -> tuple[int, ...]:
        """Returns the learned rows: the one for prefix tokens."""
        return (int(num_prefix_tokens > 0),)

    def __str__(self) -> str:
        return "transformer-xl"


@dataclass(frozen=True)
class CPVT:
    """CPVT's encoding: a 3 x 3 convolution between blocks. It equips models, not attentions."""

    def __str__(self) -> str:
        return "cpvt"


@dataclass(frozen=True)
class NoEncoding:
    """No relative encoding: for models that differ in their absolute one alone."""

    def __str__(self) -> str:
        return "none"


Encoding = RPESpec | Sasa | AxialDeepLab | TransformerXL  # what an attention can have
AnyEncoding = Encoding | CPVT | NoEncoding

_NAMED: dict[str, tuple[AnyEncoding, Callable[[int], AnyEncoding] | None]] = {
    "shaw": (RPESpec("product", "contextual", "k", Clip(3)), None),
    "huang": (RPESpec("product", "contextual", "qk", Clip(3), tied=True), None),
    "sasa": (Sasa(), Sasa),
    "transformer-xl": (TransformerXL(), None),
    "axial-deeplab": (AxialDeepLab(), AxialDeepLab),
    "cpvt": (CPVT(), None),
    "none": (NoEncoding(), None),
}
NAMES = tuple(_NAMED)


def parse_encoding(value: AnyEncoding | str) -> AnyEncoding:
    """Returns the encoding that a text stands for; an encoding is returned as it is.

    Args:
        value: One of `NAMES`, a text that `RPESpec.parse` understands, or an encoding.
    """
    if isinstance(value, AnyEncoding):
        return value
    if not isinstance(value, str):
        return RPESpec.parse(value)  # says what is wrong
    name, at, number = value.partition("@")
    if name in _NAMED:
        return _parse_named(name, number) if at else _NAMED[name][0]
    if len(name.split("-")) == 3 and not did_you_mean(name, NAMES, 0.8):
        return RPESpec.parse(value)
    known = [*NAMES, *(f"{method}-{mode}-k" for method in METHODS for mode in reversed(MODES))]
    raise ValueError(
        f"encoding {value!r} is not known: write one of {', '.join(NAMES)}, or "
        f"{GRAMMAR}{did_you_mean(name, known, 0.5)}"
    )


def attention_encoding(value: AnyEncoding | str) -> Encoding:
    """Returns the encoding that a text stands for, if an attention can have it."""
    encoding = parse_encoding(value)
    if isinstance(encoding, CPVT):
        raise ValueError(
            "cpvt works between the blocks of a model, no attention can have it: use "
            "irpe.equip(model, 'cpvt') with a VisionTransformer of timm"
        )
    if isinstance(encoding, NoEncoding):
        raise ValueError(
            "encoding 'none' has no tables: use attention without an encoding, or "
            "irpe.equip(model, 'none', absolute=...) to change a model's absolute one alone"
        )
    return encoding


def _parse_named(name: str, number: str) -> AnyEncoding:
    make = _NAMED[name][1]
    if make is None:
        default = _NAMED[name][0]
        other = f": it is {default}, write that with another index" if str(default) != name else ""
        raise ValueError(f"encoding '{name}@{number}': {name} takes no number{other}")
    if not number.isdecimal():
        raise ValueError(f"encoding '{name}@{number}': {number!r} must be a whole number")
    return make(int(number))
