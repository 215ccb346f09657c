"""The backward pass: one kernel over queries, one over keys. Weights are computed again.

With a_ij from what the forward pass saved, da_ij = g_i . (v_j + r^V_ij) and delta_i = g_i . z_i,
the gradient of a scaled score is de_ij = a_ij (da_ij - delta_i). For 16 bits z_i is taken before
its rounding, which that difference would magnify.
"""

import triton
import triton.language as tl

from irpe.ops.impl.triton.kernels.tiles import (
    add_bucket_sums,
    add_rows,
    drop,
    head_of,
    load_ids,
    load_softmax,
    load_tokens,
    look_up,
    narrow,
    scores,
    store_tokens,
)


@triton.jit
def weight_gradients(
    left, right, pairs, b, h, i, j, ids, of_values,
    NUM_MAPS: tl.constexpr, BITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns da_ij of a tile, the product of left and right and what the value tables add."""
    if of_values is None:
        da = tl.zeros([left.shape[0], right.shape[1]], dtype=tl.float32)
    else:
        da = look_up(of_values, b, h, i, pairs.queries, ids, NUM_MAPS, BITS)
    da = tl.dot(left, right, da, input_precision=PRECISION)
    return drop(da, pairs, b, h, i, j)


@triton.jit
def query_kernel(
    q, k, v, pairs, g, out, rest, softmax, delta, of_values, present, sums, table, dq, table_dq,
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
    out_tile = out_tile.to(tl.float32)
    if rest is not None:
        out_tile += load_tokens(rest, b, h, i[:, None], d[None, :], pairs.queries, DIM, WIDE)
    change = tl.sum(g_tile.to(tl.float32) * out_tile, 1)
    tl.store(delta + of_query, change, mask=is_query)
    largest, inverse = load_softmax(softmax, of_query, is_query)
    dq_tile = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    tiles = tl.cdiv(pairs.keys, BLOCK_N)
    for tile in range(0, tiles):
        j = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        k_tile = load_tokens(k, b, h, j[:, None], d[None, :], pairs.keys, DIM, WIDE)
        v_tile = load_tokens(v, b, h, j[None, :], d[:, None], pairs.keys, DIM, WIDE)
        ids = load_ids(pairs, b, i[:, None], j[None, :])
        e = scores(
            q_tile, tl.trans(k_tile), pairs, b, h, i[:, None], j[None, :], ids,
            NUM_MAPS, BITS, IS_ADDITIVE, PRECISION,
        )  # fmt: skip
        a = tl.exp2(e - largest[:, None]) * inverse[:, None]
        da = weight_gradients(
            g_tile, v_tile, pairs, b, h, i[:, None], j[None, :], ids, of_values,
            NUM_MAPS, BITS, PRECISION,
        )  # fmt: skip
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
    q, k, v, pairs, g, softmax, delta, of_values, present, sums, table, dk, dv, table_dk,
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
        e = scores(
            k_tile, tl.trans(q_tile), pairs, b, h, i[None, :], j[:, None], ids,
            NUM_MAPS, BITS, IS_ADDITIVE, PRECISION,
        )  # fmt: skip
        largest, inverse = load_softmax(softmax, of_query, is_query)
        a = tl.exp2(e - largest[None, :]) * inverse[None, :]
        g_tile = load_tokens(g, b, h, i[:, None], d[None, :], pairs.queries, DIM, WIDE)
        dropped = drop(a, pairs, b, h, i[None, :], j[:, None])
        dv_tile = tl.dot(narrow(dropped, q, WIDE), g_tile, dv_tile, input_precision=PRECISION)
        da = weight_gradients(
            v_tile, tl.trans(g_tile), pairs, b, h, i[None, :], j[:, None], ids, of_values,
            NUM_MAPS, BITS, PRECISION,
        )  # fmt: skip
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


@triton.jit
def mask_kernel(
    q, k, v, pairs, g, softmax, delta, of_values, dmask, images, heads,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_MAPS: tl.constexpr, BITS: tl.constexpr, IS_ADDITIVE: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of an added mask: a program sums one tile over what shares it.

    So many images and heads share the mask; it has queries and keys.
    """
    columns = tl.cdiv(pairs.keys, BLOCK_N)
    tiles = tl.cdiv(pairs.queries, BLOCK_M) * columns
    owner, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    i = (tile // columns) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = (tile % columns) * BLOCK_N + tl.arange(0, BLOCK_N)
    d, is_query = tl.arange(0, BLOCK_D), i < pairs.queries
    of_batch, of_heads = owner // (pairs.heads // heads), owner % (pairs.heads // heads)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for b in range(of_batch * images, (of_batch + 1) * images):
        ids = load_ids(pairs, b, i[:, None], j[None, :])
        for h in range(of_heads * heads, (of_heads + 1) * heads):
            of_query = (b * pairs.heads + h).to(tl.int64) * pairs.queries + i
            q_tile = load_tokens(q, b, h, i[:, None], d[None, :], pairs.queries, DIM, WIDE)
            k_tile = load_tokens(k, b, h, j[None, :], d[:, None], pairs.keys, DIM, WIDE)
            e = scores(
                q_tile, k_tile, pairs, b, h, i[:, None], j[None, :], ids,
                NUM_MAPS, BITS, IS_ADDITIVE, PRECISION,
            )  # fmt: skip
            largest, inverse = load_softmax(softmax, of_query, is_query)
            a = tl.exp2(e - largest[:, None]) * inverse[:, None]
            g_tile = load_tokens(g, b, h, i[:, None], d[None, :], pairs.queries, DIM, WIDE)
            v_tile = load_tokens(v, b, h, j[None, :], d[:, None], pairs.keys, DIM, WIDE)
            da = weight_gradients(
                g_tile, v_tile, pairs, b, h, i[:, None], j[None, :], ids, of_values,
                NUM_MAPS, BITS, PRECISION,
            )  # fmt: skip
            change = tl.load(delta + of_query, mask=is_query, other=0.0)
            total += a * (da - change[:, None])
    pointers = head_of(dmask, of_batch, of_heads) + i[:, None] * dmask.query + j[None, :]
    is_pair = is_query[:, None] & (j < pairs.keys)[None, :]
    tl.store(pointers, total.to(dmask.pointer.dtype.element_ty), mask=is_pair)
