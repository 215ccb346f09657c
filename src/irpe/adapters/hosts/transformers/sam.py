"""transformers' SAM and ViTDet: attention over maps, in windows and over the whole image.

Their attentions get the map itself (batch, rows, columns, channels), so its shape is the grid. They
have a decomposed encoding of their own (see `decomposed`), which is kept, dropped or converted.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.models.vitdet.modeling_vitdet import get_rel_pos

from irpe.adapters.answer import answer_with_weights
from irpe.adapters.host import Given, Row
from irpe.adapters.offset_vectors import grid_of_vectors

Map = Float[Tensor, "batch rows columns channels"]
Scores = Float[Tensor, "batch heads query key"]

_VECTORS = ("rel_pos_h", "rel_pos_w")  # for each offset of an axis, in the order of the axes


def _attend(
    attention: Any,
    x: Map,
    num_heads: int,
    vectors: Callable[[int, int, Tensor], Tensor] | None,
    *,
    with_weights: bool,
    dropout_p: float = 0.0,
) -> tuple[Map, Scores | None]:
    """Returns the attended map and, if asked for, the weights before dropout.

    `vectors` finds those of all pairs of an axis in the host's own encoding; `None` if it has none.
    """
    grid = x.shape[1:3]
    qkv = attention.qkv(x).flatten(1, 2).unflatten(-1, (3, num_heads, -1))
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    mask = None
    if vectors is not None:
        learned = (getattr(attention, name) for name in _VECTORS)
        pairs = [vectors(size, size, r) for size, r in zip(grid, learned, strict=True)]
        mask = _own_scores(q, grid, *pairs)
    z, weights = answer_with_weights(
        q, k, v, mask, dropout_p, attention.scale, with_weights=with_weights
    )
    return attention.proj(z.transpose(1, 2).flatten(2).unflatten(1, grid)), weights


def _own_scores(q: Tensor, grid: torch.Size, rows: Tensor, columns: Tensor) -> Scores:
    """Returns what the host adds to its scaled scores."""
    q = q.unflatten(2, grid)
    of_rows = torch.einsum("bnhwc,hkc->bnhwk", q, rows)
    of_columns = torch.einsum("bnhwc,wkc->bnhwk", q, columns)
    return (of_rows.unsqueeze(-1) + of_columns.unsqueeze(-2)).flatten(4).flatten(2, 3)


def _forward_eager(
    self: Any, hidden_states: Map, output_attentions: bool | None = None
) -> tuple[Map, Tensor]:
    """The forward of SamVisionAttention, which always returns weights."""
    vectors = self.get_rel_pos if self.use_rel_pos else None
    dropout_p = self.dropout if self.training else 0.0
    out, weights = _attend(
        self,
        hidden_states,
        self.num_attention_heads,
        vectors,
        with_weights=True,
        dropout_p=dropout_p,
    )
    assert weights is not None
    return out, weights.flatten(0, 1)


def _forward_vitdet(
    self: Any, hidden_state: Map, output_attentions: bool = False
) -> tuple[Tensor, ...]:
    """The forward of VitDetAttention."""
    vectors = get_rel_pos if self.use_relative_position_embeddings else None
    out, weights = _attend(
        self, hidden_state, self.num_heads, vectors, with_weights=output_attentions
    )
    return (out,) if weights is None else (out, weights)


_SDPA = Row(
    Given(1, 3),
    bias=_VECTORS,
    off={"use_rel_pos": bool},
    is_decomposed=True,
    first_grid=partial(grid_of_vectors, names=_VECTORS),
)
_EAGER = replace(_SDPA, forward=_forward_eager)
_VITDET = replace(_SDPA, forward=_forward_vitdet, off={"use_relative_position_embeddings": bool})
_FAMILIES = ("Sam", "SamHQ", "DeepseekOcr2Sam", "UnlimitedOcrSam")
ROWS = {
    **{f"{name}VisionAttention": _EAGER for name in _FAMILIES},
    **{f"{name}VisionSdpaAttention": _SDPA for name in _FAMILIES},
    **{f"{name}VisionAttention": _EAGER for name in ("GotOcr2", "PPFormulaNet", "SLANeXt")},
    "VitDetAttention": _VITDET,
}


def _grid_of_map(encoder: Any) -> tuple[int, ...]:
    return tuple(encoder.pos_embed.shape[1:3])


def _grid_of_patches(embeddings: Any) -> tuple[int, ...]:
    sides = zip(embeddings.image_size, embeddings.patch_size, strict=True)
    return tuple(size // patch for size, patch in sides)


ABSOLUTE = {
    "SamVisionEncoder": ("pos_embed", _grid_of_map),
    "SamHQVisionEncoder": ("pos_embed", _grid_of_map),
    "VitDetEmbeddings": ("position_embeddings", _grid_of_patches),  # after that of a class token
}
