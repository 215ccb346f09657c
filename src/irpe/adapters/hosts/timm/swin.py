"""timm's Swin transformers."""

from functools import partial
from typing import Any

from timm.models.swin_transformer import WindowAttention
from torch import Tensor, nn

from irpe.adapters.changes import drop_parameter
from irpe.adapters.equipped import encoding_of
from irpe.adapters.grids import GridSource, grid_of
from irpe.adapters.plan import Plan, Request, Site, check_window

_BIAS = "relative_position_bias_table"


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
        """Returns the sum of Swin's own bias and the mask of shifted windows."""
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
        else:
            self.window_size = tuple(window_size)
            self.window_area = window_size[0] * window_size[1]
        grid_of(self).grid = self.window_size


def add_sites(found: Plan, name: str, attention: nn.Module, request: Request) -> None:
    """Adds an attention in windows, each of which is a grid of its own."""
    if not isinstance(attention, WindowAttention):
        return
    window: Any = attention.window_size
    drop = partial(drop_parameter, attention, _BIAS)
    found.sites.append(
        Site(
            name=name,
            attention=attention,
            equipped_class=RPEWindowAttention,
            num_heads=attention.num_heads,
            head_dim=attention.qkv.out_features // (3 * attention.num_heads),
            num_prefix_tokens=0,
            grid=GridSource((window[0], window[1])),
            changes=[drop] if request.builtin_bias == "drop" else [],
            check=partial(check_window, request, has_absolute=False),
            has_builtin_bias=True,
        )
    )
