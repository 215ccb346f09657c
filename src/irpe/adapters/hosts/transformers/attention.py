"""transformers: what equipped attentions become, and the hooks that tell them their grid."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from irpe.adapters.plan import GridSource, encoding_of, grid_of

try:
    from transformers.models.deit.modeling_deit import DeiTAttention
    from transformers.models.detr.modeling_detr import DetrSelfAttention
    from transformers.models.dinov2.modeling_dinov2 import Dinov2Attention
    from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import (
        Dinov2WithRegistersAttention,
    )
    from transformers.models.swin.modeling_swin import SwinAttention
    from transformers.models.vit.modeling_vit import ViTAttention
except ImportError as error:
    raise ImportError(
        f"transformers {transformers.__version__} has other attentions than irpe knows: "
        "pip install -U 'irpe[transformers]'"
    ) from error

# Those that hand an attention its mask as a tensor of numbers or booleans.
_IMPLEMENTATIONS = ("eager", "sdpa")


class RPEViTAttention(ViTAttention):
    """ViT's attention with an encoding."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Returns the attended tokens and, if asked for, the weights."""
        return _attend(self, hidden_states, hidden_states, attention_mask, kwargs)


class RPEDeiTAttention(DeiTAttention):
    """DeiT's attention with an encoding."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Returns the attended tokens and, if asked for, the weights."""
        return _attend(self, hidden_states, hidden_states, attention_mask, kwargs)


class RPEDinov2Attention(Dinov2Attention):
    """DINOv2's attention with an encoding."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Returns the attended tokens and, if asked for, the weights."""
        return _attend(self, hidden_states, hidden_states, attention_mask, kwargs)


class RPEDinov2WithRegistersAttention(Dinov2WithRegistersAttention):
    """The attention of DINOv2 with registers, with an encoding."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Returns the attended tokens and, if asked for, the weights."""
        return _attend(self, hidden_states, hidden_states, attention_mask, kwargs)


class RPEDetrAttention(DetrSelfAttention):
    """The self-attention of DETR's encoder with an encoding."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """Returns the attended tokens and, if asked for, the weights."""
        x = hidden_states if position_embeddings is None else hidden_states + position_embeddings
        return _attend(self, x, hidden_states, attention_mask, kwargs)


class RPESwinAttention(SwinAttention):
    """Swin's attention with an encoding, on the grid of a window, its own bias kept or dropped."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Returns the attended tokens of each window and, if asked for, the weights."""
        bias = self._modules["relative_position_bias"]
        mask = None if bias is None else bias()  # 1 heads tokens tokens
        if attention_mask is not None:
            repeats = hidden_states.shape[0] // attention_mask.shape[0]
            shift = attention_mask.repeat(repeats, 1, 1).unsqueeze(1)
            mask = shift if mask is None else mask + shift
        return _attend(self, hidden_states, hidden_states, mask, kwargs)


def _attend(
    attention: Any, x: Tensor, values: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> tuple[Tensor, Any]:
    """Attends to tokens of which `x` makes queries and keys; weights are those before dropout."""
    implementation = attention.config._attn_implementation
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"attn_implementation {implementation!r} does not hand masks to an encoding: call "
            f"model.set_attn_implementation with one of {', '.join(_IMPLEMENTATIONS)}"
        )
    parts = attention.q_proj(x), attention.k_proj(x), attention.v_proj(values)
    q, k, v = (part.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for part in parts)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    encoding, grid, scale = encoding_of(attention), grid_of(attention).current(), attention.scaling
    dropout_p = attention.attention_dropout if attention.training else 0.0
    z = encoding(q, k, v, grid=grid, attn_mask=mask, dropout_p=dropout_p, scale=scale)
    weights = None
    if implementation == "eager" or _asked_for_weights(attention, kwargs):
        weights = encoding.weights(q, k, grid=grid, attn_mask=mask, scale=scale)
    return attention.o_proj(z.transpose(1, 2).flatten(2)), weights


def _asked_for_weights(attention: Any, kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("output_attentions", attention.config.output_attentions))


class RecordWindow:
    """A hook on the attention of a Swin layer that notes its window, which small inputs shrink.

    Args:
        layer: The layer.
        source: Where the attention looks the grid up.
    """

    def __init__(self, layer: Any, source: GridSource) -> None:
        self.layer, self.source = layer, source

    def __call__(self, attention: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Notes the grid of a window."""
        self.source.grid = (self.layer.window_size, self.layer.window_size)


class ForgetGrid:
    """A hook on DETR: an input that does not pass the backbone must not get the last one's grid.

    Args:
        source: Where the attentions look the grid up.
    """

    def __init__(self, source: GridSource) -> None:
        self.source = source

    def __call__(self, detr: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forgets the grid, which the backbone is to tell again."""
        if kwargs.get("inputs_embeds") is not None:
            raise ValueError(
                "inputs_embeds do not tell their grid: pass pixel_values, or equip the model with "
                "grid=(rows, columns)"
            )
        self.source.grid = None


class NoPositionEmbedding(nn.Module):
    """Stands where DETR has its absolute encoding: zeros, for the encoder and the decoder's keys.

    Args:
        dim: The dimension of a token.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(
        self,
        shape: torch.Size,
        device: torch.device | str,
        dtype: torch.dtype,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Returns zeros for a feature map of this shape."""
        return torch.zeros(shape[0], self.dim, *shape[-2:], device=device, dtype=dtype)
