"""Attention with a backward pass of its own: one autograd function, and operators for a compiler.

An eager call runs the passes directly. Under `torch.compile` and `torch.export` they are operators,
`irpe::NAME` and `irpe::NAME_backward`, which a compiler calls and does not look into.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from irpe.core.bucket_map import BucketMap, KeyAxis
from irpe.core.cached import traced_as_constant
from irpe.ops.call import AttentionCall, needs_grad
from irpe.ops.precision import without_autocast
from irpe.ops.shapes import Keys, Tokens

_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? table_q, Tensor? table_k, Tensor? mask, "
    "Tensor[] query_tables, Tensor[] key_tables, Tensor[] value_tables, Tensor[] bias_tables, "
    "Tensor[] ids, int[] axes, float scale, float dropout_p, Tensor? seed"
)  # the fields of AttentionCall; of its maps the compact ids and the axes
_library = torch.library.Library("irpe", "DEF")


class Gradients(NamedTuple):
    """The gradients of a call; `None` for what is not there or needs none."""

    q: Tokens
    k: Keys
    v: Keys
    table_q: Tokens | None
    table_k: Keys | None
    mask: Tensor | None
    tables: list[Tensor]

    def to(self, dtype: torch.dtype) -> "Gradients":
        """Returns the gradients in another dtype."""
        if self.q.dtype == dtype:
            return self
        tokens = (None if x is None else x.to(dtype) for x in self[:6])
        return Gradients(*tokens, [x.to(dtype) for x in self.tables])  # pyright: ignore


class Passes(Protocol):
    """The two passes of an implementation.

    Attributes:
        name: The name of its operators.
        keeps_output: Whether the backward pass needs the output: it is then the first kept tensor.
    """

    name: str
    keeps_output: bool

    def forward(self, call: AttentionCall, keeps: bool) -> tuple[Tokens, list[Tensor]]:
        """Returns the output and, if asked to, what is kept for the backward pass."""
        ...

    def fake_forward(self, call: AttentionCall, keeps: bool) -> tuple[Tokens, list[Tensor]]:
        """Returns tensors of the shapes of what `forward` returns."""
        ...

    def backward(
        self, call: AttentionCall, grad: Tokens, kept: list[Tensor], mask_needs_grad: bool
    ) -> Gradients:
        """Returns the gradients, given that of the output and what was kept."""
        ...


def differentiable(call: AttentionCall, passes: Passes, keeps: bool) -> Tokens:
    """Returns the output of a forward pass, whose gradient is the backward pass.

    Args:
        call: The call.
        passes: The two passes.
        keeps: Whether the forward pass keeps what it can for the backward pass, if there is one.
    """
    if torch.compiler.is_compiling():  # which does not know of every tensor what it requires
        operator = getattr(torch.ops.irpe, passes.name).default
        return operator(*_flatten(call), keeps and torch.is_grad_enabled())[0]
    leaves = call.leaves() if torch.is_grad_enabled() else ()
    if not needs_grad(leaves):
        return passes.forward(call, False)[0]
    return _Attention.apply(passes, keeps, call, *leaves)


@traced_as_constant
def is_transformed() -> bool:
    """Tells whether a transform of torch.func, or forward-mode differentiation, is in force."""
    native: Any = torch._C
    in_transform = native._functorch.maybe_current_level() is not None
    return in_transform or torch.autograd.forward_ad._current_level >= 0


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, passes: Passes, keeps: bool, call: AttentionCall, *leaves: Tensor | None
    ) -> Tokens:
        out, kept = passes.forward(call, keeps)
        kept = [out, *kept] if passes.keeps_output else kept
        ctx.passes, ctx.num_kept = passes, len(kept)
        ctx.frame = call.with_leaves([None] * len(leaves))  # tensors are saved, not held
        ctx.save_for_backward(*kept, *leaves)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tokens) -> tuple[Any, ...]:
        (grad,) = grad_outputs
        native: Any = torch._C
        is_batched = native._functorch.is_legacy_batchedtensor(grad)
        if torch.is_grad_enabled() or is_batched or is_transformed():
            raise NotImplementedError(
                "this attention cannot be differentiated twice (create_graph=True), nor for "
                "several gradients at once (is_grads_batched=True): pass impl='plain' to the "
                "call, the module or irpe.equip"
            )
        saved = ctx.saved_tensors  # read once: checkpointing makes it anew
        kept, call = list(saved[: ctx.num_kept]), ctx.frame.with_leaves(saved[ctx.num_kept :])
        with without_autocast(grad):  # a backward pass may run inside autocast
            found = ctx.passes.backward(call, grad, kept, ctx.needs_input_grad[8])
        return (None, None, None, *found[:6], *found.tables)


def define_operators(passes: Passes) -> None:
    """Defines irpe::NAME and irpe::NAME_backward."""
    name = passes.name

    def forward(run: Any, *arguments: Any) -> list[Tensor]:
        *fields, keeps = arguments
        out, kept = run(_unflatten(fields), keeps)
        return [out, *kept]

    def backward(
        grad: Tensor, kept: list[Tensor], mask_needs_grad: bool, *fields: Any
    ) -> list[Tensor]:
        found = passes.backward(_unflatten(fields), grad, kept, mask_needs_grad)
        return [x for x in (*found[:6], *found.tables) if x is not None]

    arguments = "Tensor grad, Tensor[] kept, bool mask_needs_grad"
    for operator, signature, run, fake in (
        (
            name,
            f"{_CALL}, bool keeps",
            partial(forward, passes.forward),
            partial(forward, passes.fake_forward),
        ),
        (f"{name}_backward", f"{arguments}, {_CALL}", backward, _fake_backward),
    ):
        _library.define(f"{operator}({signature}) -> Tensor[]")
        _library.impl(operator, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"irpe::{operator}", fake, lib=_library)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        ctx.save_for_backward(*output[0 if passes.keeps_output else 1 :])
        ctx.fields = inputs[:-1]

    def differentiate(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
        call, mask_needs_grad = _unflatten(ctx.fields), ctx.needs_input_grad[5]
        run = getattr(torch.ops.irpe, f"{name}_backward").default
        found = iter(run(grads[0], list(ctx.saved_tensors), mask_needs_grad, *ctx.fields))
        has_gradient = [x is not None for x in call[:5]] + [mask_needs_grad]
        tokens = [next(found) if has else None for has in has_gradient]
        tables = [[next(found) for _ in kind] for kind in call[6:10]]
        return (*tokens, *tables, [None] * len(call.maps), None, None, None, None, None)

    torch.library.register_autograd(
        f"irpe::{name}", differentiate, setup_context=keep, lib=_library
    )


def _flatten(call: AttentionCall) -> list[Any]:
    """Returns the arguments of an operator."""
    axes: list[int] = []
    for bucket_map in call.maps:
        axis = bucket_map.key_axis
        axes += [0] if axis is None else [len(axis.grid), *axis.grid, axis.axis, axis.of_queries]
    ids = [bucket_map.compact_ids for bucket_map in call.maps]
    return [*call[:6], *map(list, call[6:10]), ids, axes, *call[11:]]


def _unflatten(fields: Sequence[Any]) -> AttentionCall:
    """Returns the call of an operator's arguments."""
    tables, ids, remaining = fields[6:10], fields[10], list(fields[11])
    rows = [table.shape[1] for table in next(kind for kind in tables if kind)]
    maps: list[BucketMap] = []
    for of_pairs, count in zip(ids, rows, strict=True):
        grid = tuple(remaining.pop(0) for _ in range(remaining.pop(0)))
        axis = KeyAxis(grid, remaining.pop(0), bool(remaining.pop(0))) if grid else None
        maps.append(BucketMap.of_rows_in_use(of_pairs, count, axis))
    return AttentionCall(*fields[:6], *map(tuple, tables), tuple(maps), *fields[12:])  # pyright: ignore


def _fake_backward(
    grad: Tensor, kept: list[Tensor], mask_needs_grad: bool, *fields: Any
) -> list[Tensor]:
    call = _unflatten(fields)
    leaves = call.leaves() if mask_needs_grad else call._replace(mask=None).leaves()
    dense = torch.contiguous_format
    return [torch.empty_like(x, memory_format=dense) for x in leaves if x is not None]
