"""transformers: how its attentions are computed with an encoding.

Most of its attentions fetch the function that computes them from a registry, by the name that their
configuration gives. An equipped attention keeps the forward of its class and finds our function
there: it gets queries and keys as they enter the dot product. Masks are made by the model, for the
implementation that its own configuration names, so they arrive as "sdpa" or "eager" would get them.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from irpe.adapters.changes import Change, Undo, set_attribute
from irpe.adapters.equipped import encoding_of, is_equipped
from irpe.adapters.grids import GridSource, grid_of
from irpe.adapters.plan import Site
from irpe.errors import UserError

NAME = "irpe"  # of our function in the registry of transformers
# Those that pass an attention its mask as an additive or boolean tensor.
_IMPLEMENTATIONS = ("eager", "sdpa")
Forward = Callable[..., object]
_SUFFIX = "rpe_num_suffix_tokens"  # the attribute of attentions with tokens after the patches


def attend(
    attention: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    rotate: Callable[[Tensor], Tensor] | None = None,
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
        rotate: A rotation of queries and keys that is still to come.
        kwargs: The options of the host's forward.
    """
    if not is_equipped(attention):
        return sdpa_attention_forward(
            attention, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    config = vars(attention)["config"]
    _check_implementation(config._attn_implementation)
    mask = attention_mask if isinstance(attention_mask, Tensor) else None
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    count = vars(attention).get(_SUFFIX, 0)
    if count:  # tokens after the patches are treated as those before them
        query, key, value = (tokens.roll(count, 2) for tokens in (query, key, value))
        mask = mask if mask is None else mask.roll((count, count), (-2, -1))
    encoding, grid = encoding_of(attention), grid_of(attention).current()
    arguments: dict[str, Any] = {"attn_mask": mask, "scale": scaling}
    if rotate is not None:
        arguments |= {"table_q": query, "table_k": key}
        query, key = rotate(query), rotate(key)
    z = encoding(query, key, value, grid=grid, dropout_p=dropout, **arguments)
    weights = None
    if config._attn_implementation == "eager" or _wants_weights(config, kwargs):
        weights = encoding.weights(query, key, grid=grid, **arguments)
        weights = weights.roll((-count, -count), (-2, -1)) if count else weights
    return (z.roll(-count, 2) if count else z).transpose(1, 2).contiguous(), weights


# For a whole model, by model.set_attn_implementation("irpe"), as well as for equipped attentions.
AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


def _check_implementation(implementation: str) -> None:
    if implementation not in (*_IMPLEMENTATIONS, NAME):
        raise UserError(
            f"attn_implementation {implementation!r} does not pass masks to an encoding: call "
            f"model.set_attn_implementation with one of {', '.join(_IMPLEMENTATIONS)}"
        )


def _wants_weights(config: Any, kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("output_attentions", config.output_attentions))


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


def _reduce(attention: Any, protocol: Any) -> Any:
    made = type(attention)
    _, _, *state = super(made, attention).__reduce_ex__(protocol)
    return _make_equipped, (made.__base__, vars(made).get("forward")), *state


@cache
def _equipped_class(stock_class: type[nn.Module], forward: Forward | None) -> type[nn.Module]:
    """Returns the class of an equipped attention.

    Args:
        stock_class: The class that transformers defines.
        forward: The forward that it gets; `None` to keep its own, which finds our function.
    """
    body: dict[str, Any] = {
        "__doc__": f"{stock_class.__name__} with an encoding.",
        "__module__": __name__,
        "__reduce_ex__": _reduce,
    }
    if forward is None:
        body["config"] = property(_read_config, _write_config)
    else:
        body["forward"] = forward
    return type(f"RPE{stock_class.__name__}", (stock_class,), body)


def _make_equipped(stock_class: type[nn.Module], forward: Forward | None) -> nn.Module:
    made: Any = _equipped_class(stock_class, forward)
    return made.__new__(made)


def make_site(
    name: str,
    attention: Any,
    num_prefix_tokens: int,
    grid: GridSource,
    *,
    num_suffix_tokens: int = 0,
    forward: Forward | None = None,
    equipped: type[nn.Module] | None = None,
    check: Callable[[], None] | None = None,
    changes: Sequence[Change] = (),
    has_builtin_bias: bool = False,
) -> Site:
    """Returns an attention of transformers that can be equipped.

    Args:
        name: Its path in the model.
        attention: The attention.
        num_prefix_tokens: The number of tokens before the patches.
        grid: Where the grid of an input comes from.
        num_suffix_tokens: The number of tokens after the patches.
        forward: The forward that it gets, if that of its own class does not fit.
        equipped: The class that it gets, if more than the forward has to change.
        check: Raises an error if it cannot be equipped after all.
        changes: What else is to be changed in it.
        has_builtin_bias: Whether it has a relative bias of its own.
    """
    num_heads, head_dim = _head_size(attention)
    own_changes: list[Change] = [partial(_mark_initialized, attention)]
    if num_suffix_tokens:
        own_changes.append(partial(set_attribute, attention, _SUFFIX, num_suffix_tokens))
    return Site(
        name=name,
        attention=attention,
        equipped_class=equipped or _equipped_class(_stock_class(attention), forward),
        num_heads=num_heads,
        head_dim=head_dim,
        num_prefix_tokens=num_prefix_tokens + num_suffix_tokens,
        grid=grid,
        changes=[*own_changes, *changes],
        check=check,
        has_builtin_bias=has_builtin_bias,
    )


def _stock_class(attention: nn.Module) -> Any:
    """Returns the class that transformers defines; a user's own subclass of it has no other."""
    if is_equipped(attention):
        return type(attention).__base__
    classes = type(attention).__mro__
    return next(each for each in classes if each.__module__.startswith("transformers."))


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


def _mark_initialized(attention: nn.Module) -> Undo:
    """Keeps transformers from initializing the tables, as it does with all new modules."""
    for module in encoding_of(attention).modules():
        module.__dict__["_is_hf_initialized"] = True
    return lambda: None
