"""timm's VisionTransformerSAM: attention on maps, in windows or over all of them."""

from functools import partial
from typing import Any

from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models.vision_transformer_sam import (
    Attention,
    Block,
    VisionTransformerSAM,
    get_decomposed_rel_pos_bias,
)
from torch import Tensor, nn

from irpe.adapters.changes import put_absolute
from irpe.adapters.decomposed import change_decomposed
from irpe.adapters.grids import GridSource
from irpe.adapters.hosts.timm.attending import attend, map_grid, project_out, split_heads
from irpe.adapters.plan import Plan, Request, Site, check_window

_VECTORS = ("rel_pos_h", "rel_pos_w")


class RPESAMAttention(Attention):
    """SAM's attention with an encoding; its own is kept, dropped, or held by our tables."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the attended map; `x` is batch rows columns channels."""
        grid = map_grid(self, x.shape[1:3])
        q, k, v = split_heads(self.qkv(x.flatten(1, 2)), self.num_heads)
        q, k = self.q_norm(q).type_as(v), self.k_norm(k).type_as(v)
        rope: Any = self.rope
        rotate = None if rope is None else partial(_rotate, rope.get_embed())
        z = attend(self, q, k, v, grid, self._own_scores(q, grid), rotate)
        return project_out(self, z).unflatten(1, grid)

    def _own_scores(self, q: Tensor, grid: tuple[int, int]) -> Tensor | None:
        """Returns what SAM's own encoding adds to the scaled scores, an element for each pair."""
        rows, columns = (self._parameters.get(name) for name in _VECTORS)
        if rows is None or columns is None:
            return None
        scores = get_decomposed_rel_pos_bias(q.flatten(0, 1), rows, columns, grid, grid)
        return scores.unflatten(0, q.shape[:2])


def _rotate(rope: Tensor, x: Tensor) -> Tensor:
    return apply_rot_embed_cat(x, rope).type_as(x)


def add_sites(found: Plan, name: str, module: nn.Module, request: Request) -> None:
    """Adds the attentions of a model, and what else changes in it."""
    if not isinstance(module, VisionTransformerSAM):
        return
    sam: Any = module
    grid = tuple(sam.patch_embed.grid_size)
    for index, block in enumerate(sam.blocks):
        if isinstance(block, Block) and isinstance(block.attn, Attention):
            window = block.window_size
            path = f"{name}.blocks.{index}.attn".lstrip(".")
            source = GridSource((window, window) if window else grid)
            found.sites.append(_site_of(path, block.attn, source, request))
    if request.absolute != "keep" and (request.requires_absolute or sam.pos_embed is not None):
        found.changes.append(partial(put_absolute, sam, "pos_embed", grid, request.absolute))


def _site_of(name: str, attention: Any, source: GridSource, request: Request) -> Site:
    has_vectors = attention._parameters.get(_VECTORS[0]) is not None
    return Site(
        name=name,
        attention=attention,
        equipped_class=RPESAMAttention,
        num_heads=attention.num_heads,
        head_dim=attention.head_dim,
        num_prefix_tokens=0,
        grid=source,
        changes=change_decomposed(attention, _VECTORS, request.builtin_bias) if has_vectors else [],
        check=partial(check_window, request, has_absolute=True, kind="VisionTransformerSAM"),
        has_builtin_bias=has_vectors,
        is_decomposed=has_vectors,
        rotates=attention.rope is not None,
    )
