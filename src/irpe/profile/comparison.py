"""The costs that the paper reports, Tables 2 and 5, beside what is counted here.

The binding check is the difference to the plain model: within 8 % or 2 M of the paper's difference.
Totals of the paper are up to 0.7 % higher, since its counter adds operations other than matrix
products.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from irpe.models.paper import COSTS, PaperCost
from irpe.profile.cost import Count, count
from irpe.progress import Listener, silent, tracked

TOLERANCE = 0.08
TOLERANCE_MACS = 2e6
TOTAL_TOLERANCE = 0.007


@dataclass(frozen=True)
class Comparison:
    """A cost that the paper reports beside what is counted.

    Args:
        published: What the paper reports.
        parameters: Our parameters.
        macs: Our multiply-accumulates.
        extra_macs: Ours beyond the plain model.
        formula_macs: The same by the closed formulas.
        paper_extra_macs: The paper's beyond its plain model.
        reasons: Why ours differ by more than the tolerance; empty if they do not.
    """

    published: PaperCost
    parameters: int
    macs: int
    extra_macs: int
    formula_macs: int
    paper_extra_macs: int
    reasons: tuple[str, ...]


def compare_with_paper(
    costs: Sequence[PaperCost] = COSTS, listen: Listener = silent
) -> list[Comparison]:
    """Returns the costs of Tables 2 and 5 beside what is counted on the models of timm.

    Args:
        costs: What the paper reports.
        listen: Is called with how far it is.
    """
    known: dict[tuple[str, str], Count] = {}

    def counted(model: str, encoding: str) -> Count:
        if (model, encoding) not in known:
            known[model, encoding] = count(model, encoding)
        return known[model, encoding]

    rows: list[Comparison] = []
    for published in tracked(listen, costs, len(costs), "counting"):
        plain = counted(published.model, "none")
        rows.append(compare_cost(published, counted(published.model, published.encoding), plain))
    return rows


def compare_cost(published: PaperCost, ours: Count, plain: Count) -> Comparison:
    """Returns what the paper reports beside the counts of a model and of the plain one."""
    extra = ours.macs - plain.macs
    paper_extra = (published.macs - published.plain_macs) * 10**6
    reasons: list[str] = []
    if not _prints_as(ours.parameters, published.parameters):
        reasons.append(published.parameters_reason or "parameters differ: not explained")
    if abs(extra - paper_extra) > max(TOLERANCE * paper_extra, TOLERANCE_MACS):
        reasons.append(published.macs_reason or "MACs differ: not explained")
    without_encoding = abs((ours.macs - extra) / (published.plain_macs * 10**6) - 1)
    if without_encoding > TOTAL_TOLERANCE:
        reasons.append("the plain model's MACs differ: not explained")
    return Comparison(
        published=published,
        parameters=ours.parameters,
        macs=ours.macs,
        extra_macs=extra,
        formula_macs=ours.formula_macs,
        paper_extra_macs=paper_extra,
        reasons=tuple(reasons),
    )


def _prints_as(parameters: int, printed: str) -> bool:
    """Tells whether a count of parameters rounds to what the paper prints, in millions."""
    decimals = len(printed.partition(".")[2])
    return f"{parameters / 1e6:.{decimals}f}" == printed
