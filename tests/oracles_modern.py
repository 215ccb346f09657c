"""Rotary, decomposed and continuous encodings, as loops over their equations.

Vectors are lists of numbers, positions are tuples or `None` for a prefix token. Each function
returns b_ij, what is added to q_i k_j before the scores are scaled, for one head. `learned` holds
the parameters of `irpe.RelativePositionEncoding` as nested lists.
"""

import math

from oracles_others import add, dot, offset


def turned(x, angles):
    """Pairs of neighbours in x, each turned by its angle."""
    out = []
    for pair, angle in enumerate(angles):
        even, odd = x[2 * pair : 2 * pair + 2]
        out += [even * math.cos(angle) - odd * math.sin(angle)]
        out += [even * math.sin(angle) + odd * math.cos(angle)]
    return out


def rotary(angles):
    """R(q_i) R(k_j) - q_i k_j; a prefix token is not turned."""

    def score(q, k, query, key):
        both = [
            x if position is None else turned(x, angles(position, len(x)))
            for x, position in ((q, query), (k, key))
        ]
        return dot(*both) - dot(q, k)

    return score


def scaled(position, grid, reference):
    """A position on a grid, on a reference grid that spans the same; one size is for all axes."""
    sizes = reference * len(grid) if len(reference) == 1 else reference
    return [x * of / size for x, of, size in zip(position, sizes, grid, strict=True)]


def rope_axial(learned, head, grid, base=100, reference=None):
    def angles(position, dim):
        position = position if reference is None else scaled(position, grid, reference)
        pairs = dim // (2 * len(position))
        return [x * base ** (-pair / pairs) for x in position for pair in range(pairs)]

    return rotary(angles)


def rope_axial_normalized(learned, head, grid, base=100):
    """DINOv3: the centres of patches on axes from -1 to 1, frequencies in full turns."""

    def angles(position, dim):
        pairs = dim // (2 * len(position))
        placed = [2 * (x + 0.5) / size - 1 for x, size in zip(position, grid, strict=True)]
        return [2 * math.pi * x / base ** (pair / pairs) for x in placed for pair in range(pairs)]

    return rotary(angles)


def rope_mixed(learned, head, grid, reference=None):
    by_row, by_column = (of_axis[head] for of_axis in learned["frequencies"])

    def angles(position, dim):
        row, column = position if reference is None else scaled(position, grid, reference)
        return [row * a + column * b for a, b in zip(by_row, by_column, strict=True)]

    return rotary(angles)


def resized(rows, count):
    """Linear interpolation between the centres of cells, as images are resized."""
    if len(rows) == count:
        return rows
    out = []
    for index in range(count):
        place = min(max((index + 0.5) * len(rows) / count - 0.5, 0), len(rows) - 1)
        low = min(int(place), len(rows) - 1)
        high, share = min(low + 1, len(rows) - 1), place - int(place)
        out.append(add([x * (1 - share) for x in rows[low]], [x * share for x in rows[high]]))
    return out


def decomposed(learned, head, grid, size):
    tables = learned["key_tables"]
    rows = [
        resized(table[: 2 * size - 1], 2 * length - 1)
        for table, length in zip(tables, grid, strict=True)
    ]

    def score(q, k, query, key):
        if query is None or key is None:
            return dot(q, add(*(table[-1] for table in tables)))
        by_axis = zip(rows, offset(query, key), grid, strict=True)
        return dot(q, add(*(of_axis[x + length - 1] for of_axis, x, length in by_axis)))

    return score


def log_cpb(learned, head, grid, size=None):
    """Swin v2: 16 sigmoid(f), less 8."""

    def score(q, k, query, key):
        root = math.sqrt(len(q))
        if query is None or key is None:
            return root * learned["prefix_rows"][head][0]
        spaced = []
        for x, length in zip(offset(query, key), grid, strict=True):
            stretched = 8 * x / max(1, (size or length) - 1)
            spaced.append(math.copysign(math.log2(abs(stretched) + 1) / math.log2(8), x))
        hidden = [
            max(0.0, dot(weight, spaced) + bias)
            for weight, bias in zip(learned["hidden_weight"], learned["hidden_bias"], strict=True)
        ]
        f = dot(learned["last_weight"][head], hidden)
        return root * (16 / (1 + math.exp(-f)) - 8)

    return score


def alibi(learned, head, grid, heads):
    def score(q, k, query, key):
        if query is None or key is None:
            return 0.0
        slope = 2 ** (-8 * (head + 1) / heads)
        return -math.sqrt(len(q)) * slope * math.hypot(*offset(query, key))

    return score
