"""Encodings compared: equal budget, several seeds, a report in plain words."""

from typing import TYPE_CHECKING

from irpe.lazy import lazy_names

if TYPE_CHECKING:
    from irpe.ablation.answer import Answer
    from irpe.ablation.clusters import parse_cluster
    from irpe.ablation.comparison import Ablation, ablate, read_report
    from irpe.ablation.report import AblationReport
    from irpe.ablation.rows import AblationRow, default_rows, modern_rows
    from irpe.ablation.verdicts import Difference

__all__ = [
    "Ablation", "AblationReport", "AblationRow", "Answer", "Difference", "ablate", "default_rows",
    "modern_rows", "parse_cluster", "read_report",
]  # fmt: skip

_SOURCES = {
    "irpe.ablation.answer": ("Answer",),
    "irpe.ablation.comparison": ("Ablation", "ablate", "read_report"),
    "irpe.ablation.clusters": ("parse_cluster",),
    "irpe.ablation.report": ("AblationReport",),
    "irpe.ablation.rows": ("AblationRow", "default_rows", "modern_rows"),
    "irpe.ablation.verdicts": ("Difference",),
}
__getattr__, __dir__ = lazy_names("irpe.ablation", _SOURCES, extra="train")
