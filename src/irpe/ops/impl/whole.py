"""The efficient form with a backward of its own, over whole tensors: few operators, no blocks.

Eq. 27-28 carry the tables: each token meets the rows in use, what a pair needs is gathered, and the
backward pass sums pairs up per row. The attention weights are saved for it. All operators are
PyTorch's, so a compiler sees through them. Scores, softmax and sums are float32 at least.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from irpe.ops.call import AttentionCall, head_slices
from irpe.ops.differentiable import CompactCall, Gradients, differentiable_attention
from irpe.ops.gather import Owner, add_bucket_sum_, bias_sum, gather, gather_bias, pair_ids
from irpe.ops.precision import accumulation_dtype, add_product_, cast, product, product_dtype
from irpe.ops.shapes import Ids, Scores, Tokens, VectorTable
from irpe.ops.softmax import masked_scores, masked_softmax_into
from irpe.ops.table_products import table_gradient, table_matrix


def supports(call: AttentionCall) -> str | None:
    """Returns why the call cannot be computed here, or `None` if it can."""
    if call.dropout_p:
        return "it does not replay dropout in the backward pass"
    keys = call.k.shape[2]
    used = max([bucket_map.num_used_buckets for bucket_map in call.maps])
    if used > keys and (call.tables.query or call.tables.key or call.tables.value):
        return f"{used} rows are in use for {keys} keys: it multiplies rows, not pairs"
    return None


def attention(call: AttentionCall) -> Tokens:
    """Returns what the reference returns."""
    return differentiable_attention(call, WholePasses, keeps=True)


class WholePasses:
    """The two passes of `differentiable_attention`."""

    @staticmethod
    def forward(call: CompactCall, keeps: bool) -> tuple[Tokens, list[Tensor]]:
        """Returns the output; if asked to, the weights and their sums for each value table."""
        operand = product_dtype(call.q.dtype, call.q.device)
        q, k, v = (cast(x, operand) for x in (call.q, call.k, call.v))
        b = _position_scores(call, q, k)
        if b is not None and not keeps and not call.value_tables:
            mask = cast(b if call.mask is None else masked_scores(b, call.mask), operand)
            z = F.scaled_dot_product_attention(q, k, v, mask, scale=call.scale)
            return cast(z, call.q.dtype), []
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        a = masked_softmax_into(_add_scores(q, k, b, call.scale), call.mask)
        z, kept = product(cast(a, operand), v), [a]
        for dims, table, ids in _role(call, call.value_tables, operand):
            kept.append(_sums(a, ids, table.shape[1], "query"))
            _add_rows_(z, dims, kept[-1], table, 1.0)
        return cast(z, call.q.dtype), kept if keeps else []

    @staticmethod
    def backward(
        call: CompactCall, grad: Tokens, kept: list[Tensor], mask_needs_grad: bool
    ) -> Gradients:
        """Returns the gradients, given that of the output and what was kept."""
        a, *value_sums = kept
        dtype, scale = call.q.dtype, call.scale
        operand = product_dtype(dtype, call.q.device)
        q, k, v, g = (cast(x, operand).contiguous() for x in (call.q, call.k, call.v, grad))
        dv = product(cast(a, operand).mT, g)
        da: Scores | None = None
        of_values: list[Tensor] = []
        value_role = _role(call, call.value_tables, operand)
        for (dims, table, ids), sums in zip(value_role, value_sums, strict=True):
            of_values.append(table_gradient(sums, g[..., dims], table, 1.0))
            found = gather(product(g[..., dims], table_matrix(table).mT), ids, "query")
            da = found if da is None else da.add_(found)
        da = _add_scores(g, v, da, 1.0)
        de = torch.ops.aten._softmax_backward_data(da, a, -1, a.dtype)

        narrow = cast(de, operand)
        dq, dk = product(narrow, k, scale), product(narrow.mT, q, scale)
        x, dx, table_dq = _met_by_tables(call.table_q, q, dq)
        of_keys = _collect(call, call.key_tables, de, x, dx, "query")
        x, dx, table_dk = _met_by_tables(call.table_k, k, dk)
        of_queries = _collect(call, call.query_tables, de, x, dx, "key")
        of_bias = [
            bias_sum(de, ids, table) * scale
            for table, ids in zip(call.bias_tables, pair_ids(call.ids), strict=False)
        ]
        dmask = None
        if mask_needs_grad and call.mask is not None:
            dmask = de.sum_to_size(call.mask.shape)
        of_tables = [*of_queries, *of_keys, *of_values, *of_bias]
        return Gradients(dq, dk, dv, table_dq, table_dk, dmask, of_tables).to(dtype)


def _position_scores(call: CompactCall, q: Tokens, k: Tokens) -> Tensor | None:
    """Returns b_ij times the scale, Eq. 14-16; a bias alone may lack the axis of the batch."""
    found: list[Tensor] = []
    x = q if call.table_q is None else cast(call.table_q, q.dtype)
    for dims, table, ids in _role(call, call.key_tables, q.dtype):
        z = product(x[..., dims], table_matrix(table).mT, call.scale)  # Eq. 27
        found.append(gather(z, ids, "query"))  # Eq. 28
    x = k if call.table_k is None else cast(call.table_k, k.dtype)
    for dims, table, ids in _role(call, call.query_tables, k.dtype):
        found.append(gather(product(x[..., dims], table_matrix(table).mT, call.scale), ids, "key"))
    for table, ids in zip(call.bias_tables, pair_ids(call.ids), strict=False):
        wide = table.to(accumulation_dtype(table.dtype))
        scalars = gather_bias(wide * call.scale, ids)
        found.append(scalars if scalars.ndim == 4 else scalars.unsqueeze(0))
    if not found:
        return None
    total, *rest = found
    for scores in rest:
        total = total.add_(scores)
    return total


def _add_scores(x: Tokens, y: Tokens, scores: Tensor | None, scale: float) -> Scores:
    """Returns the scores, if any, with the scaled product of each pair of tokens added."""
    if scores is None:
        return product(x, y.mT, scale)
    shape = (*x.shape[:3], y.shape[2])
    scores = scores if scores.shape == shape else scores.expand(shape).contiguous()
    return add_product_(scores, x, y.mT, scale)


def _collect(
    call: CompactCall,
    tables: Sequence[VectorTable],
    de: Scores,
    x: Tokens,
    dx: Tokens,
    owner: Owner,
) -> list[VectorTable]:
    """Returns the gradients of a role's tables; adds the gradient of the tokens x to dx."""
    gradients: list[VectorTable] = []
    for dims, table, ids in _role(call, tables, x.dtype):
        sums = _sums(de, ids, table.shape[1], owner)
        gradients.append(table_gradient(sums, x[..., dims], table, call.scale))
        _add_rows_(dx, dims, sums, table, call.scale)
    return gradients


def _sums(scores: Scores, ids: Ids, rows: int, owner: Owner) -> Tensor:
    """Returns the sums of the scores for each table row: `bucket_sum` without a copy."""
    owners = scores.shape[2 if owner == "query" else 3]
    sums = scores.new_zeros(*scores.shape[:2], owners, rows)
    add_bucket_sum_(sums, scores, ids, owner)
    return sums


def _met_by_tables(
    tokens: Tokens | None, x: Tokens, dx: Tokens
) -> tuple[Tokens, Tokens, Tokens | None]:
    """Returns the tokens that tables meet, where their gradient goes, and this if it is its own."""
    if tokens is None:
        return x, dx, None
    own = torch.zeros_like(dx)
    return cast(tokens, x.dtype).contiguous(), own, own


def _add_rows_(out: Tokens, dims: slice, sums: Tensor, table: VectorTable, scale: float) -> None:
    """Adds to each token its sums times the rows of the table."""
    if table.shape[0] == 1 and table.dtype == out.dtype and dims == slice(None):  # in place
        flat = out.flatten(0, 2)
        torch.addmm(flat, sums.flatten(0, 2), table[0], alpha=scale, out=flat)
    else:
        out[..., dims].add_(product(cast(sums, table.dtype), table_matrix(table), scale))


def _role(
    call: CompactCall, tables: Sequence[VectorTable], dtype: torch.dtype
) -> list[tuple[slice, VectorTable, Ids]]:
    """Returns, for each table of a role, its head dimensions, the table and the ids of its map."""
    if not tables:
        return []
    slices = head_slices(tables, call.q.shape[-1])
    return [
        (dims, cast(table, dtype), ids)
        for dims, table, ids in zip(slices, tables, pair_ids(call.ids), strict=False)
    ]
