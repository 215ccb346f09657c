"""The paper in plain Python loops: no tensors, no vectorisation, no code of the library."""

import itertools
import math

GRIDS = [(1, 1), (1, 9), (3, 5), (7, 28), (14, 14), (2, 3, 4)]
SMALL_GRIDS = [(1, 1), (1, 9), (3, 5), (2, 3, 4)]
PREFIXES = [0, 1, 5]
METHODS = ["euclidean", "quantization", "cross", "product"]
CONTEXTUAL_TARGETS = ["q", "k", "v", "qk", "qv", "kv", "qkv"]
RATIOS = {"euclidean": 20.0, "quantization": 29.0, "cross": 20.0, "product": 1.9}


def piecewise(x, alpha, beta, gamma):
    """Eq. 18, clamped to the whole part of beta."""
    if abs(x) <= alpha:
        index = round(x)
    else:
        log = math.log(abs(x) / alpha) / math.log(gamma / alpha)
        index = int(math.copysign(round(alpha + log * (beta - alpha)), x))
    bound = math.floor(beta)
    return max(-bound, min(bound, index))


def clip(x, beta):
    """Eq. 9 after rounding."""
    bound = math.floor(beta)
    return max(-bound, min(bound, round(x)))


def rank(squared, ndim):
    """How many sums of `ndim` squares lie below `squared`."""
    roots = range(math.isqrt(squared) + 1)
    sums = {sum(r * r for r in rs) for rs in itertools.product(roots, repeat=ndim)}
    return sum(value < squared for value in sums)


def buckets_of_offset(method, offset, index, bound):
    """Eq. 19-25 for one offset, one bucket per table."""
    squared = sum(part * part for part in offset)
    match method:
        case "euclidean":
            return (index(math.sqrt(squared)),)
        case "quantization":
            return (index(rank(squared, len(offset))),)
        case "cross":
            return tuple(index(part) + bound for part in offset)
        case "product":
            joint = 0
            for part in offset:
                joint = joint * (2 * bound + 1) + index(part) + bound
            return (joint,)


def num_buckets(method, bound, ndim):
    return {
        "euclidean": (bound + 1,),
        "quantization": (bound + 1,),
        "cross": (2 * bound + 1,) * ndim,
        "product": ((2 * bound + 1) ** ndim,),
    }[method]


def bucket_ids(method, grid, num_prefix_tokens, index, bound):
    """I(i, j) as nested lists, one matrix per table, and the rows of each table."""
    positions = list(itertools.product(*map(range, grid)))
    prefixes = (num_prefix_tokens, num_prefix_tokens)
    return pair_ids(method, positions, positions, prefixes, index, bound)


def pair_ids(method, queries, keys, prefixes, index, bound):
    """The same for queries and keys at positions of their own."""
    known = {}
    rows = num_buckets(method, bound, len(queries[0]))
    before_queries, before_keys = prefixes
    sizes = before_queries + len(queries), before_keys + len(keys)
    maps = [[[count] * sizes[1] for _ in range(sizes[0])] for count in rows]
    for i, query in enumerate(queries):
        for j, key in enumerate(keys):
            offset = tuple(a - b for a, b in zip(query, key, strict=True))
            if offset not in known:
                known[offset] = buckets_of_offset(method, offset, index, bound)
            for table, bucket in enumerate(known[offset]):
                maps[table][before_queries + i][before_keys + j] = bucket
    return maps, [count + any(prefixes) for count in rows]


def attention(q, k, v, ids, tables, scale):
    """Eq. 1, 2 and 13-17 for one head: q, k, v are lists of vectors.

    `tables` maps "query", "key", "value" (lists of vectors) and "bias" (lists of numbers) to one
    table for each matrix in `ids`.
    """
    queries, keys, dim = range(len(q)), range(len(k)), range(len(q[0]))

    def dot(a, b):
        return sum(x * y for x, y in zip(a, b, strict=True))

    out, weights, extra = [], [], []
    for i in queries:
        b = [0.0 for _ in keys]
        for j in keys:
            for table, matrix in enumerate(ids):
                row = matrix[i][j]
                if "bias" in tables:
                    b[j] += tables["bias"][table][row]
                if "key" in tables:
                    b[j] += dot(q[i], tables["key"][table][row])
                if "query" in tables:
                    b[j] += dot(k[j], tables["query"][table][row])
        e = [(dot(q[i], k[j]) + b[j]) * scale for j in keys]
        largest = max(e)
        total = sum(math.exp(score - largest) for score in e)
        a = [math.exp(score - largest) / total for score in e]
        z = [sum(a[j] * v[j][c] for j in keys) for c in dim]
        for table, matrix in enumerate(ids if "value" in tables else ()):
            for j in keys:
                row = tables["value"][table][matrix[i][j]]
                z = [z[c] + a[j] * row[c] for c in dim]
        out.append(z)
        weights.append(a)
        extra.append(b)
    return out, weights, extra
