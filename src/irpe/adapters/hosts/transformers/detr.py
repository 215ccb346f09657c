"""The encoders of transformers' detectors: DETR, Conditional DETR, RT-DETR (1 and 2), D-FINE.

The decoders of the last three have attentions of the same class as their encoders, over object
queries; these stay as they are.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.detr.modeling_detr import DetrSinePositionEmbedding

from irpe.adapters.changes import Undo, replace_module
from irpe.adapters.following import follow_grid, map_source
from irpe.adapters.grids import GridSource
from irpe.adapters.hosts.transformers.attention import make_site
from irpe.adapters.hosts.transformers.classes import entry_of, modules_of
from irpe.adapters.plan import Plan, Request
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


class NoPositionEmbedding(nn.Module):
    """Stands where DETR has its absolute encoding: zeros, for the encoder and the decoder's keys.

    Args:
        dim: The dimension of a token.
    """

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


class AnnounceMap:
    """A hook before a module that runs layers on a feature map: announces the shape of the map.

    The layers run in the same call, so nothing else is announced before they are done.

    Args:
        source: Where the attentions look the grid up.
    """

    def __init__(self, source: GridSource) -> None:
        self.source = source

    def __call__(self, encoder: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Announces the grid of a map: batch, channels, rows, columns."""
        self.source.announce(tuple(inputs[0].shape[-2:]))


def add_sites(found: Plan, name: str, module: Any, request: Request) -> None:
    """Adds the self-attentions of an encoder, and what else changes in it."""
    layer = entry_of(module, _MODELS)
    if layer is not None:
        _add_encoder(found, name, module, layer, request)
    elif entry_of(module, _HYBRID):
        _add_scale(found, name, module, request)


def _add_encoder(found: Plan, name: str, detr: Any, layer: str, request: Request) -> None:
    source = map_source(request.grid, None, detr, "input_projection")
    has_sinusoid = type(detr.position_embedding).__name__.endswith("SinePositionEmbedding")
    check = partial(_check, request, has_sinusoid)
    layers = modules_of(detr, layer, name)
    for path, module in layers.items():
        site = make_site(f"{path}.self_attn", module.self_attn, 0, source, check=check)
        found.sites.append(site)
    found.changes.append(partial(follow_grid, source, layers.values()))
    if request.grid is None:
        found.changes.append(partial(_refuse_embeddings, detr))
    if request.absolute != "keep":
        dim = detr.config.d_model
        sines = partial(DetrSinePositionEmbedding, dim // 2, normalize=True)
        other = NoPositionEmbedding(dim) if request.absolute == "none" else sines()
        found.changes.append(partial(replace_module, detr, "position_embedding", other))


def _add_scale(found: Plan, name: str, encoder: Any, request: Request) -> None:
    source = GridSource(request.grid)
    check = partial(_check, request, has_sinusoid=True)
    for index, layer in enumerate(encoder.layers):
        path = f"{name}.layers.{index}.self_attn".lstrip(".")
        found.sites.append(make_site(path, layer.self_attn, 0, source, check=check))
    if request.grid is None:
        found.changes.append(partial(_announce_map, encoder, source))
    if request.absolute != "keep":
        other = NoHybridPositionEmbedding()
        found.changes.append(partial(replace_module, encoder, "position_embedding", other))


def _announce_map(encoder: nn.Module, source: GridSource) -> Undo:
    return encoder.register_forward_pre_hook(AnnounceMap(source)).remove


def _check(request: Request, has_sinusoid: bool) -> None:
    if request.num_prefix_tokens:
        raise UserError(
            f"num_prefix_tokens {request.num_prefix_tokens}: no tokens stand before the feature "
            "map of a DETR; leave it out"
        )
    if request.absolute == "sinusoid" and has_sinusoid:
        raise UserError(
            "absolute 'sinusoid': this DETR has a fixed sinusoid already; use 'keep' or 'none'"
        )


def _refuse_embeddings(detr: nn.Module) -> Undo:
    return detr.register_forward_pre_hook(_check_inputs, with_kwargs=True).remove


def _check_inputs(detr: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before DETR: embeddings do not pass the module that the grid is measured at."""
    if kwargs.get("inputs_embeds") is not None:
        raise UserError(
            "inputs_embeds do not have a grid of their own: pass pixel_values, or equip the model "
            "with grid=(rows, columns)"
        )
