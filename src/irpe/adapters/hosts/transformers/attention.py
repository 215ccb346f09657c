"""transformers: what its attentions have in common."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from irpe.adapters.changes import Change, Undo
from irpe.adapters.equipped import encoding_of
from irpe.adapters.grids import GridSource, grid_of
from irpe.adapters.plan import Site

# Those that pass an attention its mask as an additive or boolean tensor.
_IMPLEMENTATIONS = ("eager", "sdpa")


def attend(
    attention: Any, x: Tensor, values: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> tuple[Tensor, Any]:
    """Returns the attended tokens and, if asked for, the weights before dropout.

    Args:
        attention: An equipped attention.
        x: The tokens that queries and keys are made of.
        values: The tokens that values are made of.
        mask: A boolean or additive mask.
        kwargs: The options of the host's forward.
    """
    implementation = attention.config._attn_implementation
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"attn_implementation {implementation!r} does not pass masks to an encoding: call "
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
    if implementation == "eager" or _wants_weights(attention, kwargs):
        weights = encoding.weights(q, k, grid=grid, attn_mask=mask, scale=scale)
    return attention.o_proj(z.transpose(1, 2).flatten(2)), weights


def _wants_weights(attention: Any, kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("output_attentions", attention.config.output_attentions))


def make_site(
    name: str,
    attention: Any,
    equipped_class: type[nn.Module],
    num_prefix_tokens: int,
    grid: GridSource,
    check: Callable[[], None] | None = None,
    changes: Sequence[Change] = (),
    has_builtin_bias: bool = False,
) -> Site:
    """Returns an attention that has q_proj, k_proj and v_proj, as all supported ones do."""
    return Site(
        name=name,
        attention=attention,
        equipped_class=equipped_class,
        num_heads=attention.q_proj.out_features // attention.head_dim,
        head_dim=attention.head_dim,
        num_prefix_tokens=num_prefix_tokens,
        grid=grid,
        changes=[partial(_mark_initialized, attention), *changes],
        check=check,
        has_builtin_bias=has_builtin_bias,
    )


def _mark_initialized(attention: nn.Module) -> Undo:
    """Keeps transformers from initializing the tables, as it does with all new modules."""
    for module in encoding_of(attention).modules():
        module.__dict__["_is_hf_initialized"] = True
    return lambda: None
