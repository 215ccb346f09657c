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

from irpe.adapters.changes import Undo, put_absolute, set_attribute
from irpe.adapters.decomposed import change_decomposed
from irpe.adapters.equipped import encoding_of
from irpe.adapters.grids import GridSource, grid_of
from irpe.adapters.hosts.transformers.attention import make_site
from irpe.adapters.hosts.transformers.classes import entry_of
from irpe.adapters.plan import Plan, Request
from irpe.errors import UserError

Map = Float[Tensor, "batch rows columns channels"]
Scores = Float[Tensor, "batch heads query key"]

_VECTORS = ("rel_pos_h", "rel_pos_w")  # for each offset of an axis, in the order of the axes


def _attend(
    attention: Any,
    x: Map,
    resize: Callable[[int, int, Tensor], Tensor],
    *,
    with_weights: bool,
    dropout_p: float = 0.0,
) -> tuple[Map, Scores | None]:
    """Returns the attended map and, if asked for, the weights before dropout.

    Args:
        attention: An equipped attention.
        x: A map or windows of one.
        resize: How the host finds the vectors of all pairs of an axis in its own encoding.
        with_weights: Whether the weights are asked for.
        dropout_p: The probability with which a weight is dropped.
    """
    grid = (x.shape[1], x.shape[2])
    grid_of(attention).announce(grid)
    encoding = encoding_of(attention)
    qkv = attention.qkv(x).flatten(1, 2).unflatten(-1, (3, encoding.size.num_heads, -1))
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    vectors = [attention._parameters.get(name) for name in _VECTORS]
    mask = None
    if vectors[0] is not None:
        pairs = [resize(size, size, r) for size, r in zip(grid, vectors, strict=True)]
        mask = _own_scores(q, grid, *pairs)
    arguments: dict[str, Any] = {"grid": grid, "attn_mask": mask, "scale": attention.scale}
    z = encoding(q, k, v, dropout_p=dropout_p, **arguments)
    weights = encoding.weights(q, k, **arguments) if with_weights else None
    return attention.proj(z.transpose(1, 2).flatten(2).unflatten(1, grid)), weights


def _own_scores(q: Tensor, grid: tuple[int, int], rows: Tensor, columns: Tensor) -> Scores:
    """Returns what the host adds to its scaled scores."""
    q = q.unflatten(2, grid)
    of_rows = torch.einsum("bnhwc,hkc->bnhwk", q, rows)
    of_columns = torch.einsum("bnhwc,wkc->bnhwk", q, columns)
    return (of_rows.unsqueeze(-1) + of_columns.unsqueeze(-2)).flatten(4).flatten(2, 3)


def _forward_eager(
    self: Any, hidden_states: Map, output_attentions: bool | None = None
) -> tuple[Map, Tensor]:
    """The forward of an equipped SamVisionAttention, which always returns weights."""
    dropout_p = self.dropout if self.training else 0.0
    out, weights = _attend(
        self, hidden_states, self.get_rel_pos, with_weights=True, dropout_p=dropout_p
    )
    assert weights is not None
    return out, weights.flatten(0, 1)


def _forward_sdpa(
    self: Any, hidden_states: Map, output_attentions: bool | None = False
) -> tuple[Map, None]:
    """The forward of an equipped SamVisionSdpaAttention, which has no dropout and no weights."""
    return _attend(self, hidden_states, self.get_rel_pos, with_weights=False)[0], None


def _forward_vitdet(
    self: Any, hidden_state: Map, output_attentions: bool = False
) -> tuple[Tensor, ...]:
    """The forward of an equipped VitDetAttention."""
    out, weights = _attend(self, hidden_state, get_rel_pos, with_weights=output_attentions)
    return (out,) if weights is None else (out, weights)


_FORWARDS: dict[str, Callable[..., object]] = {
    "SamVisionAttention": _forward_eager,
    "SamVisionSdpaAttention": _forward_sdpa,
    "SamHQVisionAttention": _forward_eager,
    "SamHQVisionSdpaAttention": _forward_sdpa,
    "DeepseekOcr2SamVisionAttention": _forward_eager,
    "DeepseekOcr2SamVisionSdpaAttention": _forward_sdpa,
    "UnlimitedOcrSamVisionAttention": _forward_eager,
    "UnlimitedOcrSamVisionSdpaAttention": _forward_sdpa,
    "GotOcr2VisionAttention": _forward_eager,
    "PPFormulaNetVisionAttention": _forward_eager,
    "SLANeXtVisionAttention": _forward_eager,
    "VitDetAttention": _forward_vitdet,
}
# By the module that owns it: the name of the absolute encoding.
_ABSOLUTE = {
    "SamVisionEncoder": "pos_embed",
    "SamHQVisionEncoder": "pos_embed",
    "VitDetEmbeddings": "position_embeddings",
}


def add_sites(found: Plan, name: str, module: Any, request: Request) -> None:
    """Adds an attention over a map, or changes the absolute encoding."""
    absolute, forward = entry_of(module, _ABSOLUTE), entry_of(module, _FORWARDS)
    if absolute is not None and request.absolute != "keep":
        found.changes.append(partial(_replace_absolute, module, absolute, request.absolute))
    if forward is None:
        return
    vectors = [module._parameters.get(each) for each in _VECTORS]
    has_vectors = vectors[0] is not None
    size = tuple((len(each) + 1) // 2 for each in vectors) if has_vectors else None
    changes = change_decomposed(module, _VECTORS, request.builtin_bias) if has_vectors else []
    if changes:  # the library would initialize what is not there any more
        changes.append(partial(set_attribute, module, "_is_hf_initialized", True))
    site = make_site(
        name,
        module,
        0,
        GridSource(size),
        forward=forward,
        check=partial(_check, type(module).__name__, request),
        changes=changes,
        has_builtin_bias=has_vectors,
    )
    found.sites.append(replace(site, is_decomposed=has_vectors))


def _check(name: str, request: Request) -> None:
    if request.grid is not None or request.num_prefix_tokens:
        raise UserError(
            f"grid {request.grid}, num_prefix_tokens {request.num_prefix_tokens}: {name} gets "
            "maps, whose shape is the grid; leave both to the model"
        )


def _replace_absolute(owner: Any, name: str, absolute: str) -> Undo:
    learned = getattr(owner, name)
    if learned is None:
        raise UserError(
            f"absolute {absolute!r}: {type(owner).__name__} has no absolute encoding to replace; "
            "use 'keep'"
        )
    grid = learned.shape[1:3]
    if learned.ndim == 3:  # a class token that is not used, then the patches
        sides = zip(owner.image_size, owner.patch_size, strict=True)
        grid = [size // patch for size, patch in sides]
    return put_absolute(owner, name, grid, absolute)
