"""Parameters, multiply-accumulates, latency and memory of a model."""

from typing import TYPE_CHECKING

from irpe.lazy import lazy_names

if TYPE_CHECKING:
    from irpe.profile.cost import EncodingCost, measure_costs
    from irpe.profile.count import count_macs, count_parameters

__all__ = ["EncodingCost", "count_macs", "count_parameters", "measure_costs"]

__getattr__, __dir__ = lazy_names(
    "irpe.profile",
    {
        "irpe.profile.cost": ("EncodingCost", "measure_costs"),
        "irpe.profile.count": ("count_macs", "count_parameters"),
    },
)
