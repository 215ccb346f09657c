"""What the kernels share: a tile of queries x keys, its scores (Eq. 13-16) and its bucket sums.

The index tensors i (queries) and j (keys) of a tile have shapes that broadcast to the tile: (m, 1)
and (1, n), or (1, m) and (n, 1) where a tile is held transposed. Scores are float32.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


class Tokens(NamedTuple):
    """A tensor (batch, heads, tokens, dim) with its strides."""

    pointer: Any
    batch: Any
    head: Any
    token: Any
    element: Any


class Rows(NamedTuple):
    """A float32 tensor with one element for each token and table row, with its strides."""

    pointer: Any
    batch: Any
    head: Any
    row: Any
    token: Any


class Table(NamedTuple):
    """The joined tables of a role (heads, rows, dim), contiguous; stride 0 where heads share it."""

    pointer: Any
    head: Any
    rows: Any


class Mask(NamedTuple):
    """A mask with its strides; that of the queries is None where all of them share it."""

    pointer: Any
    batch: Any
    head: Any
    query: Any
    key: Any


class Ids(NamedTuple):
    """The packed bucket ids (batch, queries, keys), padded to whole tiles, with their strides."""

    pointer: Any
    batch: Any
    query: Any


class Present(NamedTuple):
    """The table rows that occur in each tile: `rows` lists them, `ends` says where maps end."""

    rows: Any
    ends: Any
    width: Any
    batch: Any


class Dropout(NamedTuple):
    """From which weights are dropped, in each pass the same ones."""

    seed: Any
    probability: Any


class Softmax(NamedTuple):
    """For each query the largest score, and one over the sum of 2^(score - largest).

    Their log-sum-exp would do, but not beside a mask of the lowest number, which absorbs the sum.
    Where no key is left they are infinity and 0, so that all weights are 0.
    """

    largest: Any
    inverse: Any


class Pairs(NamedTuple):
    """What the score of a pair depends on, beside q and k."""

    ids: Any
    by_query: Any
    by_key: Any
    mask: Any
    dropout: Any
    scale: Any
    heads: Any
    queries: Any
    keys: Any


@triton.jit
def head_of(x, b, h):
    """Returns where the tokens of one head start."""
    return x.pointer + tl.cast(b, tl.int64) * x.batch + tl.cast(h, tl.int64) * x.head


@triton.jit
def load_tokens(x, b, h, i, d, count, DIM: tl.constexpr, WIDE: tl.constexpr):
    """Loads tokens i in dimensions d, which broadcast to a tile; zeros beyond the last."""
    pointers = head_of(x, b, h) + i * x.token + d * x.element
    tile = tl.load(pointers, mask=(i < count) & (d < DIM), other=0.0)
    if WIDE:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def store_tokens(x, b, h, i, d, count, tile, DIM: tl.constexpr):
    """Stores a tile as tokens i in dimensions d, in the dtype of the tensor."""
    pointers = head_of(x, b, h) + i * x.token + d * x.element
    tl.store(pointers, tile.to(x.pointer.dtype.element_ty), mask=(i < count) & (d < DIM))


@triton.jit
def narrow(tile, like, WIDE: tl.constexpr):
    """Rounds a float32 tile to the dtype of q before a product.

    The interpreter cannot multiply 16-bit tiles: there (WIDE) it stays float32 after rounding.
    """
    if not WIDE:
        tile = tile.to(like.pointer.dtype.element_ty)
    elif like.pointer.dtype.element_ty == tl.float16:
        tile = tile.to(tl.float16).to(tl.float32)
    elif like.pointer.dtype.element_ty == tl.bfloat16:  # to nearest even
        bits = tile.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        tile = bits.to(tl.float32, bitcast=True)
    return tile


@triton.jit
def store_rounded(out, rest, b, h, i, d, count, tile, like, DIM: tl.constexpr, WIDE: tl.constexpr):
    """Stores a tile in the dtype of q, and what rounding takes away, for the backward pass."""
    rounded = narrow(tile, like, WIDE)
    store_tokens(out, b, h, i, d, count, rounded, DIM)
    if rest is not None:
        store_tokens(rest, b, h, i, d, count, tile - rounded.to(tl.float32), DIM)


@triton.jit
def load_ids(pairs, b, i, j):
    """Loads the packed ids of a tile; beyond the last query or key they are 0."""
    start = pairs.ids.pointer + tl.cast(b, tl.int64) * pairs.ids.batch
    return tl.load(start + (i * pairs.ids.query + j)).to(tl.int32)


@triton.jit
def rows_of(ids, MAP: tl.constexpr, NUM_MAPS: tl.constexpr, BITS: tl.constexpr):
    """Returns the table rows of one map from packed ids."""
    if NUM_MAPS > 1:
        ids = (ids >> (MAP * BITS)) & ((1 << BITS) - 1)
    return ids


@triton.jit
def look_up(z, b, h, token, count, ids, NUM_MAPS: tl.constexpr, BITS: tl.constexpr):
    """Returns z of each pair's token and row, summed over the maps: Eq. 28."""
    start, offset = head_of(z, b, h), tl.minimum(token, count - 1) * z.token
    found = tl.load(start + (offset + rows_of(ids, 0, NUM_MAPS, BITS) * z.row))
    for m in tl.static_range(1, NUM_MAPS):
        found += tl.load(start + (offset + rows_of(ids, m, NUM_MAPS, BITS) * z.row))
    return found


@triton.jit
def position_scores(pairs, b, h, i, j, ids, shape, NUM_MAPS: tl.constexpr, BITS: tl.constexpr):
    """Returns b_ij of a tile, Eq. 14-16: it starts the accumulator of the product of q and k."""
    if pairs.by_query is not None:
        found = look_up(pairs.by_query, b, h, i, pairs.queries, ids, NUM_MAPS, BITS)
        if pairs.by_key is not None:
            found += look_up(pairs.by_key, b, h, j, pairs.keys, ids, NUM_MAPS, BITS)
    elif pairs.by_key is not None:
        found = look_up(pairs.by_key, b, h, j, pairs.keys, ids, NUM_MAPS, BITS)
    else:
        found = tl.zeros(shape, dtype=tl.float32)
    return found


@triton.jit
def scores(
    left, right, pairs, b, h, i, j, ids,
    NUM_MAPS: tl.constexpr, BITS: tl.constexpr, IS_ADDITIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns the scores e_ij / ln 2 of a tile under the mask (Eq. 13); -inf beyond the last key.

    Their powers of 2 are those of e: a GPU has an instruction for powers of 2, which needs no more
    care for small results, while e^x takes four more instructions for each pair.

    The tile is the product of left and right: of q and k transposed, or of k and q transposed.
    """
    shape: tl.constexpr = [left.shape[0], right.shape[1]]
    e = position_scores(pairs, b, h, i, j, ids, shape, NUM_MAPS, BITS)
    e = tl.dot(left, right, e, input_precision=PRECISION) * (pairs.scale * LOG2_E)
    if pairs.mask is not None:
        offset = tl.minimum(j, pairs.keys - 1) * pairs.mask.key
        if pairs.mask.query is not None:
            offset += tl.minimum(i, pairs.queries - 1) * pairs.mask.query
        found = tl.load(head_of(pairs.mask, b, h) + offset)
        if IS_ADDITIVE:
            found = found.to(tl.float32)
            wide = found * LOG2_E  # the lowest number, which is not -inf, stays what it is
            e += tl.where(wide == float("-inf"), found, wide)
        else:
            e = tl.where(found != 0, e, float("-inf"))
    return tl.where(j < pairs.keys, e, float("-inf"))


@triton.jit
def load_softmax(softmax, of_query, is_query):
    """Loads both of some queries; beyond the last, no key is left."""
    largest = tl.load(softmax.largest + of_query, mask=is_query, other=float("inf"))
    return largest, tl.load(softmax.inverse + of_query, mask=is_query, other=0.0)


@triton.jit
def drop(tile, pairs, b, h, i, j):
    """Returns a tile after dropout: a pair is dropped in each pass, or in none."""
    if pairs.dropout is not None:
        seed = pairs.dropout.seed + b * pairs.heads + h
        kept = tl.rand(seed, i * pairs.keys + j) >= pairs.dropout.probability
        tile = tl.where(kept, tile / (1.0 - pairs.dropout.probability), 0.0)
    return tile


@triton.jit
def add_bucket_sums(
    sums, b, h, token, count, tile, ids, present, index,
    NUM_MAPS: tl.constexpr, BITS: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Adds to each token's sums the pairs of a tile, for each table row: the adjoint of `look_up`.

    Only rows that occur in the tile are visited. A program alone writes to the sums of its tokens,
    one tile after the other, so that plain loads and stores give the same bits in each run.
    """
    start = head_of(sums, b, h) + token
    present_rows = present.rows + (b * present.batch + index) * present.width
    present_ends = present.ends + (b * present.batch + index) * NUM_MAPS
    tl.debug_barrier()  # what other threads stored for the tile before is seen
    first = 0
    for m in tl.static_range(NUM_MAPS):
        rows = rows_of(ids, m, NUM_MAPS, BITS)
        last = tl.load(present_ends + m)
        for position in range(first, last):
            row = tl.load(present_rows + position).to(tl.int32)
            part = tl.sum(tl.where(rows == row, tile, 0.0), AXIS)
            pointers = start + row * sums.row
            before = tl.load(pointers, mask=token < count, other=0.0)
            tl.store(pointers, before + part, mask=token < count)
        first = last


@triton.jit
def add_rows(
    total, sums, table, b, h, token, count, like, factor,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Adds to a tile of tokens their sums times the rows of the table, times a factor."""
    start = head_of(sums, b, h) + token[:, None]
    rows_start = table.pointer + h.to(tl.int64) * table.head
    d = tl.arange(0, BLOCK_D)
    found = tl.zeros(total.shape, dtype=tl.float32)
    tl.debug_barrier()
    for first in range(0, table.rows, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        is_there = (r[None, :] < table.rows) & (token[:, None] < count)
        s = tl.load(start + r[None, :] * sums.row, mask=is_there, other=0.0)
        is_there = (r[:, None] < table.rows) & (d[None, :] < DIM)
        rows = tl.load(rows_start + r[:, None] * DIM + d[None, :], mask=is_there, other=0.0)
        if WIDE:
            rows = rows.to(tl.float32)
        found = tl.dot(narrow(s, like, WIDE), rows, found, input_precision=PRECISION)
    return total + found * factor
