"""timm's Swin transformers, versions 1 and 2."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F  # noqa: N812
from timm.models.swin_transformer import WindowAttention
from timm.models.swin_transformer_v2 import WindowAttention as WindowAttentionV2
from timm.models.swin_transformer_v2_cr import WindowMultiHeadAttention
from torch import Tensor, nn

from irpe.adapters.changes import Undo, drop_module, drop_parameter
from irpe.adapters.grids import GridSource, grid_of
from irpe.adapters.hosts.timm.attending import (
    add_masks,
    attend,
    head_dim_of,
    project_out,
    project_with_bias,
    split_heads,
)
from irpe.adapters.plan import Plan, Request, Site, check_window


class RPEWindowAttention(WindowAttention):
    """Swin's attention with an encoding, on the grid of a window, its own bias kept or dropped."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns the attended tokens of each window."""
        q, k, v = split_heads(self.qkv(x), self.num_heads)
        mask = self._mask(mask, x.shape[0])
        return project_out(self, attend(self, q, k, v, self.window_size, mask))

    def _mask(self, shift: Tensor | None, num_windows: int) -> Tensor | None:
        """Returns the sum of Swin's own bias and the mask of shifted windows."""
        bias = self._get_rel_pos_bias() if self._has_bias() else None  # 1 heads tokens tokens
        return add_masks(bias, repeat_shift(shift, num_windows))

    def _has_bias(self) -> bool:
        return self._parameters["relative_position_bias_table"] is not None

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Changes the window; the encoding needs no interpolation."""
        if self._has_bias():
            super().set_window_size(window_size)
        else:
            self.window_size = tuple(window_size)
            self.window_area = window_size[0] * window_size[1]
        grid_of(self).grid = self.window_size


class RPEWindowAttentionV2(WindowAttentionV2):
    """The attention of Swin v2 with an encoding, whose scores have the learned temperature too."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns the attended tokens of each window."""
        q, k, v = project_with_bias(self, x)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        temperature = self.logit_scale.clamp(max=math.log(1.0 / 0.01)).exp()
        mask = add_masks(self._own_bias(), repeat_shift(mask, x.shape[0]))
        z = attend(self, q, k, v, self.window_size, mask, temperature=temperature)
        return project_out(self, z)

    def _own_bias(self) -> Tensor | None:
        """Returns its continuous bias, 1 heads tokens tokens, if it has one still."""
        perceptron: Any = self._modules["cpb_mlp"]
        if perceptron is None:
            return None
        table = perceptron(self.relative_coords_table).view(-1, self.num_heads)
        bias = table[self.relative_position_index].permute(2, 0, 1)
        return 16 * bias.sigmoid().unsqueeze(0)

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Changes the window; the encoding needs no interpolation."""
        super().set_window_size(window_size)
        grid_of(self).grid = self.window_size


class RPEWindowAttentionV2Cr(WindowMultiHeadAttention):
    """timm's second reading of Swin v2 with an encoding, and the temperature likewise."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns the attended tokens of each window."""
        q, k, v = split_heads(self.qkv(x), self.num_heads)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        temperature = self.logit_scale.clamp(max=math.log(1.0 / 0.01)).exp()[:, None, None]
        own = None
        if self._modules["meta_mlp"] is not None:
            own = self._relative_positional_encodings()
        mask = add_masks(own, repeat_shift(mask, x.shape[0]))
        z = attend(self, q, k, v, self.window_size, mask, temperature=temperature)
        return project_out(self, z)

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Changes the window; the encoding needs no interpolation."""
        super().set_window_size(window_size)
        grid_of(self).grid = self.window_size


def repeat_shift(shift: Tensor | None, num_windows: int) -> Tensor | None:
    """Returns the mask of shifted windows for all windows of a batch: windows 1 tokens tokens."""
    return None if shift is None else shift.repeat(num_windows // len(shift), 1, 1).unsqueeze(1)


# The equipped class, and what drops the bias of an attention's own.
_EQUIPPED: dict[type[nn.Module], tuple[type[nn.Module], Callable[[nn.Module], Undo]]] = {
    WindowAttention: (
        RPEWindowAttention,
        partial(drop_parameter, name="relative_position_bias_table"),
    ),
    WindowAttentionV2: (RPEWindowAttentionV2, partial(drop_module, name="cpb_mlp")),
    WindowMultiHeadAttention: (RPEWindowAttentionV2Cr, partial(drop_module, name="meta_mlp")),
}


def add_sites(found: Plan, name: str, module: nn.Module, request: Request) -> None:
    """Adds an attention in windows, each of which is a grid of its own."""
    kind = next((kind for kind in _EQUIPPED if isinstance(module, kind)), None)
    if kind is None:
        return
    attention: Any = module
    equipped, drop = _EQUIPPED[kind]
    found.sites.append(
        Site(
            name=name,
            attention=module,
            equipped_class=equipped,
            num_heads=attention.num_heads,
            head_dim=head_dim_of(attention),
            num_prefix_tokens=0,
            grid=GridSource(attention.window_size),
            changes=[partial(drop, module)] if request.builtin_bias == "drop" else [],
            check=partial(check_window, request, has_absolute=False),
            has_builtin_bias=True,
        )
    )
