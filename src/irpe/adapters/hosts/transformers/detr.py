"""The encoders of transformers' detectors: DETR, Conditional DETR, RT-DETR (1 and 2), D-FINE.

The decoders of the last three have attentions of the same class as their encoders, over object
queries; these stay as they are.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.detr.modeling_detr import DetrSinePositionEmbedding

from irpe.adapters.equipped import Equipment
from irpe.adapters.grids import SOURCE, Embedded, MeasuredGrid, measured_map, source_of
from irpe.adapters.host import Plan, refuse
from irpe.adapters.hosts.transformers.attention_interface import make_site
from irpe.adapters.hosts.transformers.classes import entry_of, modules_of
from irpe.adapters.swaps import add_hook, put_module, set_attribute
from irpe.errors import UserError

# By the class of the model: that of the layers of its encoder.
_MODELS = {"DetrModel": "DetrEncoderLayer", "ConditionalDetrModel": "ConditionalDetrEncoderLayer"}
# The modules that flatten the feature map of one scale, run layers on it and restore the map.
_HYBRID = {
    f"{name}AIFILayer": True
    for name in (
        "RTDetr", "RTDetrV2", "DFine", "Deimv2", "PPDocLayoutV2", "PPDocLayoutV3", "PPDocLayoutV4",
    )
}  # fmt: skip


_PREFIX = {"num_prefix_tokens": "no tokens stand before the feature map of a DETR"}
_SINUSOID = {"absolute": "this DETR has a fixed sinusoid already"}


class NoPositionEmbedding(nn.Module):
    """Zeros in the place of DETR's absolute encoding, for the encoder and the decoder's keys."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(
        self,
        shape: torch.Size,
        device: torch.device | str,
        dtype: torch.dtype,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Returns zeros for a feature map of this shape."""
        return torch.zeros(shape[0], self.dim, *shape[-2:], device=device, dtype=dtype)


class NoHybridPositionEmbedding(nn.Module):
    """Stands where RT-DETR has its absolute encoding."""

    def forward(self, **kwargs: Any) -> None:
        """Returns `None`, to which the layers add nothing."""


def _measure_given(call: Embedded) -> tuple[int, ...]:
    """Returns the grid of a map that a module is given: batch, channels, rows, columns."""
    return tuple(call.inputs[0].shape[-2:])


def add_sites(found: Plan, name: str, module: Any, call: Equipment) -> None:
    """Adds the self-attentions of an encoder, and what else changes in it."""
    layer = entry_of(module, _MODELS)
    if layer is not None:
        _add_encoder(found, name, module, layer, call)
    elif entry_of(module, _HYBRID):
        _add_scale(found, name, module, call)


def _add_encoder(found: Plan, name: str, detr: Any, layer: str, call: Equipment) -> None:
    source = measured_map(detr, "input_projection", 0, None, call.grid)
    has_sinusoid = type(detr.position_embedding).__name__.endswith("SinePositionEmbedding")
    fixed = _SINUSOID if has_sinusoid else {}
    check = partial(refuse, call, _PREFIX | fixed, num_prefix_tokens=0, absolute="none")
    layers = modules_of(detr, layer, name)
    for path, module in layers.items():
        site = make_site(f"{path}.self_attn", module.self_attn, 0, call, source=source, check=check)
        found.sites.append(site)
    found.changes += source.follow(detr, layers.values())
    if call.grid is None:
        found.changes += add_hook(detr, _refuse_embeddings, before=True, with_kwargs=True)
    if call.absolute != "keep":
        dim = detr.config.d_model
        sines = partial(DetrSinePositionEmbedding, dim // 2, normalize=True)
        other = NoPositionEmbedding(dim) if call.absolute == "none" else sines()
        found.changes += put_module(detr, "position_embedding", other)


def _add_scale(found: Plan, name: str, encoder: Any, call: Equipment) -> None:
    made = MeasuredGrid("", _measure_given, told=call.grid, before=True)
    source = made if call.grid is not None else source_of(encoder) or made
    check = partial(refuse, call, _PREFIX | _SINUSOID, num_prefix_tokens=0, absolute="none")
    for index, layer in enumerate(encoder.layers):
        path = f"{name}.layers.{index}.self_attn".lstrip(".")
        site = make_site(path, layer.self_attn, 0, call, source=source, check=check)
        found.sites.append(site)
    if source_of(encoder) is not source:
        found.changes += source.hook_embedding(encoder)
        found.changes += set_attribute(encoder, SOURCE, source)
    if call.absolute != "keep":
        found.changes += put_module(encoder, "position_embedding", NoHybridPositionEmbedding())


def _refuse_embeddings(detr: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before DETR: embeddings do not pass the module that the grid is measured at."""
    if kwargs.get("inputs_embeds") is not None:
        raise UserError(
            "inputs_embeds do not have a grid of their own: pass pixel_values, or equip the model "
            "with grid=(rows, columns)"
        )
