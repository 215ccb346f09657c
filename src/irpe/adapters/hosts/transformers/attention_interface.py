"""transformers: how its attentions are computed with an encoding.

Most of its attentions fetch the function that computes them from a registry, by the name that their
configuration gives. An equipped attention keeps the forward of its class and finds our function
there: it gets queries and keys as they enter the dot product. Masks are made by the model, for the
implementation that its own configuration names, so they arrive as "sdpa" or "eager" would get them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from irpe.adapters.answer import answer_with_weights
from irpe.adapters.equipped import Equipment, is_equipped
from irpe.adapters.grids import SOURCE, MeasuredGrid
from irpe.adapters.host import Row, Site, site_of
from irpe.adapters.swaps import Swap, set_attribute
from irpe.errors import UserError

NAME = "irpe"  # of our function in the registry of transformers
# Those that pass an attention its mask as an additive or boolean tensor.
_IMPLEMENTATIONS = ("eager", "sdpa")
_SUFFIX = "rpe_num_suffix_tokens"  # the attribute of attentions with tokens after the patches


def attend(
    attention: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Returns the attended tokens and, if asked for, the weights before dropout.

    Args:
        attention: An attention of transformers; one without tables is computed as by "sdpa".
        query: batch, heads, tokens, dim
        key: batch, heads, tokens, dim
        value: batch, heads, tokens, dim
        attention_mask: A boolean or additive mask; what is not a tensor stands for none.
        dropout: The probability with which a weight is dropped.
        scaling: The factor of the scores.
        kwargs: The options of the host's forward.
    """
    if not is_equipped(attention):
        return sdpa_attention_forward(
            attention, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    config = vars(attention)["config"]
    _check_implementation(config._attn_implementation)
    wants_weights = config._attn_implementation == "eager" or bool(
        kwargs.get("output_attentions", config.output_attentions)
    )
    mask = attention_mask if isinstance(attention_mask, Tensor) else None
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    count = vars(attention).get(_SUFFIX, 0)
    if not count:
        z, weights = answer_with_weights(
            query, key, value, mask, dropout, scaling, with_weights=wants_weights
        )
        return z.transpose(1, 2).contiguous(), weights
    # Tokens after the patches are treated as those before them.
    query, key, value = (tokens.roll(count, 2) for tokens in (query, key, value))
    mask = mask if mask is None else mask.roll((count, count), (-2, -1))
    z, weights = answer_with_weights(
        query, key, value, mask, dropout, scaling, with_weights=wants_weights
    )
    weights = weights if weights is None else weights.roll((-count, -count), (-2, -1))
    return z.roll(-count, 2).transpose(1, 2).contiguous(), weights


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
    """A configuration as an equipped attention sees it: its attention is computed by our function.

    Args:
        own: The configuration of the model.
    """

    _attn_implementation = NAME

    def __init__(self, own: Any) -> None:
        self.own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["own"], name)


def _read_config(attention: nn.Module) -> AttentionConfig:
    return AttentionConfig(vars(attention)["config"])


def _write_config(attention: nn.Module, config: object) -> None:
    vars(attention)["config"] = config


# Its forward fetches our function from the registry.
REGISTERED = Row(body={"config": property(_read_config, _write_config)})


def make_site(
    name: str,
    attention: Any,
    num_prefix_tokens: int,
    call: Equipment,
    row: Row = REGISTERED,
    *,
    source: MeasuredGrid | None = None,
    num_suffix_tokens: int = 0,
    changes: Sequence[Swap] = (),
    **facts: Any,
) -> Site:
    """Returns an attention of transformers that can be equipped.

    Args:
        name: Its path in the model.
        attention: The attention.
        num_prefix_tokens: The number of tokens before the patches.
        call: What is asked for.
        row: The row of its class.
        source: Where the grid of an input is measured; `None` where the attention knows it.
        num_suffix_tokens: The number of tokens after the patches.
        changes: What else is to be changed in it.
        facts: Other arguments of `Site`.
    """
    swaps = [*changes]
    if source is not None:
        swaps += set_attribute(attention, SOURCE, source)
    if num_suffix_tokens:
        swaps += set_attribute(attention, _SUFFIX, num_suffix_tokens)
    size, count = _head_size(attention), num_prefix_tokens + num_suffix_tokens
    initial = None if source is None else source.told or source.initial
    ndim = 2 if initial is None else len(initial)
    prepare = (_mark_initialized,)
    return site_of(
        name, attention, row, call, *size, count, ndim, changes=swaps, prepare=prepare, **facts
    )


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
