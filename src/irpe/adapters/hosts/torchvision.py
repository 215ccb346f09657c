"""torchvision: VisionTransformer and SwinTransformer, versions 1 and 2."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torchvision.models.swin_transformer import (
    PatchMergingV2,
    ShiftedWindowAttention,
    ShiftedWindowAttentionV2,
    SwinTransformer,
    SwinTransformerBlockV2,
)
from torchvision.models.vision_transformer import EncoderBlock, VisionTransformer

from irpe.adapters.changes import drop_module, drop_parameter, put_absolute
from irpe.adapters.equipped import encoding_of
from irpe.adapters.following import follow_grid, map_source
from irpe.adapters.grids import GridSource, grid_of
from irpe.adapters.multihead import RPEMultiheadAttention
from irpe.adapters.plan import Plan, Request, Site, check_grid, check_window
from irpe.errors import UserError

_BIAS = "relative_position_bias_table"
_APART = -100.0  # added to the scores of tokens of different regions in a shifted window


class RPEShiftedWindowAttention(ShiftedWindowAttention):
    """Swin's attention with an encoding, on the grid of a window, its own bias kept or dropped."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the attended tokens; `x` is batch, rows, columns, channels."""
        has_bias = self._parameters["relative_position_bias_table"] is not None
        bias = self.get_relative_position_bias() if has_bias else None  # 1 heads tokens tokens
        return _attend_in_windows(self, x, self._attend, bias)

    def _attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Returns the attended tokens of windows: windows heads tokens dim."""
        q, k, v = _split_heads(self.qkv(x), self.num_heads)
        dropout_p = self.attention_dropout if self.training else 0.0
        grid = grid_of(self).current()
        return encoding_of(self)(q, k, v, grid=grid, attn_mask=mask, dropout_p=dropout_p)


class RPEShiftedWindowAttentionV2(ShiftedWindowAttentionV2):
    """The attention of Swin v2 with an encoding, whose scores have the learned temperature too."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the attended tokens; `x` is batch, rows, columns, channels."""
        bias = None if self._modules["cpb_mlp"] is None else self.get_relative_position_bias()
        return _attend_in_windows(self, x, self._attend, bias)

    def _attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Returns the attended tokens of windows: windows heads tokens dim."""
        bias: Any = self.qkv.bias
        if bias is not None:  # keys have none
            of_query, _, of_value = bias.chunk(3)
            bias = torch.cat([of_query, torch.zeros_like(of_query), of_value])
        q, k, v = _split_heads(F.linear(x, self.qkv.weight, bias), self.num_heads)
        return encoding_of(self)(
            F.normalize(q, dim=-1),
            F.normalize(k, dim=-1),
            v,
            grid=grid_of(self).current(),
            attn_mask=mask,
            dropout_p=self.attention_dropout if self.training else 0.0,
            temperature=self.logit_scale.clamp(max=math.log(100.0)).exp(),
        )


def _split_heads(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values of windows: windows heads tokens dim."""
    q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def _attend_in_windows(
    attention: Any,
    x: Tensor,
    attend: Callable[[Tensor, Tensor | None], Tensor],
    bias: Tensor | None,
) -> Tensor:
    """Returns an attended map, batch rows columns channels, from attention in shifted windows."""
    window, rows, columns = attention.window_size, x.shape[1], x.shape[2]
    x = F.pad(x, (0, 0, 0, -columns % window[1], 0, -rows % window[0]))
    size = x.shape[1:3]
    axes = zip(attention.shift_size, window, size, strict=True)
    shift = [0 if width >= length else offset for offset, width, length in axes]
    rolled = torch.roll(x, (-shift[0], -shift[1]), dims=(1, 2))
    windows = _split(rolled, window)  # batch windows tokens channels
    mask = _mask(window, size, shift, x)
    if mask is not None:
        mask = mask.repeat(x.shape[0], 1, 1, 1)  # an exporter would fix len(x)
    masks = [each for each in (bias, mask) if each is not None]
    z = attend(windows.flatten(0, 1), sum(masks[1:], masks[0]) if masks else None)
    z = attention.proj(z.transpose(1, 2).flatten(2))
    z = F.dropout(z, attention.dropout, attention.training).unflatten(0, windows.shape[:2])
    z = torch.roll(_join(z, size, window), (shift[0], shift[1]), dims=(1, 2))
    return z[:, :rows, :columns].contiguous()


def _mask(
    window: Sequence[int], size: Sequence[int], shift: Sequence[int], like: Tensor
) -> Tensor | None:
    """Returns the mask of shifted windows: windows 1 tokens tokens."""
    if not any(shift):
        return None
    rows, columns = (_regions(*axis) for axis in zip(size, window, shift, strict=True))
    region = (3 * rows[:, None] + columns).to(like.device)[None, :, :, None]
    region = _split(region, window)[0, ..., 0]  # windows tokens
    is_apart = region[:, None, :, None] != region[:, None, None, :]
    return torch.zeros_like(is_apart, dtype=like.dtype).masked_fill(is_apart, _APART)


def _regions(size: int, window: int, shift: int) -> Tensor:
    """Returns which of three regions of the image each coordinate of a rolled axis comes from."""
    position = torch.arange(size)
    if shift == 0:
        return torch.zeros_like(position)
    return (position >= size - window).long() + (position >= size - shift).long()


def _split(x: Tensor, window: Sequence[int]) -> Tensor:
    """Cuts an image into windows: batch windows tokens channels."""
    x = x.unflatten(2, (-1, window[1])).unflatten(1, (-1, window[0]))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _join(x: Tensor, size: Sequence[int], window: Sequence[int]) -> Tensor:
    """Puts windows together again: batch rows columns channels."""
    x = x.unflatten(2, tuple(window)).unflatten(1, (size[0] // window[0], size[1] // window[1]))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def find_attentions(model: nn.Module, request: Request) -> Plan:
    """Returns the attentions of all torchvision transformers in a model, and what else changes."""
    found = Plan()
    for name, module in model.named_modules():
        if isinstance(module, VisionTransformer):
            _add_vit(found, name, module, request)
        elif isinstance(module, ShiftedWindowAttention):
            found.sites.append(_site_in_windows(name, module, request))
    return found


def _add_vit(found: Plan, name: str, vit: VisionTransformer, request: Request) -> None:
    side, count = vit.image_size // vit.patch_size, request.num_prefix_tokens
    check_grid(request, (side, side))
    source = map_source(request.grid, (side, side), vit, "conv_proj")
    blocks: dict[str, Any] = {
        path: m for path, m in vit.named_modules(prefix=name) if isinstance(m, EncoderBlock)
    }
    for path, block in blocks.items():
        found.sites.append(
            Site(
                name=f"{path}.self_attention",
                attention=block.self_attention,
                equipped_class=RPEMultiheadAttention,
                num_heads=block.self_attention.num_heads,
                head_dim=block.self_attention.head_dim,
                num_prefix_tokens=1 if count is None else count,
                grid=source,
            )
        )
    found.changes.append(partial(follow_grid, source, blocks.values()))
    if request.absolute != "keep":
        found.changes.append(
            partial(put_absolute, vit.encoder, "pos_embedding", (side, side), request.absolute)
        )


def _site_in_windows(name: str, attention: ShiftedWindowAttention, request: Request) -> Site:
    is_second = isinstance(attention, ShiftedWindowAttentionV2)
    drop = partial(drop_module, attention, "cpb_mlp")
    drop = drop if is_second else partial(drop_parameter, attention, _BIAS)
    return Site(
        name=name,
        attention=attention,
        equipped_class=RPEShiftedWindowAttentionV2 if is_second else RPEShiftedWindowAttention,
        num_heads=attention.num_heads,
        head_dim=attention.qkv.in_features // attention.num_heads,
        num_prefix_tokens=0,
        grid=GridSource(attention.window_size),
        changes=[drop] if request.builtin_bias == "drop" else [],
        check=partial(check_window, request, has_absolute=False),
        has_builtin_bias=True,
    )


def describe_model(model: nn.Module) -> dict[str, Any] | None:
    """Returns the arguments with which a model of torchvision was made, as far as it keeps them."""
    if isinstance(model, VisionTransformer):
        first: Any = model.encoder.layers[0]
        names = ("image_size", "patch_size", "hidden_dim", "mlp_dim", "dropout")
        names = (*names, "attention_dropout", "num_classes", "representation_size")
        return {
            "kind": "VisionTransformer",
            "num_layers": len(model.encoder.layers),
            "num_heads": first.num_heads,
            **{name: getattr(model, name) for name in names},
        }
    if not isinstance(model, SwinTransformer):
        return None
    features: Any = model.features
    stages = features[1::2]
    first, last = stages[0][0], stages[-1][-1]
    is_second = isinstance(first, SwinTransformerBlockV2)
    return {
        "kind": "SwinTransformerV2" if is_second else "SwinTransformer",
        "patch_size": list(features[0][0].kernel_size),
        "embed_dim": features[0][0].out_channels,
        "depths": [len(stage) for stage in stages],
        "num_heads": [stage[0].attn.num_heads for stage in stages],
        "window_size": list(first.attn.window_size),
        "mlp_ratio": first.mlp[0].out_features / first.mlp[0].in_features,
        "dropout": first.attn.dropout,
        "attention_dropout": first.attn.attention_dropout,
        "stochastic_depth_prob": round(last.stochastic_depth.p, 12),  # as it was before a division
        "num_classes": model.num_classes,
    }


def build_model(arguments: dict[str, Any]) -> nn.Module:
    """Returns the plain model of a description."""
    second = partial(SwinTransformer, block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2)
    kinds = {
        "VisionTransformer": VisionTransformer,
        "SwinTransformer": SwinTransformer,
        "SwinTransformerV2": second,
    }
    arguments = dict(arguments)
    kind = arguments.pop("kind")
    if kind not in kinds:
        raise UserError(f"kind {kind!r} is not one of {', '.join(kinds)}")
    return kinds[kind](**arguments)
