"""The forward pass: attention with an online softmax, and the sums for value tables.

A program computes BLOCK_M queries of one head; it walks over all keys in tiles of BLOCK_N.
"""

import triton
import triton.language as tl

from irpe.ops.impl.triton.kernels.tiles import (
    add_bucket_sums,
    add_rows,
    drop,
    load_ids,
    load_softmax,
    load_tokens,
    narrow,
    scores,
    store_rounded,
)


@triton.jit
def forward_kernel(
    q, k, v, pairs, out, rest, softmax,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_MAPS: tl.constexpr, BITS: tl.constexpr, IS_ADDITIVE: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Writes sum_j a_ij v_j (Eq. 1 with the scores of Eq. 13) and what the weights need again."""
    blocks = tl.cdiv(pairs.queries, BLOCK_M)
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    b, h = head // pairs.heads, head % pairs.heads
    i, d = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    q_tile = load_tokens(q, b, h, i[:, None], d[None, :], pairs.queries, DIM, WIDE)
    largest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    z = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for first in range(0, pairs.keys, BLOCK_N):
        j = first + tl.arange(0, BLOCK_N)
        k_tile = load_tokens(k, b, h, j[None, :], d[:, None], pairs.keys, DIM, WIDE)
        ids = load_ids(pairs, b, i[:, None], j[None, :])
        e = scores(
            q_tile, k_tile, pairs, b, h, i[:, None], j[None, :], ids,
            NUM_MAPS, BITS, IS_ADDITIVE, PRECISION,
        )  # fmt: skip
        larger = tl.maximum(largest, tl.max(e, 1))
        reference = tl.where(larger == float("-inf"), 0.0, larger)
        a = tl.exp2(e - reference[:, None])
        before = tl.exp2(largest - reference)
        total = total * before + tl.sum(a, 1)
        a = drop(a, pairs, b, h, i[:, None], j[None, :])
        v_tile = load_tokens(v, b, h, j[:, None], d[None, :], pairs.keys, DIM, WIDE)
        z = z * before[:, None]
        z = tl.dot(narrow(a, q, WIDE), v_tile, z, input_precision=PRECISION)
        largest = larger
    has_no_key = total == 0.0
    inverse = tl.where(has_no_key, 0.0, 1.0 / tl.where(has_no_key, 1.0, total))
    z = z * inverse[:, None]
    store_rounded(out, rest, b, h, i[:, None], d[None, :], pairs.queries, z, q, DIM, WIDE)
    of_query = head.to(tl.int64) * pairs.queries + i
    largest = tl.where(has_no_key, float("inf"), largest)
    tl.store(softmax.largest + of_query, largest, mask=i < pairs.queries)
    tl.store(softmax.inverse + of_query, inverse, mask=i < pairs.queries)


@triton.jit
def value_kernel(
    q, k, pairs, softmax, present, sums, table, attended, out, rest,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, NUM_MAPS: tl.constexpr, BITS: tl.constexpr,
    IS_ADDITIVE: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Adds sum_j a_ij r^V_ij (Eq. 17) to what `forward_kernel` wrote.

    The weights are computed again and added up per row; the product with the
    table follows once for all keys.
    """
    blocks = tl.cdiv(pairs.queries, BLOCK_M)
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    b, h = head // pairs.heads, head % pairs.heads
    i, d = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    of_query = head.to(tl.int64) * pairs.queries + i
    q_tile = load_tokens(q, b, h, i[:, None], d[None, :], pairs.queries, DIM, WIDE)
    largest, inverse = load_softmax(softmax, of_query, i < pairs.queries)
    tiles = tl.cdiv(pairs.keys, BLOCK_N)
    for tile in range(0, tiles):
        j = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        k_tile = load_tokens(k, b, h, j[None, :], d[:, None], pairs.keys, DIM, WIDE)
        ids = load_ids(pairs, b, i[:, None], j[None, :])
        e = scores(
            q_tile, k_tile, pairs, b, h, i[:, None], j[None, :], ids,
            NUM_MAPS, BITS, IS_ADDITIVE, PRECISION,
        )  # fmt: skip
        a = tl.exp2(e - largest[:, None]) * inverse[:, None]
        a = drop(a, pairs, b, h, i[:, None], j[None, :])
        add_bucket_sums(
            sums, b, h, i, pairs.queries, a, ids, present, block * tiles + tile, NUM_MAPS, BITS, 1
        )
    z = load_tokens(attended, b, h, i[:, None], d[None, :], pairs.queries, DIM, WIDE)
    z = add_rows(
        z, sums, table, b, h, i, pairs.queries, q, 1.0, DIM, BLOCK_D, BLOCK_R, PRECISION, WIDE
    )
    store_rounded(out, rest, b, h, i[:, None], d[None, :], pairs.queries, z, q, DIM, WIDE)
