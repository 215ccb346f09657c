"""The costs that the paper reports, Tables 2 and 5, beside what is counted here.

The binding check is the difference to the plain model: within 8 % or 2 M of the paper's difference.
Totals of the paper are up to 0.7 % higher, since its counter adds operations other than matrix
products.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from irpe.models.paper import COSTS, PaperCost
from irpe.profile.cost import Count, count
from irpe.progress import Listener, silent, tracked

TOLERANCE = 0.08
TOLERANCE_MACS = 2e6
TOTAL_TOLERANCE = 0.007


@dataclass(frozen=True)
class Comparison:
    """A cost that the paper reports beside what is counted here."""

    published: PaperCost
    parameters: int
    macs: int
    extra_macs: int  # beyond the plain model
    formula_macs: int  # the same by the closed formulas
    paper_extra_macs: int  # the paper's beyond its plain model
    reasons: tuple[str, ...]  # why they differ by more than the tolerance; empty if they do not


def compare_with_paper(
    costs: Sequence[PaperCost] = COSTS, listen: Listener = silent
) -> list[Comparison]:
    """Returns the costs of Tables 2 and 5 beside what is counted on the models of timm."""
    counted = cache(count)
    return [
        compare_cost(each, counted(each.model, each.encoding), counted(each.model, "none"))
        for each in tracked(listen, costs, len(costs), "counting")
    ]


def compare_cost(published: PaperCost, ours: Count, plain: Count) -> Comparison:
    """Returns what the paper reports beside the counts of a model and of the plain one."""
    extra = ours.macs - plain.macs
    paper_extra = (published.macs - published.plain_macs) * 10**6
    reasons: list[str] = []
    decimals = len(published.parameters.partition(".")[2])  # in millions, as printed
    if f"{ours.parameters / 1e6:.{decimals}f}" != published.parameters:
        reasons.append(published.parameters_reason or "parameters differ: not explained")
    if abs(extra - paper_extra) > max(TOLERANCE * paper_extra, TOLERANCE_MACS):
        reasons.append(published.macs_reason or "MACs differ: not explained")
    without_encoding = abs((ours.macs - extra) / (published.plain_macs * 10**6) - 1)
    if without_encoding > TOTAL_TOLERANCE:
        reasons.append("the plain model's MACs differ: not explained")
    counts = ours.parameters, ours.macs, extra, ours.formula_macs
    return Comparison(published, *counts, paper_extra, tuple(reasons))
