"""transformers' Swin transformers."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.models.swin.modeling_swin import SwinAttention, SwinEmbeddings, SwinLayer

from irpe.adapters.changes import Change, Undo, drop_module, put_absolute
from irpe.adapters.grids import GridSource
from irpe.adapters.hosts.transformers.attention import attend, make_site
from irpe.adapters.plan import Plan, Request, check_window


class RPESwinAttention(SwinAttention):
    """Swin's attention with an encoding, on the grid of a window, its own bias kept or dropped."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Returns the attended tokens of each window and, if asked for, the weights."""
        bias = self._modules["relative_position_bias"]
        mask = None if bias is None else bias()  # 1 heads tokens tokens
        if attention_mask is not None:
            repeats = hidden_states.shape[0] // attention_mask.shape[0]
            shift = attention_mask.repeat(repeats, 1, 1).unsqueeze(1)
            mask = shift if mask is None else mask + shift
        return attend(self, hidden_states, hidden_states, mask, kwargs)


class RecordWindow:
    """A hook on the attention of a Swin layer that records its window, which small inputs shrink.

    Args:
        layer: The layer.
        source: Where the attention looks the grid up.
    """

    def __init__(self, layer: Any, source: GridSource) -> None:
        self.layer, self.source = layer, source

    def __call__(self, attention: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Records the grid of a window."""
        self.source.announce((self.layer.window_size, self.layer.window_size))


def add_sites(found: Plan, name: str, module: Any, request: Request) -> None:
    """Adds the attention of a layer, on the grid of a window, or changes the absolute encoding."""
    if isinstance(module, SwinEmbeddings) and request.absolute != "keep":
        found.changes.append(partial(_replace_absolute, module, request.absolute))
    if not isinstance(module, SwinLayer):
        return
    side: Any = module.window_size
    source = GridSource((side, side))
    changes: list[Change] = [partial(_follow_window, module, source)]
    if request.builtin_bias == "drop":
        changes.append(partial(drop_module, module.attention, "relative_position_bias"))
    path, check = f"{name}.attention", partial(check_window, request, has_absolute=True)
    site = make_site(
        path.lstrip("."), module.attention, RPESwinAttention, 0, source, check, changes, True
    )
    found.sites.append(site)


def _follow_window(layer: Any, source: GridSource) -> Undo:
    return layer.attention.register_forward_pre_hook(RecordWindow(layer, source)).remove


def _replace_absolute(embeddings: Any, absolute: str) -> Undo:
    if embeddings.position_embeddings is not None:
        return put_absolute(embeddings, "position_embeddings", embeddings.patch_grid, absolute)
    if absolute == "sinusoid":
        raise ValueError(
            "absolute 'sinusoid': this Swin transformer has no absolute encoding to replace; use "
            "'keep' or 'none'"
        )
    return lambda: None
