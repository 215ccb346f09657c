"""timm's vision transformers with the stock attention: ViT, DeiT, DINOv2, ..."""

from functools import partial
from typing import Any

from timm.layers.attention import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from irpe.adapters.changes import Undo, put_absolute, set_attribute
from irpe.adapters.equipped import encoding_of
from irpe.adapters.grids import GridSource, follow_grid, grid_of
from irpe.adapters.plan import Plan, Request, Site


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


class RecordGrid:
    """A hook on the patch embedding that notes the grid of each input.

    Args:
        source: Where the attentions look the grid up.
    """

    def __init__(self, source: GridSource) -> None:
        self.source = source

    def __call__(self, embedding: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Notes the grid."""
        height, width = embedding.dynamic_feat_size(inputs[0].shape[-2:])
        self.source.grid = (height, width)


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
    source = GridSource(request.grid or vit.patch_embed.grid_size)
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
    if request.grid is None:
        found.changes.append(partial(_follow_grid, vit, source))
    has_absolute = request.requires_absolute or vit.pos_embed is not None
    if request.absolute != "keep" and has_absolute:
        found.changes.append(partial(_replace_absolute, vit, request.absolute))


def _follow_grid(vit: VisionTransformer, source: GridSource) -> Undo:
    blocks: Any = vit.blocks
    return follow_grid(vit.patch_embed, RecordGrid(source), blocks, source)


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
