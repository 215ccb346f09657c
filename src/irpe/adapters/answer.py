"""An equipped attention runs its host's own forward, whose one call of attention we answer.

The equipped class of an attention has a copy of the host's forward in which the names of
`scaled_dot_product_attention`, and of the function that rotates queries and keys, are ours. Where
the host computes the softmax itself, its row has a forward of ours, which calls `answer`. Whatever
a row says is looked up by class, so that nothing of it is stored on a module.
"""

import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from irpe.adapters.grids import InputGrid, check_exportable, record_grid
from irpe.adapters.host import Row
from irpe.adapters.hosts import row_of
from irpe.errors import UserError, UserStateError
from irpe.nn.tables import RelativePositionEncoding

_thread = threading.local()


class Call:
    """One call of an equipped attention."""

    def __init__(self, attention: Any, grid: InputGrid) -> None:
        self.attention, self.grid = attention, grid
        self.encoding: RelativePositionEncoding = attention.rpe  # or PEFT's wrapper of one
        self.unrotated: list[Tensor] = []  # queries and keys of the patches before a rotation
        self.num_answers = 0


def current_call() -> Call:
    """Returns the innermost call of an equipped attention in this thread."""
    return _thread.calls[-1]


def answer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    temperature: Tensor | None = None,
) -> Tensor:
    """Returns attention with the encoding; arguments as in `scaled_dot_product_attention`.

    Heads may share an axis with the batch, and windows may have one of their own.

    Args:
        query: The queries that enter the dot product.
        key: The keys.
        value: The values.
        attn_mask: True where a key takes part, or scores to add.
        dropout_p: The probability with which a weight is dropped.
        is_causal: Refused.
        scale: The factor of the scores.
        enable_gqa: Whether heads may share keys and values.
        temperature: A learned factor of all scores in the place of `scale`.
    """
    if is_causal:
        raise UserError("is_causal=True: tokens of an image have no order; pass attn_mask")
    heads, lead = _thread.calls[-1].encoding.size.num_heads, query.shape[:-3]
    is_flat = query.ndim == 3
    if is_flat:
        query, key, value = (x.unflatten(0, (-1, heads)) for x in (query, key, value))
        if attn_mask is not None and attn_mask.ndim == 3 and attn_mask.shape[0] != 1:
            attn_mask = attn_mask.unflatten(0, (-1, heads))
    elif len(lead) == 2:
        query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    z, _ = answer_with_weights(
        query, key, value, attn_mask, dropout_p, scale, temperature, with_weights=False
    )
    if is_flat:
        return z.flatten(0, 1)
    return z.unflatten(0, lead) if len(lead) == 2 else z


def answer_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    temperature: Tensor | None = None,
    *,
    with_weights: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Returns attention with the encoding and, if asked for, the weights before dropout.

    Arguments as in `answer`; queries, keys and values are batch, heads, tokens, dim.
    """
    call: Call = _thread.calls[-1]
    call.num_answers += 1
    encoding = call.encoding
    heads = encoding.size.num_heads
    if key.shape[1] != heads:
        key, value = _repeat_heads(key, heads), _repeat_heads(value, heads)
    options: dict[str, Any] = {"grid": call.grid, "attn_mask": attn_mask, "scale": scale}
    options["temperature"] = temperature
    if call.unrotated:
        options |= _unrotated(call, query, key)
    z = encoding(query, key, value, dropout_p=dropout_p, **options)
    return z, encoding.weights(query, key, **options) if with_weights else None


def _unrotated(call: Call, query: Tensor, key: Tensor) -> dict[str, Tensor]:
    """Returns queries and keys before their rotation, as arguments of an encoding."""
    if len(call.unrotated) != 2:
        raise UserStateError(
            f"{type(call.attention).__qualname__} rotated {len(call.unrotated)} tensors, not its "
            "queries and keys: this release does not know how"
        )
    q, k = call.unrotated
    return {"table_q": _before_rotation(query, q), "table_k": _before_rotation(key, k)}


def _before_rotation(x: Tensor, part: Tensor) -> Tensor:
    """Returns queries or keys as they were before the rotation of the patches among them."""
    part = part if part.ndim == 4 else part.unflatten(0, (x.shape[0], -1))
    part = _repeat_heads(part.to(x.dtype), x.shape[1])
    count = x.shape[2] - part.shape[2]  # the tokens before the patches are not rotated
    return torch.cat([x[:, :, :count], part], dim=2) if count else part


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


@cache
def equipped_class(stock: type[nn.Module]) -> type[nn.Module]:
    """Returns the class of equipped attentions: a subclass of the host's."""
    row = row_of(stock)
    own = row.forward or answering(stock.forward, row)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        grid = row.grid(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            check_exportable(grid)
        else:
            record_grid(self, grid)
        if not hasattr(_thread, "calls"):
            _thread.calls = []
        call = Call(self, grid)
        _thread.calls.append(call)
        try:
            output = own(self, *args, **kwargs)
        finally:
            _thread.calls.pop()
        if call.num_answers != 1:
            raise UserStateError(
                f"{stock.__qualname__} called attention {call.num_answers} times in one forward, "
                "where its encoding answers one call: irpe.unequip the model"
            )
        return output

    def set_window_size(self: nn.Module, window_size: tuple[int, int]) -> None:
        dropped = [name for name in row.bias if name in self._buffers]
        resize: Any = stock
        resize.set_window_size(self, window_size)
        for name in dropped:  # the host has made a parameter of the zeros
            learned = self._parameters.pop(name, None)
            if learned is not None:
                self.register_buffer(name, learned.detach(), persistent=False)

    body: dict[str, Any] = {
        "__doc__": f"{stock.__name__} with an encoding.",
        "__module__": __name__,
        "__reduce_ex__": _reduce,
        "forward": forward,
        **row.body,
    }
    if hasattr(stock, "set_window_size"):
        body["set_window_size"] = set_window_size
    return type(f"RPE{stock.__name__}", (stock,), {**_answering_methods(stock, row), **body})


@cache
def is_answered(stock: type[nn.Module]) -> bool:
    """Returns whether an equipped attention of a class that is known would call our function."""
    return calls_attention(stock, row_of(stock))


def calls_attention(stock: type[nn.Module], row: Row) -> bool:
    """Returns whether an equipped attention of a class would call our function, given its row."""
    if row.forward is not None or row.body:
        return True
    row = replace(row, rotates=None)
    return answering(stock.forward, row) is not stock.forward or bool(
        _answering_methods(stock, row)
    )


def _answering_methods(stock: type[nn.Module], row: Row) -> dict[str, Callable[..., Any]]:
    """Returns those other methods of a host in which attention is called."""
    found: dict[str, Callable[..., Any]] = {}
    for kind in stock.__mro__[: stock.__mro__.index(nn.Module)]:
        for name, method in vars(kind).items():
            if name != "forward" and isinstance(method, FunctionType):
                copy = answering(method, row)
                if copy is not method:
                    found.setdefault(name, copy)
    if row.call in dir(stock):
        found[row.call] = _answer_method
    return found


def _answer_method(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    return answer(*args, **kwargs)


def stock_class(attention: nn.Module) -> type[nn.Module]:
    """Returns the class of an attention before it was equipped."""
    kind = type(attention)
    return kind.__bases__[0] if kind.__module__ == __name__ else kind


def _reduce(attention: Any, protocol: Any) -> Any:
    made = type(attention)
    _, _, *state = super(made, attention).__reduce_ex__(protocol)
    return _make_equipped, (made.__bases__[0],), *state


def _make_equipped(stock: type[nn.Module]) -> nn.Module:
    made: Any = equipped_class(stock)
    return made.__new__(made)


def answering(
    function: Callable[..., Any],
    row: Row,
    outer: tuple[object, ...] = (),
) -> Callable[..., Any]:
    """Returns a copy of a function whose names for attention are ours; itself if it has none.

    Functions of the same module that it calls are copied too, where attention is called in them.
    """
    own: Any = inspect.unwrap(function)
    names = _names_in(own.__code__)
    # Without its name, so that a compiler guards on this space and not on the host's.
    space: dict[str, Any] = {k: v for k, v in own.__globals__.items() if k != "__name__"}
    found: dict[str, Any] = {}
    for name in names & space.keys():
        thing = space[name]
        if name == row.call or thing is F.scaled_dot_product_attention:
            found[name] = answer
        elif any(thing is module for module in (F, nn, torch)):
            if "scaled_dot_product_attention" in names:
                found[name] = _with_answer(thing)
        elif _is_beside(thing, own) and thing not in outer:
            copy = answering(thing, row, (*outer, own))
            if copy is not thing:
                found[name] = copy
    if row.rotates in names:
        found[row.rotates] = _keeping(space[row.rotates], row.rotates_pairs)
    if not found:
        return function
    copy = FunctionType(
        own.__code__, {**space, **found}, own.__name__, own.__defaults__, own.__closure__
    )
    copy.__kwdefaults__ = own.__kwdefaults__
    return copy


def _is_beside(thing: object, function: FunctionType) -> bool:
    return isinstance(thing, FunctionType) and thing.__module__ == function.__module__


def _names_in(code: CodeType) -> set[str]:
    """Returns the names that a function and those inside it look up."""
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


@cache
def _with_answer(module: ModuleType) -> ModuleType:
    """Returns a copy of `torch`, `torch.nn` or its functions in which attention is ours."""
    copy = ModuleType(module.__name__)
    vars(copy).update(vars(module))
    if module is F:
        vars(copy)["scaled_dot_product_attention"] = answer
    else:
        inner = {torch: "nn", nn: "functional"}[module]
        vars(copy)[inner] = _with_answer(getattr(module, inner))
    return copy


@cache
def _keeping(rotate: Callable[..., Any], is_pair: bool) -> Callable[..., Any]:
    """Returns a rotation that keeps what it is given, for the tables."""

    def keep_unrotated(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        current_call().unrotated.append(x)
        return rotate(x, *args, **kwargs)

    def keep_both(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        current_call().unrotated += [q, k]
        return rotate(q, k, *args, **kwargs)

    return keep_both if is_pair else keep_unrotated
