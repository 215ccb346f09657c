"""timm's stock attention: ViT, DeiT, DINOv2, ..."""

from timm.layers.attention import Attention
from torch import Tensor

from irpe.adapters.grids import grid_of
from irpe.adapters.hosts.timm.attending import attend, check_not_causal, gate_out, split_heads


class RPEViTAttention(Attention):
    """timm's attention with an encoding."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Returns the attended tokens."""
        check_not_causal(is_causal)
        q, k, v = split_heads(self.qkv(x), self.num_heads)
        grid = grid_of(self).current()
        return gate_out(self, x, attend(self, self.q_norm(q), self.k_norm(k), v, grid, attn_mask))
