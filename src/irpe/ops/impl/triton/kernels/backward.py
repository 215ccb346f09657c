# pyright: basic
"""The backward pass: one kernel over queries, one over keys. Weights are computed again.

With a_ij from the saved log-sum-exp, da_ij = g_i . (v_j + r^V_ij) and delta_i = g_i . z_i, the
gradient of a scaled score is de_ij = a_ij (da_ij - delta_i).
"""

import triton
import triton.language as tl

from irpe.ops.impl.triton.kernels.tiles import (
    add_bucket_sums,
    add_rows,
    drop,
    load_ids,
    load_tokens,
    look_up,
    masked,
    narrow,
    position_scores,
    store_tokens,
)


@triton.jit
def query_kernel(
    q, k, v, pairs, g, out, lse, delta, of_values, present, sums, table, dq, table_dq,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, NUM_MAPS: tl.constexpr, BITS: tl.constexpr,
    IS_ADDITIVE: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Writes delta, the gradient of q, and the sums of de for each query and row of key tables.

    The sums times the table are the rest of the gradient of q, or that of table_q where the tables
    meet other queries.
    """
    blocks = tl.cdiv(pairs.queries, BLOCK_M)
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    b, h = head // pairs.heads, head % pairs.heads
    i, d = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    is_query, of_query = i < pairs.queries, head.to(tl.int64) * pairs.queries + i
    q_tile = load_tokens(q, b, h, i[:, None], d[None, :], pairs.queries, DIM, WIDE)
    g_tile = load_tokens(g, b, h, i[:, None], d[None, :], pairs.queries, DIM, WIDE)
    out_tile = load_tokens(out, b, h, i[:, None], d[None, :], pairs.queries, DIM, WIDE)
    change = tl.sum(g_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(delta + of_query, change, mask=is_query)
    log_sum = tl.load(lse + of_query, mask=is_query, other=float("inf"))
    dq_tile = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    tiles = tl.cdiv(pairs.keys, BLOCK_N)
    for tile in range(0, tiles):
        j = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        k_tile = load_tokens(k, b, h, j[:, None], d[None, :], pairs.keys, DIM, WIDE)
        v_tile = load_tokens(v, b, h, j[None, :], d[:, None], pairs.keys, DIM, WIDE)
        ids = load_ids(pairs, b, i[:, None], j[None, :])
        e = position_scores(
            pairs, b, h, i[:, None], j[None, :], ids, [BLOCK_M, BLOCK_N], NUM_MAPS, BITS
        )
        e = tl.dot(q_tile, tl.trans(k_tile), e, input_precision=PRECISION)
        e = masked(e, pairs, b, h, i[:, None], j[None, :], IS_ADDITIVE)
        a = tl.exp(e - log_sum[:, None])
        if of_values is None:
            da = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        else:
            da = look_up(of_values, b, h, i[:, None], pairs.queries, ids, NUM_MAPS, BITS)
        da = tl.dot(g_tile, v_tile, da, input_precision=PRECISION)
        da = drop(da, pairs, b, h, i[:, None], j[None, :])
        de = a * (da - change[:, None])
        dq_tile = tl.dot(narrow(de, q, WIDE), k_tile, dq_tile, input_precision=PRECISION)
        if sums is not None:
            add_bucket_sums(
                sums, b, h, i, pairs.queries, de, ids, present, block * tiles + tile,
                NUM_MAPS, BITS, 1,
            )  # fmt: skip
    dq_tile = dq_tile * pairs.scale
    if table is not None:
        met = dq_tile if table_dq is None else tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        met = add_rows(
            met, sums, table, b, h, i, pairs.queries, q, pairs.scale,
            DIM, BLOCK_D, BLOCK_R, PRECISION, WIDE,
        )  # fmt: skip
        if table_dq is None:
            dq_tile = met
        else:
            store_tokens(table_dq, b, h, i[:, None], d[None, :], pairs.queries, met, DIM)
    store_tokens(dq, b, h, i[:, None], d[None, :], pairs.queries, dq_tile, DIM)


@triton.jit
def key_kernel(
    q, k, v, pairs, g, lse, delta, of_values, present, sums, table, dk, dv, table_dk,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, NUM_MAPS: tl.constexpr, BITS: tl.constexpr,
    IS_ADDITIVE: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of k and v, and the sums of de for each key and row of query tables.

    A program computes BLOCK_N keys of one head and walks over all queries; its tiles are
    transposed, (keys, queries), so that they enter the products as they are.
    """
    blocks = tl.cdiv(pairs.keys, BLOCK_N)
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    b, h = head // pairs.heads, head % pairs.heads
    j, d = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    k_tile = load_tokens(k, b, h, j[:, None], d[None, :], pairs.keys, DIM, WIDE)
    v_tile = load_tokens(v, b, h, j[:, None], d[None, :], pairs.keys, DIM, WIDE)
    dk_tile = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv_tile = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    for tile in range(0, tl.cdiv(pairs.queries, BLOCK_M)):
        i = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        is_query, of_query = i < pairs.queries, head.to(tl.int64) * pairs.queries + i
        q_tile = load_tokens(q, b, h, i[:, None], d[None, :], pairs.queries, DIM, WIDE)
        ids = load_ids(pairs, b, i[None, :], j[:, None])
        e = position_scores(
            pairs, b, h, i[None, :], j[:, None], ids, [BLOCK_N, BLOCK_M], NUM_MAPS, BITS
        )
        e = tl.dot(k_tile, tl.trans(q_tile), e, input_precision=PRECISION)
        e = masked(e, pairs, b, h, i[None, :], j[:, None], IS_ADDITIVE)
        log_sum = tl.load(lse + of_query, mask=is_query, other=float("inf"))
        a = tl.exp(e - log_sum[None, :])
        g_tile = load_tokens(g, b, h, i[:, None], d[None, :], pairs.queries, DIM, WIDE)
        dropped = drop(a, pairs, b, h, i[None, :], j[:, None])
        dv_tile = tl.dot(narrow(dropped, q, WIDE), g_tile, dv_tile, input_precision=PRECISION)
        if of_values is None:
            da = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        else:
            da = look_up(of_values, b, h, i[None, :], pairs.queries, ids, NUM_MAPS, BITS)
        da = tl.dot(v_tile, tl.trans(g_tile), da, input_precision=PRECISION)
        da = drop(da, pairs, b, h, i[None, :], j[:, None])
        change = tl.load(delta + of_query, mask=is_query, other=0.0)
        de = a * (da - change[None, :])
        dk_tile = tl.dot(narrow(de, q, WIDE), q_tile, dk_tile, input_precision=PRECISION)
        if sums is not None:
            add_bucket_sums(
                sums, b, h, j, pairs.keys, de, ids, present, tile * blocks + block,
                NUM_MAPS, BITS, 1,
            )  # fmt: skip
    dk_tile = dk_tile * pairs.scale
    if table is not None:
        met = dk_tile if table_dk is None else tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
        met = add_rows(
            met, sums, table, b, h, j, pairs.keys, q, pairs.scale,
            DIM, BLOCK_D, BLOCK_R, PRECISION, WIDE,
        )  # fmt: skip
        if table_dk is None:
            dk_tile = met
        else:
            store_tokens(table_dk, b, h, j[:, None], d[None, :], pairs.keys, met, DIM)
    store_tokens(dk, b, h, j[:, None], d[None, :], pairs.keys, dk_tile, DIM)
    store_tokens(dv, b, h, j[:, None], d[None, :], pairs.keys, dv_tile, DIM)
