"""Forward and backward of attention with encodings over blocks of pairs.

Only gathers, bucket sums and the products of attention itself happen inside a block; the products
with the tables, n k d operations, happen once. Scores, softmax and sums are float32 at least.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor

from irpe.ops.differentiable import CompactCall, Gradients
from irpe.ops.gather import bias_sum, gather_bias
from irpe.ops.impl.blockwise.roles import (
    add_combinations,
    join_sums,
    keeps_sums,
    make_terms,
    release_products,
    restore_sums,
    table_gradients,
)
from irpe.ops.impl.blockwise.terms import Block, Term
from irpe.ops.precision import accumulation_dtype, add_product_, product_dtype
from irpe.ops.shapes import Keys, Scores, Tokens
from irpe.ops.softmax import masked_scores, masked_softmax_into

_softmax_backward = torch.ops.aten._softmax_backward_data.out


class BlockPasses:
    """One call, made ready for its passes.

    Args:
        call: The call.
        blocks: What is computed at once; together they are all pairs, each once.
    """

    def __init__(self, call: CompactCall, blocks: Sequence[Block]) -> None:
        operand = product_dtype(call.q.dtype, call.q.device)
        self.call, self.blocks, self.operand = call, blocks, operand
        self.dtype, self.scale = accumulation_dtype(call.q.dtype), call.scale
        self.q, self.k, self.v = (x.to(operand) for x in (call.q, call.k, call.v))
        self.tables = call.tables.to(operand)
        self.ids, self.grid = call.ids, call.grid
        self.bias = [table.to(self.dtype) * self.scale for table in call.bias_tables]
        self._memory: dict[str, Tensor] = {}
        self._last_bias: tuple[object, Tensor] | None = None
        table_q = self.q if call.table_q is None else call.table_q.to(operand)
        table_k = self.k if call.table_k is None else call.table_k.to(operand)
        self.key_terms = self._terms(table_q, self.tables.key, self.scale)
        self.query_terms = make_terms(
            table_k, self.tables.query, self.ids, self.grid, self.scale, owner="key"
        )

    def _terms(self, x: Tokens, tables: Sequence[Tensor], scale: float = 1.0) -> list[Term]:
        return make_terms(x, tables, self.ids, self.grid, scale)

    def forward(self, keeps: bool) -> tuple[Tokens, list[Tensor]]:
        """Returns the output; if asked to, the weights, and their sums for value tables."""
        if keeps or self.tables.value or self.call.dropout_p:
            return self._forward_with_weights(keeps)
        return self._forward_without_weights(), []

    def _forward_without_weights(self) -> Tokens:
        """Returns the output through PyTorch's kernel, which takes b_ij as a mask."""
        out = None
        for block in self.blocks:
            batch, heads, queries = block
            bias = self._position_scores(block)
            if self.call.mask is not None:
                bias = masked_scores(bias, self._mask(block))
            q, k, v = self.q[batch, heads, queries], self.k[batch, heads], self.v[batch, heads]
            bias = bias.to(self.operand)
            part = F.scaled_dot_product_attention(q, k, v, bias, scale=self.scale)
            part = part.to(self.call.q.dtype)
            if len(self.blocks) == 1:
                return part
            out = self._empty(part.shape[3], part.dtype) if out is None else out
            out[block] = part
        assert out is not None
        return out

    def _forward_with_weights(self, keeps: bool) -> tuple[Tokens, list[Tensor]]:
        self._lay_out()
        value_terms = self._terms(self.q, self.tables.value)
        out = self._empty(self.v.shape[3], self.dtype)
        kept = [self._empty(self.k.shape[2], self.dtype)] if keeps else []
        for index, block in enumerate(self.blocks):
            a = self._weights(block, kept[0][block] if keeps else None)
            a = self._drop(a, index)
            v = self.v[block.batch, block.heads]
            add_product_(out[block], a.to(self.operand), v, beta=0.0)
            for term in value_terms:
                term.collect(block, a)
        add_combinations(out, value_terms, self.tables.value)
        if keeps and keeps_sums(self.tables.value, self.ids):
            kept.append(join_sums(value_terms))
        return out.to(self.call.q.dtype), kept

    def backward(self, grad: Tokens, kept: list[Tensor], mask_needs_grad: bool) -> Gradients:
        """Returns the gradients.

        Args:
            grad: The gradient of the output.
            kept: What the forward pass kept, if anything.
            mask_needs_grad: Whether the mask was learned.
        """
        self._lay_out()
        grad = grad.to(self.operand).contiguous()
        dq, dk, dv = (torch.empty_like(x, dtype=self.dtype) for x in (self.q, self.k, self.v))
        dbias = [torch.zeros_like(table) for table in self.bias]
        mask = self.call.mask
        dmask = None
        if mask_needs_grad and mask is not None:
            dmask = torch.zeros_like(mask, dtype=self.dtype)
        value_terms = self._terms(grad, self.tables.value)
        if len(kept) > 1:
            restore_sums(value_terms, kept[1])

        for index, block in enumerate(self.blocks):
            batch, heads, queries = block
            a = kept[0][block] if kept else self._weights(block, None)
            q, k, v = self.q[block], self.k[batch, heads], self.v[batch, heads]
            g, dropped = grad[block], self._drop(a, index)
            has_before = float(queries.start > 0)  # other queries have added to dk and dv
            add_product_(dv[batch, heads], dropped.to(self.operand).mT, g, beta=has_before)
            da = self._scratch("da", a.shape)
            has_position = self._write_products(block, value_terms, da)
            add_product_(da, g, v.mT, beta=float(has_position))
            for term in value_terms if len(kept) < 2 else ():
                term.collect(block, dropped)
            da = self._drop(da, index)
            de = self._scratch("e", a.shape)
            _softmax_backward(da, a, -1, self.dtype, grad_input=de)
            narrow = de.to(self.operand)
            add_product_(dq[block], narrow, k, self.scale, beta=0.0)
            add_product_(dk[batch, heads], narrow.mT, q, self.scale, beta=has_before)
            for term in (*self.key_terms, *self.query_terms):
                term.collect(block, de)
            for table, ids in zip(dbias, self.ids, strict=False):
                of_heads = table if table.shape[0] == 1 else table[heads]
                of_heads += bias_sum(de, ids[queries], of_heads)
            if dmask is not None:
                part = dmask[_within(dmask, block)]
                part += de.sum_to_size(part.shape)
        return self._gradients(dq, dk, dv, dbias, dmask, value_terms)

    def _gradients(
        self,
        dq: Tokens,
        dk: Keys,
        dv: Keys,
        dbias: Sequence[Tensor],
        dmask: Tensor | None,
        value_terms: Sequence[Term],
    ) -> Gradients:
        call, tables = self.call, self.tables
        release_products((*self.key_terms, *self.query_terms, *value_terms))
        table_dq = None if call.table_q is None else torch.zeros_like(dq)
        table_dk = None if call.table_k is None else torch.zeros_like(dk)
        add_combinations(dq if table_dq is None else table_dq, self.key_terms, tables.key)
        add_combinations(dk if table_dk is None else table_dk, self.query_terms, tables.query)
        of_tables = [
            *table_gradients(self.query_terms, tables.query),
            *table_gradients(self.key_terms, tables.key),
            *table_gradients(value_terms, tables.value),
            *(table * self.scale for table in dbias),
        ]
        found = Gradients(dq, dk, dv, table_dq, table_dk, dmask, of_tables)
        return found.to(call.q.dtype)

    def _weights(self, block: Block, out: Scores | None) -> Scores:
        """Returns the attention weights of a block, before dropout."""
        q, k = self.q[block], self.k[block.batch, block.heads]
        e = self._scratch("e", (*q.shape[:3], k.shape[2]))
        has_position = self._write_position_scores(block, e)
        add_product_(e, q, k.mT, self.scale, beta=float(has_position))
        mask = None if self.call.mask is None else self._mask(block)
        return masked_softmax_into(e, mask, self._scratch("a", e.shape) if out is None else out)

    def _position_scores(self, block: Block) -> Float[Tensor, "_ _ query key"]:
        """Returns the scaled b_ij of a block; those of a bias alone have one image."""
        if not self.key_terms and not self.query_terms:
            return self._bias_scores(block)
        scores = self._scratch("e", (*self.q[block].shape[:3], self.k.shape[2]))
        self._write_position_scores(block, scores)
        return scores

    def _write_position_scores(self, block: Block, out: Scores) -> bool:
        """Writes the scaled b_ij of a block; returns whether there are any."""
        has_terms = self._write_products(block, (*self.key_terms, *self.query_terms), out)
        if self.bias:
            bias = self._bias_scores(block)
            out.add_(bias) if has_terms else out.copy_(bias)
        return has_terms or bool(self.bias)

    def _bias_scores(self, block: Block) -> Float[Tensor, "1 heads_or_1 query key"]:
        """Returns the scaled scalars of a block; blocks of the same queries follow each other."""
        is_shared = all(table.shape[0] == 1 for table in self.bias)
        place = block.queries if is_shared else block[1:]
        if self._last_bias is None or self._last_bias[0] != place:
            total: Tensor | None = None
            for table, ids in zip(self.bias, self.ids, strict=False):
                of_heads = table if table.shape[0] == 1 else table[block.heads]
                found = gather_bias(of_heads, ids[block.queries])
                total = found if total is None else total.add_(found)
            assert total is not None
            self._last_bias = place, total.unsqueeze(0)
        return self._last_bias[1]

    def _write_products(self, block: Block, terms: Sequence[Term], out: Scores) -> bool:
        """Writes the sum of the terms' products; returns whether there are any."""
        for index, term in enumerate(terms):
            if index:
                term.add_products(block, out)
            else:
                term.write_products(block, out)
        return bool(terms)

    def _mask(self, block: Block) -> Tensor:
        assert self.call.mask is not None
        return self.call.mask[_within(self.call.mask, block)]

    def _drop(self, scores: Scores, index: int) -> Scores:
        """Returns the scores after dropout: block `index` always loses the same ones."""
        if self.call.seed is None:
            return scores
        generator = torch.Generator(scores.device).manual_seed(int(self.call.seed) + index)
        keep = 1.0 - self.call.dropout_p
        return torch.empty_like(scores).bernoulli_(keep, generator=generator).mul_(scores / keep)

    def _scratch(self, name: str, shape: Sequence[int]) -> Scores:
        """Returns memory for the scores of a block, the same for all blocks."""
        size = math.prod(shape)
        if name not in self._memory or self._memory[name].numel() < size:
            self._memory[name] = self.q.new_empty(size, dtype=self.dtype)
        return self._memory[name][:size].view(shape)

    def _empty(self, width: int, dtype: torch.dtype) -> Tensor:
        """Returns an empty tensor of a vector for each query."""
        return self.q.new_empty(*self.q.shape[:3], width, dtype=dtype)

    def _lay_out(self) -> None:
        """Lays tokens out for matrix products; PyTorch's kernel takes any layout."""
        self.q, self.k, self.v = self.q.contiguous(), self.k.contiguous(), self.v.contiguous()


def _within(mask: Tensor, block: Block) -> tuple[slice, ...]:
    """Returns where a mask, which may be broadcast, has its part for a block."""
    return tuple(
        slice(None) if size == 1 else part for size, part in zip(mask.shape, block, strict=False)
    )
