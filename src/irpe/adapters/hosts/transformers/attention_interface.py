"""transformers: how its attentions are computed with an encoding.

Most of its attentions fetch the function that computes them from a registry, by the name that their
configuration gives. An equipped attention keeps the forward of its class and finds our function
there: it gets queries and keys as they enter the dot product. Masks are made by the model, for the
implementation that its own configuration names, so they arrive as "sdpa" or "eager" would get them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from irpe.adapters.answer import answer_with_weights, current_call
from irpe.adapters.equipped import Equipment, is_equipped
from irpe.adapters.grids import SOURCE, InputGrid, MeasuredGrid
from irpe.adapters.host import Row, Site, measured, site_of
from irpe.adapters.swaps import Swap, set_attribute
from irpe.errors import UserError

NAME = "irpe"  # of our function in the registry of transformers
# Those that pass an attention its mask as an additive or boolean tensor.
_IMPLEMENTATIONS = ("eager", "sdpa")
_ORDER = "rpe_order"  # the attribute of attentions whose tokens are not prefix, then grid


@dataclass(frozen=True)
class Suffix:
    """An order of tokens: some of those that have no position stand after the patches."""

    count: int

    def __call__(self, num_tokens: int, grid: Any) -> Tensor:
        """Returns which token stands where an encoding expects it."""
        return torch.arange(num_tokens).roll(self.count)


@dataclass(frozen=True)
class Windows:
    """An order of tokens: by windows of the grid, in each of them the prefix tokens first.

    Args:
        side: The number of windows along each axis.
        num_prefix_tokens: The tokens before the patches of a window.
    """

    side: int
    num_prefix_tokens: int

    def __call__(self, num_tokens: int, grid: Any) -> Tensor:
        """Returns which token stands where an encoding expects it."""
        index = torch.arange(num_tokens).view(self.side, self.side, -1)
        prefix, patches = index.tensor_split([self.num_prefix_tokens], dim=-1)
        window = [length // self.side for length in grid]
        patches = patches.unflatten(-1, window).transpose(1, 2)  # window row, row, window, column
        return torch.cat([prefix.flatten(), patches.flatten()])


def attend(
    attention: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Returns the attended tokens and, if asked for, the weights before dropout.

    Queries, keys and values are batch, heads, tokens, dim. An attention without tables is computed
    as by "sdpa". A `position_bias` is added to the scaled scores, as T5 does.
    """
    if not is_equipped(attention):
        kwargs |= {"dropout": dropout, "scaling": scaling, "position_bias": position_bias}
        return sdpa_attention_forward(attention, query, key, value, attention_mask, **kwargs)
    config = vars(attention)["config"]
    _check_implementation(config._attn_implementation)
    wants_weights = config._attn_implementation == "eager" or bool(
        kwargs.get("output_attentions", config.output_attentions)
    )
    mask = attention_mask if isinstance(attention_mask, Tensor) else None
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    if position_bias is not None:
        mask = _with_bias(mask, position_bias)
    order = vars(attention).get(_ORDER)
    if order is None:
        z, weights = answer_with_weights(
            query, key, value, mask, dropout, scaling, with_weights=wants_weights
        )
        return z.transpose(1, 2).contiguous(), weights
    index = order(query.shape[2], current_call().grid).to(query.device)
    back = index.argsort()
    query, key, value = (tokens[:, :, index] for tokens in (query, key, value))
    if mask is not None:
        mask = mask.expand(*mask.shape[:2], len(index), len(index))[..., index[:, None], index]
    z, weights = answer_with_weights(
        query, key, value, mask, dropout, scaling, with_weights=wants_weights
    )
    weights = weights if weights is None else weights[..., back[:, None], back]
    return z[:, :, back].transpose(1, 2).contiguous(), weights


def _with_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    """Returns an additive mask with a bias of the host's own."""
    if mask is None:
        return bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask


# For a whole model, by model.set_attn_implementation("irpe"), as well as for equipped attentions.
AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


def _check_implementation(implementation: str) -> None:
    if implementation not in (*_IMPLEMENTATIONS, NAME):
        raise UserError(
            f"attn_implementation {implementation!r} does not pass masks to an encoding: call "
            f"model.set_attn_implementation with one of {', '.join(_IMPLEMENTATIONS)}"
        )


class AttentionConfig:
    """A configuration as an equipped attention sees it: our function computes attention."""

    _attn_implementation = NAME

    def __init__(self, own: Any) -> None:
        self.own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["own"], name)


def _read_config(attention: nn.Module) -> AttentionConfig:
    return AttentionConfig(vars(attention)["config"])


def _write_config(attention: nn.Module, config: object) -> None:
    vars(attention)["config"] = config


def _grid_of_windows(attention: nn.Module, *args: Any, **kwargs: Any) -> InputGrid:
    """Returns the grid of a window, or of all windows where an attention joins them."""
    grid, order = measured(attention, *args, **kwargs), vars(attention).get(_ORDER)
    if order is None:
        return grid
    assert isinstance(grid, tuple)
    return tuple(length * order.side for length in grid)


# Its forward fetches our function from the registry.
REGISTERED = Row(body={"config": property(_read_config, _write_config)})
IN_WINDOWS = replace(REGISTERED, grid=_grid_of_windows)


def make_site(
    name: str,
    attention: Any,
    num_prefix_tokens: int,
    call: Equipment,
    row: Row = REGISTERED,
    *,
    source: MeasuredGrid | None = None,
    order: Suffix | Windows | None = None,
    changes: Sequence[Swap] = (),
    **facts: Any,
) -> Site:
    """Returns an attention of transformers that can be equipped.

    `source` is where the grid of an input is measured, `None` where the attention knows it; `order`
    is that of its tokens, if those without a position do not stand before the patches.
    """
    swaps = [*changes]
    if source is not None:
        swaps += set_attribute(attention, SOURCE, source)
    if order is not None:
        swaps += set_attribute(attention, _ORDER, order)
    size = (*_head_size(attention), num_prefix_tokens)
    initial = None if source is None else source.told or source.initial
    ndim = 2 if initial is None else len(initial)
    prepare = (_mark_initialized,)
    return site_of(name, attention, row, call, *size, ndim, changes=swaps, prepare=prepare, **facts)


def _head_size(attention: Any) -> tuple[int, int]:
    """Returns the number of heads and the dimension of one."""
    for name in ("num_heads", "num_attention_heads"):
        if hasattr(attention, name):
            num_heads: int = getattr(attention, name)
            return num_heads, _value_dim(attention) // num_heads
    return attention.q_proj.out_features // attention.head_dim, attention.head_dim


def _value_dim(attention: nn.Module) -> int:
    """Returns the dimension of the values of all heads."""
    for name, parts in (("v_proj", 1), ("value", 1), ("qkv", 3)):
        if hasattr(attention, name):
            projection: Any = getattr(attention, name)
            return projection.out_features // parts
    raise AssertionError(f"{type(attention).__name__} has no projection that is known")


def _mark_initialized(encoding: nn.Module) -> None:
    """Keeps transformers from initializing the tables, as it does with all new modules."""
    for module in encoding.modules():
        vars(module)["_is_hf_initialized"] = True
