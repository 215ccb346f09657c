"""Kernels in C++ for float32 on the CPU: one pass over blocks of pairs, forward and backward.

They keep nothing of a pair for the backward pass. `kernel/attention.cpp` has the algorithm,
`build.py` compiles it where there is a compiler, and without it everything works as before.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn import Parameter

from irpe.core.cached import traced_as_constant
from irpe.ops.call import AttentionCall, head_slices
from irpe.ops.differentiable import Gradients, define_operators, differentiable, is_transformed
from irpe.ops.impl.native import library
from irpe.ops.impl.native.library import Inputs
from irpe.ops.shapes import Tokens

_MOST_ROWS = 4096  # of all maps: a block of queries has an element for each


def supports(call: AttentionCall) -> str | None:
    """Returns why the call cannot be computed here, or `None` if it can."""
    if missing := _why_unavailable():
        return missing
    q, mask = call.q, call.mask
    if q.device.type != "cpu":
        return f"its kernels are for the CPU, not for {q.device.type}"
    if q.dtype != torch.float32:
        return f"its kernels are for torch.float32, not {q.dtype}"
    if call.dropout_p:
        return "its kernels drop no weights"
    if mask is not None and mask.requires_grad:
        return "the mask needs a gradient"
    if any(m.compact_ids.ndim == 3 for m in call.maps):
        return "the maps differ between images"
    rows = sum([m.num_used_buckets for m in call.maps])
    if rows > _MOST_ROWS:
        return f"{rows:,} table rows are in use, more than {_MOST_ROWS:,}"
    if is_transformed():
        return "torch.func and forward-mode differentiation need plain operators"
    if _is_watched(q):
        return "a dispatch mode or a tensor's class looks at PyTorch's operators"
    return None


def attention(call: AttentionCall) -> Tokens:
    """Returns what the reference returns."""
    return differentiable(call, _PASSES, keeps=True)


@traced_as_constant
def _why_unavailable() -> str | None:
    return library.why_unavailable()


def _is_watched(q: Tensor) -> bool:
    """Tells whether something, such as a counter of operations, would miss what is computed."""
    if torch.compiler.is_compiling():  # then it is an operator
        return False
    return torch._C._len_torch_dispatch_stack() > 0 or type(q) not in (Tensor, Parameter)


class NativePasses:
    """The passes of the kernels."""

    name = "native"
    keeps_output = True

    def forward(self, call: AttentionCall, keeps: bool) -> tuple[Tokens, list[Tensor]]:
        """Returns the output and, if asked to, the normalizers of the queries."""
        out, normalizers = library.forward(_inputs(call))
        return out, [normalizers] if keeps else []

    def fake_forward(self, call: AttentionCall, keeps: bool) -> tuple[Tokens, list[Tensor]]:
        """Returns tensors of the shapes of what `forward` returns."""
        out, normalizers = library.outputs(call.q)
        return out, [normalizers] if keeps else []

    def backward(
        self, call: AttentionCall, grad: Tokens, kept: list[Tensor], mask_needs_grad: bool
    ) -> Gradients:
        """Returns the gradients; a mask that needs one is refused before."""
        out, normalizers = kept
        tokens, joined = library.backward(_inputs(call), out, normalizers, grad)
        tables: list[Tensor] = []
        for kind, gradient in zip(call[6:10], joined, strict=True):
            if gradient is not None:
                tables += _split(gradient, kind, call.q.shape[3])
        return Gradients(*tokens, None, tables)  # pyright: ignore


def _inputs(call: AttentionCall) -> Inputs:
    dim = call.q.shape[3]
    query, key, value = (_join(tables, dim) for tables in call[6:9])
    tables = (query, key, value, _join(call.bias_tables, 0))
    ids = [bucket_map.compact_ids for bucket_map in call.maps]
    rows = [bucket_map.num_used_buckets for bucket_map in call.maps]
    q, k, v, table_q, table_k, mask = call[:6]
    return Inputs(q, k, v, table_q, table_k, *tables, mask, ids, rows, call.scale)


def _join(tables: Sequence[Tensor], dim: int) -> Tensor | None:
    """Returns the tables of all maps as one: rows one after the other, zeros for other dimensions.

    Args:
        tables: The tables of a kind.
        dim: The head dimension; 0 for scalars.
    """
    if len(tables) <= 1:
        return tables[0] if tables else None
    heads = max(table.shape[0] for table in tables)
    if dim:
        starts = [part.start or 0 for part in head_slices(tables, dim)]
        tables = [
            F.pad(table, (start, dim - start - table.shape[2]))
            for table, start in zip(tables, starts, strict=True)
        ]
    return torch.cat([table.expand(heads, *table.shape[1:]) for table in tables], 1)


def _split(gradient: Tensor, tables: Sequence[Tensor], dim: int) -> list[Tensor]:
    """Returns the gradients of the tables of a kind, given that of `_join`."""
    found: list[Tensor] = []
    is_vector = gradient.ndim == 3
    parts = head_slices(tables, dim) if is_vector else [slice(None)] * len(tables)
    rows = gradient.split([table.shape[1] for table in tables], 1)
    for table, part, part_of_rows in zip(tables, parts, rows, strict=True):
        mine = part_of_rows[..., part] if is_vector else part_of_rows
        found.append(mine.sum(0, keepdim=True) if mine.shape[0] > table.shape[0] else mine)
    return found


_PASSES = NativePasses()
define_operators(_PASSES)
