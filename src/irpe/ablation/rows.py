"""What `irpe ablate` compares: a default, the paper's tables, or rows of the user's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from irpe.errors import UserError, check_choice

MODERN = "modern"  # the table of what backbones of today have
BUCKETS = "buckets"


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


def check_rows(rows: Sequence[AblationRow], seeds: int) -> None:
    """Raises an error for rows that have one name, or too few seeds."""
    if seeds < 1:
        raise UserError(f"seeds = {seeds} must be at least 1")
    names = [row.name for row in rows]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"rows {', '.join(names)}: two have the same name, {name!r}")


def has_directions(rows: Sequence[AblationRow]) -> bool:
    """Returns whether an encoding knows directions, so that mirrored images would mislead it."""
    of_distance = ("none", "euclidean", "quantization", "alibi")
    return not all(row.encoding.startswith(of_distance) for row in rows)


def choose_rows(
    table: str | None, texts: Sequence[str], side: int
) -> tuple[str, str, list[AblationRow]]:
    """Returns a title, a short name, and the rows that a user asked for.

    That is a table, or rows of one's own, as `parse_row` takes them; `side` are the patches along a
    side of an image.
    """
    if table is not None and texts:
        raise UserError("--table and --row cannot be combined")
    if texts:
        rows = [parse_row(text) for text in texts]
        return "Ablation", "-".join(row.name for row in rows), rows
    if table is None:
        return "Ablation", "default", default_rows()
    if table == MODERN:
        return "Encodings of today's backbones", MODERN, modern_rows(side)
    if table == BUCKETS:
        return "Number of buckets (the paper's Fig. 3)", BUCKETS, table_rows(BUCKETS)
    return f"The rows of the paper's Table {table}", f"table-{table}", table_rows(table)


def table_rows(table: str) -> list[AblationRow]:
    """Returns the rows of the paper's Table 1, 2, 3 or 4, or of its Fig. 3 ("buckets")."""
    from irpe.models.paper import FIGURE_3, TABLES  # here, because it brings torch

    check_choice("--table", table, [*map(str, TABLES), BUCKETS, MODERN])
    rows = FIGURE_3 if table == BUCKETS else TABLES[int(table)]
    return [AblationRow(row.name, row.encoding, row.absolute) for row in rows]


def parse_row(text: str) -> AblationRow:
    """Returns the row of a text NAME=ENCODING[,ABSOLUTE]; ABSOLUTE is none by default."""
    name, equals, rest = text.partition("=")
    encoding, _, absolute = rest.partition(",")
    if not (name and equals and encoding):
        raise UserError(f"--row {text!r} is not of the form NAME=ENCODING[,keep|none|sinusoid]")
    from irpe.core.encodings import parse_encoding

    check_choice(f"--row {text!r}: absolute", absolute or "none", ("keep", "none", "sinusoid"))
    parse_encoding(encoding)
    return AblationRow(name, encoding, absolute or "none")
