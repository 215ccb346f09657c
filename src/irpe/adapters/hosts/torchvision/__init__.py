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

from irpe.adapters import multihead
from irpe.adapters.answer import answer
from irpe.adapters.equipped import Equipment
from irpe.adapters.grids import SOURCE, measured_map
from irpe.adapters.host import Own, Plan, Row, change_absolute, check_grid, check_window, site_of
from irpe.adapters.hosts.torchvision import sizes as sizes
from irpe.adapters.swaps import set_attribute
from irpe.errors import UserError

_APART = -100.0  # added to the scores of tokens of different regions in a shifted window


def _forward(self: Any, x: Tensor) -> Tensor:
    """The forward of Swin; `x` is batch, rows, columns, channels."""

    def attend(x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = _split_heads(self.qkv(x), self.num_heads)
        return answer(q, k, v, mask, self.attention_dropout if self.training else 0.0)

    return _attend_in_windows(self, x, attend, self.get_relative_position_bias())


def _forward_cosine(self: Any, x: Tensor) -> Tensor:
    """The forward of Swin v2, whose scores have a learned temperature, those of tables too."""

    def attend(x: Tensor, mask: Tensor | None) -> Tensor:
        bias: Any = self.qkv.bias
        if bias is not None:  # keys have none
            of_query, _, of_value = bias.chunk(3)
            bias = torch.cat([of_query, torch.zeros_like(of_query), of_value])
        q, k, v = _split_heads(F.linear(x, self.qkv.weight, bias), self.num_heads)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        temperature = self.logit_scale.clamp(max=math.log(100.0)).exp()
        dropout_p = self.attention_dropout if self.training else 0.0
        return answer(q, k, v, mask, dropout_p, temperature=temperature)

    return _attend_in_windows(self, x, attend, self.get_relative_position_bias())


class NoPositions(nn.Module):
    """Stands where Swin v2 has the network of its own bias, and returns zeros: so is that bias."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.num_heads: int = attention.num_heads

    def forward(self, coordinates: Tensor) -> Tensor:
        """Returns zeros for each offset and head."""
        return coordinates.new_zeros(*coordinates.shape[:-1], self.num_heads)


def _split_heads(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values of windows: windows heads tokens dim."""
    q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def _attend_in_windows(
    attention: Any,
    x: Tensor,
    attend: Callable[[Tensor, Tensor | None], Tensor],
    bias: Tensor,
) -> Tensor:
    """Returns an attended map, batch rows columns channels, from attention in shifted windows.

    `attend` is given the tokens of windows and a mask: it returns windows heads tokens dim.
    """
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
    z = attend(windows.flatten(0, 1), bias if mask is None else bias + mask)
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


_ROWS: dict[type, Row] = {
    ShiftedWindowAttention: Row(
        Own("window_size"), _forward, bias=("relative_position_bias_table",)
    ),
    ShiftedWindowAttentionV2: Row(
        Own("window_size"), _forward_cosine, bias=("cpb_mlp",), no_bias=NoPositions
    ),
}


def find_row(kind: type) -> Row | None:
    """Returns what is known of a class of attentions."""
    return _ROWS.get(kind)


def find_attentions(model: nn.Module, call: Equipment) -> Plan:
    """Returns the attentions of all torchvision transformers in a model, and what else changes."""
    found = Plan()
    for name, module in model.named_modules():
        if isinstance(module, VisionTransformer):
            _add_vit(found, name, module, call)
        row = next((_ROWS[kind] for kind in type(module).__mro__ if kind in _ROWS), None)
        if row is not None:
            attention: Any = module
            kind = type(module).__qualname__
            size = attention.num_heads, attention.qkv.in_features // attention.num_heads
            check = partial(check_window, call, kind, found)
            found.sites.append(site_of(name, module, row, call, *size, check=check))
    return found


def _add_vit(found: Plan, name: str, vit: VisionTransformer, call: Equipment) -> None:
    side, count = vit.image_size // vit.patch_size, call.num_prefix_tokens
    check_grid(call, (side, side))
    count = 1 if count is None else count
    source = measured_map(vit, "conv_proj", count, (side, side), call.grid)
    blocks: dict[str, Any] = {
        path: m for path, m in vit.named_modules(prefix=name) if isinstance(m, EncoderBlock)
    }
    for path, block in blocks.items():
        attention = block.self_attention
        site = site_of(
            f"{path}.self_attention",
            attention,
            multihead.ROW,
            call,
            attention.num_heads,
            attention.head_dim,
            count,
            changes=set_attribute(attention, SOURCE, source),
        )
        found.sites.append(site)
    found.changes += source.follow(vit, blocks.values())
    change_absolute(found, vit.encoder, "pos_embedding", (side, side), call.absolute)


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
