"""The encodings that the paper compares with, as loops over their equations.

Vectors are lists of numbers, positions are tuples or `None` for a prefix token. `learned` holds the
parameters of `irpe.RelativePositionEncoding` as nested lists, for heads that share them.
"""

import itertools
import math


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def add(*vectors):
    return [sum(parts) for parts in zip(*vectors, strict=True)]


def clip(x, k):
    """Eq. 9."""
    return max(-k, min(k, x))


def attention(q, k, v, positions, scale, score, value=None):
    """Eq. 1, 2 and 5: score(q_i, k_j, offset) is the numerator of e_ij, value(offset) is p^V_ij."""
    out, weights, extra = [], [], []
    for i, query in enumerate(positions):
        numerators = [score(q[i], k[j], offset(query, key)) for j, key in enumerate(positions)]
        extra.append([numerators[j] - dot(q[i], k[j]) for j in range(len(k))])
        largest = max(numerators)
        powers = [math.exp((numerator - largest) * scale) for numerator in numerators]
        a = [power / sum(powers) for power in powers]
        z = [0.0] * len(v[0])
        for j, key in enumerate(positions):
            shifted = v[j] if value is None else add(v[j], value(offset(query, key)))
            z = add(z, [a[j] * x for x in shifted])
        out.append(z)
        weights.append(a)
    return out, weights, extra


def offset(query, key):
    """Query minus key, or `None` if one of them is a prefix token."""
    if query is None or key is None:
        return None
    return tuple(a - b for a, b in zip(query, key, strict=True))


def positions_of(grid, num_prefix_tokens):
    return [None] * num_prefix_tokens + list(itertools.product(*map(range, grid)))


def shaw(learned):
    """Eq. 8, with the clipped offsets of all axes as one joint row, row-major."""
    p = clipped_rows(learned)
    return {"score": lambda q, k, offset: dot(q, add(k, p(offset)))}


def huang(learned):
    """Eq. 11: (q + p)(k + p) - p p."""
    p = clipped_rows(learned)

    def score(q, k, offset):
        r = p(offset)
        return dot(add(q, r), add(k, r)) - dot(r, r)

    return {"score": score}


def clipped_rows(learned):
    (table,) = learned["key_tables"]

    def row(offset):
        if offset is None:
            return table[-1]
        number = 0
        for part in offset:
            number = number * 7 + clip(part, 3) + 3
        return table[number]

    return row


def sasa(learned, size):
    """Eq. 12: q (k + concat(p_row, p_column))."""
    tables = learned["key_tables"]

    def p(offset):
        if offset is None:
            return [x for table in tables for x in table[-1]]
        rows = [table[part + size - 1] for table, part in zip(tables, offset, strict=True)]
        return [x for row in rows for x in row]

    return {"score": lambda q, k, offset: dot(q, add(k, p(offset)))}


def transformer_xl(learned):
    """Eq. 10: (q + u) k + (q + v) (s W^R), s the sines and cosines of each axis in turn."""
    u, v, w = learned["content_shift"], learned["position_shift"], learned["projection"]
    dim = len(w)

    def r(offset):
        if offset is None:
            return learned["prefix_rows"][0]
        share = dim // (2 * len(offset))
        s = []
        for part in offset:
            angles = [part * 10000 ** (-number / share) for number in range(share)]
            s += [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
        return [sum(s[row] * w[row][column] for row in range(dim)) for column in range(dim)]

    return {"score": lambda q, k, offset: dot(add(q, u), k) + dot(add(q, v), r(offset))}


def axial_deeplab(learned, threshold):
    """q k + q r^q + k r^k and v + r^v, each r a sum over the axes, zero beyond the threshold."""

    def r(tables, offset):
        total = [0.0] * len(tables[0][0])
        for axis, table in enumerate(tables):
            if offset is None:
                total = add(total, table[-1])
            elif abs(offset[axis]) <= threshold:
                total = add(total, table[offset[axis] + threshold])
        return total

    def score(q, k, offset):
        of_query = dot(q, r(learned["key_tables"], offset))
        of_key = dot(k, r(learned["query_tables"], offset))
        return dot(q, k) + of_query + of_key

    return {"score": score, "value": lambda offset: r(learned["value_tables"], offset)}


def convolved(x, grid, num_prefix_tokens, weight, bias):
    """CPVT: every patch plus its 3 x 3 neighbourhood, weighted channel by channel."""
    rows, columns = grid
    out = [list(token) for token in x]
    for row, column in itertools.product(range(rows), range(columns)):
        place = num_prefix_tokens + row * columns + column
        for channel in range(len(x[0])):
            total = bias[channel]
            for dy, dx in itertools.product((-1, 0, 1), repeat=2):
                if 0 <= row + dy < rows and 0 <= column + dx < columns:
                    neighbour = num_prefix_tokens + (row + dy) * columns + column + dx
                    total += weight[channel][0][dy + 1][dx + 1] * x[neighbour][channel]
            out[place][channel] = x[place][channel] + total
    return out
