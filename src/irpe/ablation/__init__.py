"""Encodings compared: equal budget, several seeds, a report in plain words."""

from typing import TYPE_CHECKING

from irpe.lazy import lazy_names

if TYPE_CHECKING:
    from irpe.ablation.comparison import Ablation, ablate
    from irpe.ablation.report import AblationReport
    from irpe.ablation.rows import AblationRow, default_rows, modern_rows

__all__ = ["Ablation", "AblationReport", "AblationRow", "ablate", "default_rows", "modern_rows"]

_SOURCES = {
    "irpe.ablation.comparison": ("Ablation", "ablate"),
    "irpe.ablation.report": ("AblationReport",),
    "irpe.ablation.rows": ("AblationRow", "default_rows", "modern_rows"),
}
__getattr__, __dir__ = lazy_names("irpe.ablation", _SOURCES, extra="train")
