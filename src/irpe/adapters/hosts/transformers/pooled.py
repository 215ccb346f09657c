"""transformers' attentions with fewer keys than queries: Segformer, GLPN, PVT 1 and 2."""

from functools import partial
from typing import Any

from torch import Tensor

from irpe.adapters.answer import answer_with_weights
from irpe.adapters.equipped import Equipment
from irpe.adapters.grids import InputGrid
from irpe.adapters.host import Plan, Row, check_window, refuse
from irpe.adapters.hosts.transformers.attention_interface import REGISTERED, make_site
from irpe.adapters.hosts.transformers.classes import entry_of, modules_of
from irpe.core.grid import Grid, PooledGrid
from irpe.core.positions import pooled_positions


def pooled_keys(
    attention: Any, hidden_states: Tensor, height: int, width: int, *args: Any, **_: Any
) -> InputGrid:
    """Returns positions where keys are cells of the queries' grid."""
    shape = (height, width)
    keys, layer = Grid(shape), _reduction_of(attention)
    if getattr(attention, "linear_attention", False):
        keys = PooledGrid((7, 7), (height / 7, width / 7))
    elif layer is not None:
        keys = PooledGrid.after(layer, shape)
    return pooled_positions(Grid(shape), keys, _count_prefix(hidden_states, shape))


def _reduction_of(attention: Any) -> Any:
    """Returns the convolution that makes the map of the keys smaller; `None` for all keys."""
    for name in ("sequence_reduction", "sr", "spatial_reduction"):
        layer = attention._modules.get(name)
        if layer is not None:
            return getattr(layer, "sequence_reduction", layer)
    return None


def _count_prefix(x: Tensor, shape: tuple[int, int]) -> int:
    return x.shape[1] - shape[0] * shape[1]


def forward_reduced(
    self: Any, hidden_states: Tensor, height: int, width: int, output_attentions: bool = False
) -> Any:
    """The forward of GLPN's, PVT's and PVT v2's attentions."""
    layer = _reduction_of(self)
    context = hidden_states
    if layer is not None:
        maps = context.transpose(1, 2).unflatten(2, (height, width))
        maps = layer(self.pool(maps)) if hasattr(self, "pool") else layer(maps)
        context = self.layer_norm(maps.flatten(2).transpose(1, 2))
        context = self.act(context) if hasattr(self, "pool") else context
    size = (self.num_attention_heads, self.attention_head_size)
    parts = (self.query(hidden_states), self.key(context), self.value(context))
    q, k, v = (part.unflatten(-1, size).transpose(1, 2) for part in parts)
    dropout: Any = self.attn_drop if hasattr(self, "attn_drop") else self.dropout
    dropout_p = dropout.p if self.training else 0.0
    z, weights = answer_with_weights(q, k, v, dropout_p=dropout_p, with_weights=output_attentions)
    out = z.transpose(1, 2).flatten(2)
    if hasattr(self, "proj"):
        out = self.proj_drop(self.proj(out))
    return (out, weights) if output_attentions else (out,)


_REDUCED = Row(pooled_keys, forward_reduced)
ROWS_OF_PVT = {"PvtEfficientSelfAttention": _REDUCED}
ROWS = {
    "SegformerAttention": Row(pooled_keys, body=REGISTERED.body),
    "GLPNEfficientSelfAttention": _REDUCED,
    "PvtV2SelfAttention": _REDUCED,
}


def add_sites(found: Plan, name: str, encoder: Any, call: Equipment) -> None:
    """Adds the attentions of PVT 1, whose last stage has a class token."""
    if not entry_of(encoder, {"PvtEncoder": True}):
        return
    check = partial(_check, call)
    for stage, embeddings in enumerate(encoder.patch_embeddings):
        count = int(embeddings.cls_token is not None)
        path = f"{name}.block.{stage}".lstrip(".")
        attentions = modules_of(encoder.block[stage], "PvtEfficientSelfAttention", path)
        for each, attention in attentions.items():
            found.sites.append(make_site(each, attention, count, call, _REDUCED, check=check))


def _check(call: Equipment) -> None:
    check_window(call, "PvtEfficientSelfAttention", Plan(replaces_absolute=True))
    refuse(call, {"absolute": "PVT resamples an absolute encoding in every stage"})
