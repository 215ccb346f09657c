"""What `irpe ablate` compares: a default, the paper's tables, or rows of the user's own."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from irpe.core.choices import check_choice
from irpe.errors import UserError
from irpe.models.paper import FIGURE_3, TABLES, PaperRow

MODERN = "modern"  # the table of what backbones of today have


@dataclass(frozen=True)
class AblationRow:
    """An encoding that is compared with others.

    Args:
        name: What to call it.
        encoding: The relative encoding, or "none".
        absolute: What becomes of the absolute one.
        rates: Learning rates of its own, by the field of the configuration; else as all rows.

    Examples:
        >>> import irpe.ablation
        >>> row = irpe.ablation.AblationRow("K", "product-contextual-k", absolute="none")
    """

    name: str
    encoding: str
    absolute: str
    rates: Mapping[str, float] = field(default_factory=dict[str, float])


def default_rows() -> list[AblationRow]:
    """Returns no position at all, absolute, and relative in several ways.

    Examples:
        >>> import irpe.ablation
        >>> [row.name for row in irpe.ablation.default_rows()]
        ['none', 'absolute', 'product bias', 'K', 'QKV', 'absolute + QKV']
    """
    return [
        AblationRow("none", "none", "none"),
        AblationRow("absolute", "none", "keep"),
        AblationRow("product bias", "product-bias-k", "none"),
        AblationRow("K", "product-contextual-k", "none"),
        AblationRow("QKV", "product-contextual-qkv", "none"),
        AblationRow("absolute + QKV", "product-contextual-qkv", "keep"),
    ]


def modern_rows(side: int) -> list[AblationRow]:
    """Returns what backbones of today have, beside contextual encodings and together with them.

    Args:
        side: The patches along a side: `decomposed` has a table row for each of their offsets.

    Examples:
        >>> import irpe.ablation
        >>> [row.encoding for row in irpe.ablation.modern_rows(side=7)][2:5]
        ['rope-axial', 'rope-mixed', 'decomposed@7']
    """
    return [
        AblationRow("none", "none", "none"),
        AblationRow("absolute", "none", "keep"),
        AblationRow("rope-axial", "rope-axial", "none"),
        AblationRow("rope-mixed", "rope-mixed", "none"),
        AblationRow("decomposed", f"decomposed@{side}", "none"),
        AblationRow("log-cpb", "log-cpb", "none"),
        AblationRow("K", "product-contextual-k", "none"),
        AblationRow("QKV", "product-contextual-qkv", "none"),
        AblationRow("rope-axial + K", "rope-axial+product-contextual-k", "none"),
        AblationRow("absolute + QKV", "product-contextual-qkv", "keep"),
    ]


def table_rows(table: str) -> list[AblationRow]:
    """Returns the rows of the paper's Table 1, 2, 3 or 4."""
    check_choice("--table", table, [*map(str, TABLES), "buckets", MODERN])
    return _of_paper(TABLES[int(table)])


def bucket_rows() -> list[AblationRow]:
    """Returns the numbers of buckets of the paper's Fig. 3."""
    return _of_paper(FIGURE_3)


def parse_row(text: str) -> AblationRow:
    """Returns the row of a text NAME=ENCODING[,ABSOLUTE]; ABSOLUTE is none by default."""
    name, equals, rest = text.partition("=")
    encoding, _, absolute = rest.partition(",")
    if not (name and equals and encoding):
        raise UserError(f"--row {text!r} is not of the form NAME=ENCODING[,keep|none|sinusoid]")
    return AblationRow(name, encoding, absolute or "none")


def _of_paper(rows: Iterable[PaperRow]) -> list[AblationRow]:
    return [AblationRow(row.name, row.encoding, row.absolute) for row in rows]
