"""The efficient form with a backward pass of its own, on any device.

Eq. 27-28 carry the tables: each token meets the rows in use, what a pair needs is gathered, and the
backward pass sums pairs up per row. One forward and one backward for a slice of the batch, heads or
queries, and a loop over slices that bounds memory: where one slice is the whole call there is no
loop and no copy. Products with tables happen once, not once a slice. Scores, softmax and sums are
float32 at least.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from irpe.core.bucket_map import BucketMap
from irpe.ops.call import AttentionCall
from irpe.ops.differentiable import Gradients, define_operators, differentiable, is_transformed
from irpe.ops.gather import bias_sum, gather_bias
from irpe.ops.impl.fast.slices import (
    ALL,
    Slice,
    drop,
    keeps_weights,
    make_slices,
    part,
    part_of_mask,
    parts,
)
from irpe.ops.impl.fast.terms import RowTerm, Term, make_terms
from irpe.ops.precision import accumulation_dtype, add_product_, cast, product
from irpe.ops.shapes import Scores, Tokens
from irpe.ops.softmax import add_mask_, masked_scores, masked_softmax_into


def supports(call: AttentionCall) -> str | None:
    """Returns why the call cannot be computed here, or `None` if it can."""
    if is_transformed():
        return "torch.func and forward-mode differentiation need plain operators"
    return None


def attention(call: AttentionCall) -> Tokens:
    """Returns what the reference returns."""
    if torch.is_grad_enabled():  # both passes want tokens so: they are copied once
        call = call.contiguous()
    return differentiable(call, _PASSES, keeps_weights(call))


class FastPasses:
    """The two passes of `irpe.ops.differentiable`."""

    name = "fast"
    keeps_output = False

    def forward(self, call: AttentionCall, keeps: bool) -> tuple[Tokens, list[Tensor]]:
        """Returns the output; if asked to, the weights, and their sums for value tables."""
        if not (call.q.numel() and call.k.numel()):
            return call.q.new_zeros(call.q.shape), []
        dtype = call.q.dtype
        if not (keeps or call.value_tables or call.seed is not None):
            return _through_pytorchs_kernel(_Scores(call), dtype), []
        scores = _Scores(call.contiguous())
        call, wide, (q, k, v) = scores.call, scores.wide, scores.call[:3]
        terms = make_terms(q, call.value_tables, call.maps, 1.0) if call.value_tables else []
        out = q.new_empty(q.shape, dtype=wide)
        weights = q.new_empty(*q.shape[:3], k.shape[2], dtype=wide) if keeps else None
        for place in make_slices(call, True, _per_pair(*scores.terms, *terms)):
            (of_out, of_q), (of_k, of_v) = parts(place, (out, q), (k, v))
            of_weights = weights if weights is None or place is ALL else weights[place]
            a = scores.weights(of_q, of_k, place, of_weights)
            a = a if call.seed is None else drop(a, call, place)
            add_product_(of_out, a if wide == q.dtype else a.to(q.dtype), of_v, beta=0.0)
            for term in terms:
                term.collect(place, a, "combination")
        for term in terms:
            term.add_combination_(out)
        out = out if dtype == wide else out.to(dtype)
        return out, [] if weights is None else [weights, *(_sums(terms) if terms else ())]

    def fake_forward(self, call: AttentionCall, keeps: bool) -> tuple[Tokens, list[Tensor]]:
        """Returns tensors of the shapes of what `forward` returns."""
        out = call.q.new_empty(call.q.shape)
        if not keeps or not call.num_pairs:
            return out, []
        shape, keys = call.q.shape[:3], call.k.shape[2]
        dtype = accumulation_dtype(call.q.dtype)
        terms = make_terms(call.q, call.value_tables, call.maps, 1.0) if call.value_tables else []
        rows = [sum(term.rows) for term in terms if isinstance(term, RowTerm)]
        return out, [call.q.new_empty(*shape, width, dtype=dtype) for width in (keys, *rows)]

    def backward(
        self, call: AttentionCall, grad: Tokens, kept: list[Tensor], mask_needs_grad: bool
    ) -> Gradients:
        """Returns the gradients, given that of the output and what was kept."""
        if not call.num_pairs:
            return _no_gradients(call, mask_needs_grad)
        dtype, scores = call.q.dtype, _Scores(call.contiguous())
        call, wide, scale = scores.call, scores.wide, call.scale
        operand, (q, k, v) = call.q.dtype, call[:3]
        g = cast(grad, operand).contiguous()
        dq, dk, dv = (torch.empty_like(x, dtype=wide) for x in (q, k, v))
        dmask = None
        if mask_needs_grad and call.mask is not None:
            dmask = torch.zeros_like(call.mask, dtype=wide)
        dbias = [torch.zeros_like(table, dtype=wide) for table in call.bias_tables]
        values = make_terms(g, call.value_tables, call.maps, 1.0) if call.value_tables else []
        to_collect = _restore_sums(values, kept[1:]) if kept else values
        for place in make_slices(call, True, _per_pair(*scores.terms, *values)):
            (of_q, of_g, of_dq), (of_k, of_v, of_dk, of_dv) = parts(
                place, (q, g, dq), (k, v, dk, dv)
            )
            a = part(kept[0], place) if kept else scores.weights(of_q, of_k, place, None)
            dropped = a if call.seed is None else drop(a, call, place)
            has_before = float(bool(place.queries.start))  # other queries have added to dk and dv
            add_product_(of_dv, cast(dropped, operand).mT, of_g, beta=has_before)
            da = _add_scores(of_g, of_v, _sum_of_scores(values, place), 1.0)
            for term in to_collect:
                term.collect(place, dropped, "gradient")
            da = da if call.seed is None else drop(da, call, place)
            in_place = torch.ops.aten._softmax_backward_data.out  # da is not used again
            de = in_place(da, a, -1, a.dtype, grad_input=da)
            narrow = cast(de, operand)
            add_product_(of_dq, narrow, of_k, scale, beta=0.0)
            add_product_(of_dk, narrow.mT, of_q, scale, beta=has_before)
            for term in scores.terms:
                term.collect(place, de)
            for table, bucket_map in zip(dbias, call.maps if dbias else (), strict=True):
                of_heads = table if table.shape[0] == 1 else table[place.heads]
                of_heads += bias_sum(de, _ids(bucket_map, place), of_heads)
            if dmask is not None:
                of_slice = part_of_mask(dmask, place)
                of_slice += de.sum_to_size(of_slice.shape)
        table_dq = None if call.table_q is None else torch.zeros_like(dq)
        table_dk = None if call.table_k is None else torch.zeros_like(dk)
        for term in scores.key_terms:
            term.add_combination_(dq if table_dq is None else table_dq)
        for term in scores.query_terms:
            term.add_combination_(dk if table_dk is None else table_dk)
        of_tables = [
            gradient
            for term in (*scores.query_terms, *scores.key_terms, *values)
            for gradient in term.gradients()
        ]
        of_tables += [table * scale for table in dbias]
        found = Gradients(dq, dk, dv, table_dq, table_dk, dmask, of_tables)
        return found.to(dtype)


class _Scores:
    """The scores of the encoding, b_ij times the scale, on any slice of a call."""

    def __init__(self, call: AttentionCall) -> None:
        self.wide = accumulation_dtype(call.q.dtype)
        # CUDA and ROCm devices multiply 16-bit matrices with float32 sums.
        operand = call.q.dtype if call.q.is_cuda else self.wide
        self.call = call = call if call.q.dtype == operand else call.to(operand)
        self.key_terms: list[Term] = []
        self.query_terms: list[Term] = []
        if call.key_tables:
            x = call.q if call.table_q is None else call.table_q
            self.key_terms = make_terms(x, call.key_tables, call.maps, call.scale)
        if call.query_tables:
            x = call.k if call.table_k is None else call.table_k
            self.query_terms = make_terms(x, call.query_tables, call.maps, call.scale, "key")
        self.terms = [*self.key_terms, *self.query_terms]
        self._last_bias: tuple[object, Tensor] | None = None

    def at(self, place: Slice) -> Tensor | None:
        """Returns the scores of a slice, which may be broadcast; `None` without tables for them."""
        total = _sum_of_scores(self.terms, place)
        if not self.call.bias_tables:
            return total
        bias = self._bias(place)
        return bias if total is None else total.add_(bias)

    def weights(self, q: Tokens, k: Tokens, place: Slice, out: Scores | None) -> Scores:
        """Returns the attention weights of a slice, before dropout.

        Args:
            q: Its queries.
            k: Its keys.
            place: The slice.
            out: Where to write the weights, if given.
        """
        b, mask = self.at(place), self.call.mask
        if b is not None and not self.terms:  # a bias alone may be broadcast, and is used again
            b = b.expand(*q.shape[:3], k.shape[2]).clone(memory_format=torch.contiguous_format)
        e = _add_scores(q, k, b, self.call.scale)
        if mask is None:
            return torch.softmax(e, dim=-1, out=out)
        return masked_softmax_into(e, part_of_mask(mask, place), out)

    def _bias(self, place: Slice) -> Tensor:
        """Returns the scaled scalars of a slice; slices of the same queries follow each other."""
        call = self.call
        is_shared = all(table.shape[0] == 1 for table in call.bias_tables)
        is_same = all(bucket_map.compact_ids.ndim == 2 for bucket_map in call.maps)
        key = (is_same or place.images, is_shared or place.heads, place.queries)
        if self._last_bias is None or self._last_bias[0] != key:
            total: Tensor | None = None
            for table, bucket_map in zip(call.bias_tables, call.maps, strict=True):
                table = table if table.shape[0] == 1 else table[place.heads]
                wide = cast(table, accumulation_dtype(table.dtype)) * call.scale
                found = gather_bias(wide, _ids(bucket_map, place))
                found = found if found.ndim == 4 else found.unsqueeze(0)
                total = found if total is None else total + found
            assert total is not None
            self._last_bias = key, total
        return self._last_bias[1]


def _through_pytorchs_kernel(scores: _Scores, dtype: torch.dtype) -> Tokens:
    """Returns the output of `scaled_dot_product_attention`, which takes b_ij as a mask."""
    call, out = scores.call, None
    for place in make_slices(call, False, _per_pair(*scores.terms)):
        bias = None  # two of them are much memory
        bias = scores.at(place)
        assert bias is not None
        if call.mask is not None:
            mask = part_of_mask(call.mask, place)
            bias = add_mask_(bias, mask) if scores.terms else masked_scores(bias, mask)
        q, k, v = call[:3]
        bias = bias if bias.dtype == q.dtype else bias.to(q.dtype)
        if place is ALL:
            return cast(F.scaled_dot_product_attention(q, k, v, bias, scale=call.scale), dtype)
        (q,), (k, v) = parts(place, (q,), (k, v))
        z = F.scaled_dot_product_attention(q, k, v, bias, scale=call.scale)
        out = z.new_empty(call.q.shape, dtype=dtype) if out is None else out
        out[place] = z
    assert out is not None
    return out


def _per_pair(*terms: Term) -> int:
    """Returns how many elements each pair of a slice takes."""
    return max([term.per_pair for term in terms], default=1)


def _ids(bucket_map: BucketMap, place: Slice) -> Tensor:
    """Returns the ids of the pairs of a slice, with an axis for heads where images differ."""
    ids = bucket_map.index[..., place.queries, :].long()
    return ids if ids.ndim == 2 else ids[place.images].unsqueeze(1)


def _sum_of_scores(terms: Sequence[Term], place: Slice) -> Scores | None:
    total: Tensor | None = None
    for term in terms:
        found = term.scores(place)
        total = found if total is None else total.add_(found)
    return total


def _add_scores(x: Tokens, y: Tokens, scores: Tensor | None, scale: float) -> Scores:
    """Returns the scores, if any, with the scaled product of each pair of tokens added."""
    if scores is None:
        return product(x, y.mT, scale)
    return add_product_(scores, x, y.mT, scale)


def _sums(terms: Sequence[Term]) -> list[Tensor]:
    """Returns the sums that are kept for the backward pass: those of the efficient form."""
    return [term.sums for term in terms if isinstance(term, RowTerm) and term.sums is not None]


def _restore_sums(terms: Sequence[Term], sums: Sequence[Tensor]) -> list[Term]:
    """Gives terms the sums that the forward pass kept; returns the terms that have none."""
    efficient = [term for term in terms if isinstance(term, RowTerm)]
    for term, kept in zip(efficient, sums, strict=True):
        term.sums = kept
    return [term for term in terms if not isinstance(term, RowTerm)]


def _no_gradients(call: AttentionCall, mask_needs_grad: bool) -> Gradients:
    """Returns zeros: there is no pair."""
    leaves = [None if x is None else torch.zeros_like(x) for x in call.leaves()]
    mask = leaves[5] if mask_needs_grad else None
    return Gradients(*leaves[:5], mask, leaves[6:])  # pyright: ignore


_PASSES = FastPasses()
define_operators(_PASSES)
