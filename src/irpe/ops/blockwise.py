"""Attention with encodings, forward and backward, block by block.

Only lookups, bucket sums and the two products of attention itself happen inside a block.
"""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float, Int
from torch import Tensor

from irpe.ops.lookup import accumulation_dtype, bucket_sum, lookup
from irpe.ops.shapes import Mask, Pairs, Tokens
from irpe.ops.tables import Tables, shares
from irpe.ops.terms import Block, Term, make_terms, uses_pairs

_NUMBERS_IN_A_BLOCK = 2**20
_NUMBERS_IN_A_MASK = 4_900_000  # equal parts are 1,024 queries of a head at 4,096 tokens: see docs


class Blockwise:
    """One call of attention; everything is held in float32 at least, q already scaled.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        tables: The tables, restricted to the used rows.
        ids: The compact ids, one for each table of a role.
        attn_mask: As in `scaled_dot_product_attention`.
        seed: From which the dropped weights are drawn, again in each pass.
        dropout_p: The probability with which a weight is dropped.
        scale: What the scores are multiplied with.
        grid: The shape of the grid if the buckets repeat over it, else nothing.
        rows: The distinct rows of the one map and their numbers; without them, each map depends on
            one axis of the grid.
    """

    def __init__(
        self,
        q: Tokens,
        k: Tokens,
        v: Tokens,
        tables: Tables,
        ids: Sequence[Int[Tensor, "query key"]],
        attn_mask: Tensor | None,
        seed: Tensor | None,
        dropout_p: float,
        scale: float,
        grid: Sequence[int] = (),
        rows: Sequence[Tensor] = (),
    ) -> None:
        self.grid, self.rows = tuple(grid), rows
        self.out_dtype, self.dtype = q.dtype, accumulation_dtype(q.dtype)
        self.q = torch.mul(q, scale, out=torch.empty(q.shape, dtype=self.dtype, device=q.device))
        self.k, self.v = k.to(self.dtype), v.to(self.dtype)
        self.ids, self.attn_mask, self.scale = ids, attn_mask, scale
        self.seed, self.dropout_p = seed, dropout_p
        self.tables = tables.to(self.dtype)
        self.key_terms = self._terms(self.q, self.tables.key)
        scaled = tuple(table * scale for table in self.tables.query)
        self.query_terms = self._terms(self.k, scaled, by_key=True)
        self.bias = [table * scale for table in self.tables.bias]

    def forward(self, keeps_weights: bool) -> tuple[Tokens, Tensor]:
        """Returns the output, and the weights, or an empty tensor if they are not kept."""
        kept = None
        if keeps_weights or self.tables.value or self.dropout_p:
            out, kept = self._forward_with_weights(keeps_weights)
        else:
            out = self._forward_without_weights()
        # Laid out token by token, as PyTorch's own kernel does: merging heads then copies nothing.
        out = out.to(self.out_dtype).transpose(1, 2).contiguous().transpose(1, 2)
        return out, self.q.new_empty(0) if kept is None else kept

    def _forward_without_weights(self) -> Tokens:
        """Returns the output through PyTorch's kernel, which takes b_ij as a mask."""
        out = None
        for block in self._blocks(_NUMBERS_IN_A_MASK):
            batch, heads, queries = block
            bias = self._add_position_scores(block, None)
            if self.attn_mask is not None:
                mask = self.attn_mask[_within(self.attn_mask, block)]
                shape = torch.broadcast_shapes(bias.shape, mask.shape)
                bias = _apply_mask(bias.expand(shape).contiguous(), mask)
            q, k, v = self.q[batch, heads, queries], self.k[batch, heads], self.v[batch, heads]
            part = F.scaled_dot_product_attention(q, k, v, bias, scale=1.0)
            out = _put(part, out, block, self.v)
        assert out is not None
        return out

    def _forward_with_weights(self, keeps_weights: bool) -> tuple[Tokens, Tensor | None]:
        self._lay_out()
        value_terms = self._terms(self.q, self.tables.value)
        out = kept = None
        for number, block in enumerate(self._blocks(_NUMBERS_IN_A_BLOCK)):
            a = self._weights(block)
            if keeps_weights:
                kept = _put(a, kept, block, self.q)
            a = self._drop(a, number)
            out = _put(a @ self.v[block.batch, block.heads], out, block, self.v)
            for term in value_terms:
                term.collect(block, a)
        assert out is not None
        _add_combinations(out, value_terms, self.tables.value)
        return out, kept

    def backward(self, grad: Tokens, kept: Tensor, mask_needs_grad: bool) -> list[Tensor]:
        """Returns the gradients of q, k, v, of the tables by role, and of the mask if it needs one.

        Args:
            grad: The gradient of the output.
            kept: The weights, or an empty tensor if they were not kept.
            mask_needs_grad: Whether the mask was learned.
        """
        grad = grad.to(self.dtype).contiguous()
        self._lay_out()
        dq, dk, dv = torch.empty_like(self.q), torch.zeros_like(self.k), torch.zeros_like(self.v)
        dbias = [torch.zeros_like(table) for table in self.bias]
        dmask = self._zero_mask() if mask_needs_grad else None
        value_terms = self._terms(grad, self.tables.value)

        for number, block in enumerate(self._blocks(_NUMBERS_IN_A_BLOCK)):
            batch, heads, queries = block
            a = kept[batch, heads, queries] if kept.numel() else self._weights(block)
            dropped = self._drop(a, number)
            dv[batch, heads] += dropped.mT @ grad[batch, heads, queries]
            da = grad[batch, heads, queries] @ self.v[batch, heads].mT
            for term in value_terms:
                term.add_products(block, da)
                term.collect(block, dropped)
            da = self._drop(da, number)
            de = torch.ops.aten._softmax_backward_data(da, a, -1, self.dtype)
            dq[batch, heads, queries] = de @ self.k[batch, heads]
            dk[batch, heads] += de.mT @ self.q[batch, heads, queries]
            for term in (*self.key_terms, *self.query_terms):
                term.collect(block, de)
            for table, ids in zip(dbias, self.ids, strict=False):
                sums = bucket_sum(de.sum(0), ids[queries], table.shape[1], "nobody").squeeze(1)
                table += sums.sum_to_size(table.shape)
            if dmask is not None:
                part = dmask[_within(dmask, block)]
                part += de.sum_to_size(part.shape)

        _add_combinations(dq, self.key_terms, self.tables.key)
        _add_combinations(dk, self.query_terms, self.tables.query)
        table_gradients = [
            *(table * self.scale for table in _gradients(self.query_terms, self.tables.query)),
            *_gradients(self.key_terms, self.tables.key),
            *_gradients(value_terms, self.tables.value),
            *(table * self.scale for table in dbias),
        ]
        gradients = [dq * self.scale, dk, dv, *table_gradients]
        if dmask is not None:
            gradients.append(dmask)
        return [gradient.to(self.out_dtype) for gradient in gradients]

    def _weights(self, block: Block) -> Pairs:
        """Returns the attention weights of a block, before dropout."""
        batch, heads, queries = block
        e = self.q[batch, heads, queries] @ self.k[batch, heads].mT
        self._add_position_scores(block, e)
        if self.attn_mask is None:
            return torch.softmax(e, dim=-1, out=e)
        e = _apply_mask(e, self.attn_mask[_within(self.attn_mask, block)])
        has_no_key = e.amax(dim=-1, keepdim=True) == float("-inf")
        return torch.softmax(e, dim=-1, out=e).masked_fill_(has_no_key, 0.0)

    def _add_position_scores(
        self, block: Block, scores: Pairs | None
    ) -> Float[Tensor, "_ _ query key"]:
        """Returns the scores with what all encodings add to them, in place where there are any."""
        for term in (*self.key_terms, *self.query_terms):
            if scores is None:
                scores = term.products(block)
            else:
                term.add_products(block, scores)
        for table, ids in zip(self.bias, self.ids, strict=False):
            found = lookup(table.unsqueeze(1), ids[block.queries], "nobody").unsqueeze(0)
            scores = found if scores is None else scores.add_(found)
        assert scores is not None
        return scores

    def _drop(self, pairs: Pairs, number: int) -> Pairs:
        """Returns the pairs after dropout: block `number` always loses the same ones."""
        if self.seed is None:
            return pairs
        generator = torch.Generator(pairs.device).manual_seed(int(self.seed) + number)
        keep = 1.0 - self.dropout_p
        return torch.empty_like(pairs).bernoulli_(keep, generator=generator).mul_(pairs / keep)

    def _terms(self, x: Tokens, tables: Sequence[Tensor], by_key: bool = False) -> list[Term]:
        return make_terms(x, tables, self.ids, self.grid, self.rows, by_key)

    def _blocks(self, numbers: int) -> Iterator[Block]:
        """Yields blocks of at most `numbers` pairs: whole images, or queries of some heads of one.

        The heads stay together where each pair is looked up: the places to look at are the same.
        """
        batch, heads, queries, dim = self.q.shape
        keys, at_once, widest = self.k.shape[2], heads, 0
        for role in self.tables.roles()[:3]:
            for table, ids in zip(role, self.ids, strict=False):
                if uses_pairs(table, ids):
                    widest = max(widest, table.shape[0] * dim)
        if self.grid and not (widest or self.tables.query or self.bias):
            at_once = _equal_parts(heads, numbers // (queries * keys))
        fitting = numbers // (max(at_once, widest) * keys)
        images = max(1, fitting // queries) if at_once == heads else 1
        fitting = _equal_parts(queries, fitting)
        for image in range(0, max(batch, 1), images):
            for head in range(0, heads, at_once):
                for query in range(0, queries, fitting):
                    yield Block(
                        slice(image, image + images),
                        slice(head, head + at_once),
                        slice(query, query + fitting),
                    )

    def _zero_mask(self) -> Tensor:
        assert self.attn_mask is not None
        return torch.zeros_like(self.attn_mask, dtype=self.dtype)

    def _lay_out(self) -> None:
        """Lays keys and values out for matrix products; PyTorch's kernel takes any layout."""
        self.k, self.v = self.k.contiguous(), self.v.contiguous()


def _equal_parts(total: int, most: int) -> int:
    """Returns the size of parts of at most `most`, at least 1, that are as equal as can be."""
    return math.ceil(total / math.ceil(total / max(1, most)))


def _add_combinations(out: Tokens, terms: Sequence[Term], tables: Sequence[Tensor]) -> None:
    """Adds the combination of each term to the dimensions that its table meets."""
    for term, share in zip(terms, shares(tables, out.shape[-1]), strict=False):
        out[..., share] += term.combination()


def _gradients(terms: Sequence[Term], tables: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradient of each table; one term may have joined them."""
    if len(terms) == len(tables):
        return [term.gradient() for term in terms]
    parts = terms[0].gradient().split([table.shape[1] for table in tables], dim=1)
    return [part.clone() for part in parts]  # what an operator returns shares no memory


def _put(part: Tensor, whole: Tensor | None, block: Block, like: Tokens) -> Tensor:
    """Returns the whole with the part of a block in its place; a part may be all there is.

    The whole is one tensor from the start: many small ones, left between the large ones that come
    and go with each block, would keep the allocator from using their memory again.
    """
    batch, heads, tokens, _ = like.shape
    if part.shape[:3] == (batch, heads, tokens):
        return part
    if whole is None:
        whole = part.new_empty(batch, heads, tokens, part.shape[3])
    whole[block.batch, block.heads, block.queries] = part
    return whole


def _within(mask: Tensor, block: Block) -> tuple[slice, slice, slice]:
    """Returns where a mask, which may be broadcast, has its part for a block."""
    batch = slice(None) if mask.shape[0] == 1 else block.batch
    heads = slice(None) if mask.shape[1] == 1 else block.heads
    queries = slice(None) if mask.shape[2] == 1 else block.queries
    return batch, heads, queries


def _apply_mask(scores: Pairs, mask: Mask) -> Pairs:
    if mask.dtype == torch.bool:
        return scores.masked_fill_(~mask, float("-inf"))
    return scores.add_(mask)
