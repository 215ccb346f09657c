"""timm: vision transformers with the stock attention, and Swin transformers."""

from functools import partial
from typing import Any

import timm
from timm.layers.attention import Attention
from timm.layers.drop import DropPath
from timm.layers.mlp import Mlp
from timm.models.swin_transformer import SwinTransformer, WindowAttention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from irpe.adapters.grids import follow_grid
from irpe.adapters.plan import (
    GridSource,
    Plan,
    Request,
    Site,
    Undo,
    check_plain_window,
    drop_parameter,
    encoding_of,
    grid_of,
    put_absolute,
)

_BIAS = "relative_position_bias_table"


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


class RPEWindowAttention(WindowAttention):
    """Swin's attention with an encoding, on the grid of a window, its own bias kept or dropped."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns the attended tokens of each window."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # windows tokens 3 heads dim
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout_p = self.attn_drop.p if self.training else 0.0
        z = encoding_of(self)(
            q,
            k,
            v,
            grid=self.window_size,
            attn_mask=self._mask(mask, x.shape[0]),
            dropout_p=dropout_p,
            scale=self.scale,
        )
        return self.proj_drop(self.proj(z.transpose(1, 2).flatten(2)))

    def _mask(self, shift: Tensor | None, num_windows: int) -> Tensor | None:
        """Returns Swin's own bias and the mask of shifted windows, added up."""
        bias = self._get_rel_pos_bias() if self._has_bias() else None  # 1 heads tokens tokens
        if shift is None:
            return bias
        shift = shift.repeat(num_windows // len(shift), 1, 1).unsqueeze(1)
        return shift if bias is None else bias + shift

    def _has_bias(self) -> bool:
        return self._parameters["relative_position_bias_table"] is not None

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Changes the window; the encoding needs no interpolation."""
        if self._has_bias():
            super().set_window_size(window_size)
            grid_of(self).grid = self.window_size
            return
        self.window_size = tuple(window_size)
        self.window_area = window_size[0] * window_size[1]
        grid_of(self).grid = self.window_size


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
    """Stands for a model's own `set_input_size`, which would learn an absolute encoding again.

    Args:
        vit: The model.
        absolute: What it has in the place of its absolute encoding.
    """

    def __init__(self, vit: VisionTransformer, absolute: str) -> None:
        self.vit, self.absolute = vit, absolute

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Changes the size of the input."""
        type(self.vit).set_input_size(self.vit, *args, **kwargs)
        _put_absolute(self.vit, self.absolute)


def plan(model: nn.Module, request: Request) -> Plan:
    """Returns the attentions of all timm transformers in a model, and what else changes."""
    found = Plan()
    for name, module in model.named_modules():
        if isinstance(module, VisionTransformer):
            _plan_vit(found, module, f"{name}." if name else "", request)
        elif isinstance(module, WindowAttention):
            _plan_window(found, module, name, request)
    return found


def _plan_vit(found: Plan, vit: VisionTransformer, prefix: str, request: Request) -> None:
    if not isinstance(vit.patch_drop, nn.Identity):
        raise ValueError(
            "patch_drop removes tokens, and the rest is no grid any more: create the model with "
            "patch_drop_rate=0"
        )
    source = GridSource(request.grid or vit.patch_embed.grid_size)
    count = request.num_prefix_tokens
    blocks: Any = vit.blocks
    for name, attention in vit.blocks.named_modules(prefix=f"{prefix}blocks"):
        if isinstance(attention, Attention):
            number = int(name.removeprefix(f"{prefix}blocks.").split(".")[0])
            found.sites.append(
                Site(
                    name=name,
                    attention=attention,
                    equipped_class=RPEViTAttention,
                    num_heads=attention.num_heads,
                    head_dim=attention.head_dim,
                    num_prefix_tokens=vit.num_prefix_tokens if count is None else count,
                    grid=source,
                    block=blocks[number],
                    block_dim=vit.embed_dim,
                )
            )
    if request.grid is None:
        found.changes.append(partial(_follow_grid, vit, source))
    if request.absolute == "none if any":
        if vit.pos_embed is not None:
            found.changes.append(partial(_replace_absolute, vit, "none"))
    elif request.absolute != "keep":
        found.changes.append(partial(_replace_absolute, vit, request.absolute))


def _plan_window(found: Plan, attention: WindowAttention, name: str, request: Request) -> None:
    drops_bias = request.builtin_bias == "drop"
    window: Any = attention.window_size
    found.sites.append(
        Site(
            name=name,
            attention=attention,
            equipped_class=RPEWindowAttention,
            num_heads=attention.num_heads,
            head_dim=attention.qkv.out_features // (3 * attention.num_heads),
            num_prefix_tokens=0,
            grid=GridSource((window[0], window[1])),
            change=partial(drop_parameter, attention, _BIAS) if drops_bias else None,
            check=partial(check_plain_window, request),
        )
    )


def _follow_grid(vit: VisionTransformer, source: GridSource) -> Undo:
    blocks: Any = vit.blocks
    return follow_grid(vit.patch_embed, RecordGrid(source), blocks, source)


def _replace_absolute(vit: VisionTransformer, absolute: str) -> Undo:
    """Puts zeros or sines in the place of the learned encoding, for good."""
    undo_values = _put_absolute(vit, absolute)
    before = vit.__dict__.get("set_input_size")
    vit.__dict__["set_input_size"] = SetInputSize(vit, absolute)

    def undo() -> None:
        undo_values()
        del vit.__dict__["set_input_size"]
        if before is not None:
            vit.__dict__["set_input_size"] = before

    return undo


def _put_absolute(vit: VisionTransformer, absolute: str) -> Undo:
    if vit.pos_embed is None:
        raise ValueError(
            f"absolute {absolute!r}: the model has no absolute encoding to replace; use 'keep'"
        )
    return put_absolute(vit, "pos_embed", vit.patch_embed.grid_size, absolute)


_ARGUMENTS = {
    "model_name", "num_classes", "in_chans", "img_size", "global_pool", "drop_path_rate", "depth",
    "embed_dim", "num_heads", "patch_size", "dynamic_img_size",
    "mlp_ratio",
}  # fmt: skip


def describe(model: nn.Module) -> dict[str, Any] | None:
    """Returns the arguments of `timm.create_model` that a model tells, if it is one of timm's."""
    if not isinstance(model, VisionTransformer | SwinTransformer):
        return None
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    attentions = [m for m in model.modules() if isinstance(m, Attention | WindowAttention)]
    if not config.get("architecture") or not attentions:
        return None
    embedding: Any = model.patch_embed
    rates = [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]
    arguments = {
        "model_name": config["architecture"],
        "num_classes": model.num_classes,
        "in_chans": model.in_chans,
        "img_size": embedding.img_size,
        "drop_path_rate": max(rates, default=0.0),
    }
    if isinstance(model, VisionTransformer):
        arguments |= {
            "global_pool": model.global_pool,
            "depth": len(model.blocks),
            "embed_dim": model.embed_dim,
            "num_heads": attentions[0].num_heads,
            "patch_size": embedding.patch_size[0],
            "dynamic_img_size": model.dynamic_img_size,
        }
        blocks: Any = model.blocks
        mlp: Any = getattr(blocks[0], "mlp", None)
        if type(mlp) is Mlp:
            first: Any = mlp.fc1
            arguments["mlp_ratio"] = first.out_features / first.in_features
    return arguments


def build(arguments: dict[str, Any]) -> nn.Module:
    """Returns the plain model of a description: no other argument of timm's gets through."""
    unknown = sorted(set(arguments) - _ARGUMENTS)
    if unknown or not timm.is_model(arguments["model_name"]):
        raise ValueError(f"{unknown or arguments['model_name']} is no part of a timm model")
    return timm.create_model(**arguments)
