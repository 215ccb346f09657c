"""timm's BEiT and VisionTransformerRelPos: attentions with a relative bias of their own."""

from typing import Any

from timm.models import beit
from timm.models.vision_transformer_relpos import RelPosAttention
from torch import Tensor

from irpe.adapters.grids import grid_of
from irpe.adapters.hosts.timm.attending import (
    add_masks,
    attend,
    project_out,
    project_with_bias,
    split_heads,
)


class RPEBeitAttention(beit.Attention):
    """BEiT's attention with an encoding; its own bias, with rows for the class token, is kept."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        """Returns the attended tokens."""
        q, k, v = project_with_bias(self, x)
        own = None if self.relative_position_bias_table is None else self._get_rel_pos_bias()
        mask = add_masks(own, shared_rel_pos_bias)
        return project_out(self, attend(self, q, k, v, grid_of(self).current(), mask))

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Changes the grid of its own bias, if it has one still."""
        if self._parameters.get("relative_position_bias_table") is not None:
            super().set_window_size(window_size)


class RPERelPosAttention(RelPosAttention):
    """The attention of VisionTransformerRelPos with an encoding, its own bias kept or dropped."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """Returns the attended tokens."""
        q, k, v = split_heads(self.qkv(x), self.num_heads)
        own: Any = self.rel_pos
        mask = shared_rel_pos if own is None else own.get_bias()
        grid = grid_of(self).current()
        return project_out(self, attend(self, self.q_norm(q), self.k_norm(k), v, grid, mask))
