"""transformers' Segformer, whose keys are fewer than its queries."""

from functools import partial
from typing import Any

from torch import nn

from irpe.adapters.changes import Undo
from irpe.adapters.grids import GridSource
from irpe.adapters.hosts.transformers.attention import make_site
from irpe.adapters.hosts.transformers.classes import entry_of
from irpe.adapters.plan import Plan, Request, check_window
from irpe.adapters.pooled import not_pooled, pooled_by, pooled_positions

_ATTENTIONS = {"SegformerAttention": True}


class RecordReduced:
    """A hook before an attention, which is given its grid: records where queries and keys are.

    The attention reads it in the same call.

    Args:
        source: Where the attention looks positions up.
    """

    def __init__(self, source: GridSource) -> None:
        self.source = source

    def __call__(self, attention: Any, inputs: tuple[Any, ...]) -> None:
        """Records the positions of an input."""
        _, height, width, *_ = inputs
        queries = keys = not_pooled((height, width))
        if attention.sequence_reduction_ratio > 1:
            layer = attention.sequence_reduction.sequence_reduction
            sizes = zip((height, width), layer.kernel_size, layer.stride, strict=True)
            shape = tuple((size - kernel) // stride + 1 for size, kernel, stride in sizes)
            keys = pooled_by(layer, shape)
        self.source.announce(pooled_positions(queries, keys))


def add_sites(found: Plan, name: str, module: Any, request: Request) -> None:
    """Adds an attention of Segformer."""
    if not entry_of(module, _ATTENTIONS):
        return
    source = GridSource(None)
    site = make_site(
        name,
        module,
        0,
        source,
        check=partial(check_window, request, has_absolute=False, kind="Segformer"),
        changes=[partial(_record_reduced, module, source)],
    )
    found.sites.append(site)


def _record_reduced(attention: nn.Module, source: GridSource) -> Undo:
    return attention.register_forward_pre_hook(RecordReduced(source)).remove
