"""timm's vision transformers with the stock attention: ViT, DeiT, DINOv2, ..."""

from functools import partial
from typing import Any

from timm.layers.attention import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from irpe.adapters.changes import Undo, put_absolute, set_attribute
from irpe.adapters.equipped import encoding_of
from irpe.adapters.following import FollowedGrid, ToldGrid, follow_grid, followed_grid
from irpe.adapters.grids import GridSource, grid_of
from irpe.adapters.plan import Plan, Request, Site, check_grid


class RPEViTAttention(Attention):
    """timm's attention with an encoding."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Returns the attended tokens."""
        if is_causal:
            raise ValueError("is_causal=True: tokens of an image have no order; pass attn_mask")
        gate = getattr(self, "gate", None)  # not in older releases of timm
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # batch tokens 3 heads dim
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout_p = self.attn_drop.p if self.training else 0.0
        z = encoding_of(self)(
            self.q_norm(q),
            self.k_norm(k),
            v,
            grid=grid_of(self).current(),
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            scale=self.scale,
        )
        z = self.norm(z.transpose(1, 2).flatten(2))
        if gate is not None:
            z = z * gate(x).sigmoid()
        return self.proj_drop(self.proj(z))


class SetInputSize:
    """Replaces a model's own `set_input_size`, which would make a learned encoding again.

    Args:
        vit: The model.
        absolute: What replaced its absolute encoding: "none" or "sinusoid".
    """

    def __init__(self, vit: VisionTransformer, absolute: str) -> None:
        self.vit, self.absolute = vit, absolute

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Changes the size of the input."""
        type(self.vit).set_input_size(self.vit, *args, **kwargs)
        _put_absolute(self.vit, self.absolute)


def add_sites(found: Plan, name: str, vit: nn.Module, request: Request) -> None:
    """Adds the attentions of a vision transformer, and what else changes in it."""
    if not isinstance(vit, VisionTransformer):
        return
    if not isinstance(vit.patch_drop, nn.Identity):
        raise ValueError(
            "patch_drop removes tokens, and the rest is not a grid any more: create the model with "
            "patch_drop_rate=0"
        )
    source = _grid_source(vit, request)
    count = request.num_prefix_tokens
    for index, block in enumerate(vit.blocks):
        for path, attention in block.named_modules(prefix=f"{name}.blocks.{index}".lstrip(".")):
            if isinstance(attention, Attention):
                site = Site(
                    name=path,
                    attention=attention,
                    equipped_class=RPEViTAttention,
                    num_heads=attention.num_heads,
                    head_dim=attention.head_dim,
                    num_prefix_tokens=vit.num_prefix_tokens if count is None else count,
                    grid=source,
                    block=block,
                    block_dim=vit.embed_dim,
                )
                found.sites.append(site)
    blocks: Any = vit.blocks
    found.changes.append(partial(follow_grid, source, blocks))
    has_absolute = request.requires_absolute or vit.pos_embed is not None
    if request.absolute != "keep" and has_absolute:
        found.changes.append(partial(_replace_absolute, vit, request.absolute))


def _grid_source(vit: VisionTransformer, request: Request) -> GridSource:
    size: Any = vit.patch_embed.grid_size
    if getattr(vit.patch_embed, "strict_img_size", False):
        check_grid(request, size)
    if request.grid is not None:
        return ToldGrid(request.grid, vit, "patch_embed", _measure)
    return followed_grid(vit) or FollowedGrid(size, vit, "patch_embed", _measure)


def _measure(embedding: Any, image: Tensor, output: Tensor) -> tuple[int, ...]:
    """Returns the grid that a patch embedding makes of an image."""
    if output.ndim == 4:  # batch rows columns channels, of models with dynamic_img_size
        return tuple(output.shape[1:3])
    if hasattr(embedding, "dynamic_feat_size"):
        return tuple(embedding.dynamic_feat_size(image.shape[-2:]))
    return tuple(embedding.grid_size)


def _replace_absolute(vit: VisionTransformer, absolute: str) -> Undo:
    """Replaces the learned encoding by zeros or sinusoids, also after `set_input_size`."""
    undo_values = _put_absolute(vit, absolute)
    undo_method = set_attribute(vit, "set_input_size", SetInputSize(vit, absolute))

    def undo() -> None:
        undo_method()
        undo_values()

    return undo


def _put_absolute(vit: VisionTransformer, absolute: str) -> Undo:
    if vit.pos_embed is None:
        raise ValueError(
            f"absolute {absolute!r}: the model has no absolute encoding to replace; use 'keep'"
        )
    return put_absolute(vit, "pos_embed", vit.patch_embed.grid_size, absolute)
