"""Rotary or relative? What the rows of an ablation say to that, where it has both."""

from collections.abc import Sequence

from irpe.ablation.statistics import RowResult, compare, unmoved
from irpe.core.encodings import Joined, parse_encoding
from irpe.core.encodings.model_only import CPVT, NoEncoding
from irpe.core.encodings.rope import RopeAxial, RopeMixed

_KINDS = ("rotary", "relative", "both")


def rotary_or_relative(rows: Sequence[RowResult]) -> list[str]:
    """Returns whether rotary or relative encodings are better here, and what both together give.

    The best row of each kind speaks for it, among those without an absolute encoding.

    Args:
        rows: The results, without encodings that do nothing.
    """
    alone = [row for row in rows if row.row.absolute == "none"]
    kinds = {kind: [row for row in alone if kind_of(row) == kind] for kind in _KINDS}
    if not (kinds["rotary"] and kinds["relative"]):
        return []
    pair = [_best(kinds["relative"]), _best(kinds["rotary"])]
    better, other = pair = sorted(pair, key=lambda row: -row.merit())
    verdict = "a tie" if compare(better, other).verdict == "tie" else kind_of(better)
    named = [f"{row.name} (best of {len(kinds[kind_of(row)])} {kind_of(row)})" for row in pair]
    text = (
        f"Rotary or relative? {unmoved(better)}: {verdict}. {' against '.join(named)}: "
        f"{_differences(better, other)}, at {better.cost.step / other.cost.step:.1f}x the time of "
        "a step"
    )
    if not kinds["both"]:
        return [f"{text}."]
    both = _best(kinds["both"])
    found = {"better": "better than", "tie": "a tie with", "worse": "worse than"}
    words = found[compare(both, better).verdict]
    return [f"{text}. Together, {both.name}: {words} {better.name}, {_differences(both, better)}."]


def kind_of(row: RowResult) -> str:
    """Returns what a row's encoding is: rotary, relative, both or neither."""
    match parse_encoding(row.row.encoding):
        case Joined():
            return "both"
        case RopeAxial() | RopeMixed():
            return "rotary"
        case CPVT() | NoEncoding():
            return "neither"
        case _:
            return "relative"


def _best(rows: Sequence[RowResult]) -> RowResult:
    return max(rows, key=lambda row: row.merit())


def _differences(row: RowResult, other: RowResult) -> str:
    found = {shift: compare(row, other, shift) for shift in row.shifts[1:]}
    moved = (f"moved by {shift} {each} ({each.verdict})" for shift, each in found.items())
    return ", ".join([f"{compare(row, other)} points", *moved])
