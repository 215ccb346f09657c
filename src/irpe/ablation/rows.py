"""What `irpe ablate` compares: a default, and the rows of the paper's Tables 1-4 and Fig. 3."""

from collections.abc import Callable

from irpe.ablation.cells import Row
from irpe.models.paper import TABLE_4

_METHODS = ("euclidean", "quantization", "cross", "product")
_MODES = ("bias", "contextual")


def default_rows() -> list[Row]:
    """No position at all, absolute, and relative in several ways."""
    return [
        Row("none", "none", "none"),
        Row("absolute", "none", "keep"),
        Row("product bias", "product-bias-k", "none"),
        Row("K", "product-contextual-k", "none"),
        Row("QKV", "product-contextual-qkv", "none"),
        Row("absolute + QKV", "product-contextual-qkv", "keep"),
    ]


def table_1() -> list[Row]:
    """Methods and modes, a table for each head, beside the absolute encoding."""
    rows = [
        Row(f"{method} {mode}", f"{method}-{mode}-k+unshared", "keep")
        for method in _METHODS
        for mode in _MODES
    ]
    return [Row("absolute", "none", "keep"), *rows]


def table_2() -> list[Row]:
    """A table for each head against one for all."""
    return [
        Row(f"{mode} {name}", f"product-{mode}-k{sharing}", "keep")
        for mode in _MODES
        for name, sharing in {"unshared": "+unshared", "shared": ""}.items()
    ]


def table_3() -> list[Row]:
    """The clip function against the piecewise one, with the same number of buckets."""
    return [
        Row(f"{name} {mode}", f"product-{mode}-k@{index}", "keep")
        for name, index in {"clip": "clip3", "piecewise": "1.9"}.items()
        for mode in _MODES
    ]


def table_4() -> list[Row]:
    """Encodings on queries, keys and values, with and without the absolute encoding."""
    return [
        Row(row.name.replace("learnable", "absolute"), row.encoding, row.absolute)
        for row in TABLE_4
    ]


def buckets() -> list[Row]:
    """The number of buckets of the contextual product method (Fig. 3)."""
    sizes = {(2 * m + 1) ** 2 + 1: f"{(m + 0.8) / 2:.1f}" for m in range(1, 7)}
    return [
        Row(f"{size} buckets", f"product-contextual-k@{ratio}", "keep")
        for size, ratio in sizes.items()
    ]


TABLES: dict[int, Callable[[], list[Row]]] = {1: table_1, 2: table_2, 3: table_3, 4: table_4}
