"""Files as the paper's authors wrote them, and attention as they compute it, in plain loops."""

import argparse
import functools
import math

import oracles
import torch

INSIDE = {"product": [""], "cross": ["rp_rows.", "rp_cols."]}
ARGS = argparse.Namespace(lr=5e-4, model="deit", epochs=300, output_dir="", sizes=[1, 2], ema=None)


def random_tables(spec, heads, dim, num_prefix_tokens, seed=0):
    """The tables of one attention, by their names in the authors' files."""
    generator = torch.Generator().manual_seed(seed)
    heads = 1 if spec.shared_heads else heads
    counts = spec.num_buckets(2, num_prefix_tokens)
    tables = {}
    for inside, rows in zip(INSIDE[spec.method], counts, strict=True):
        if spec.mode == "bias":
            tables[f"rpe_k.{inside}lookup_table_bias"] = (heads, rows)
            continue
        for letter in spec.targets:
            shape = (heads, rows, dim) if letter == "v" else (heads, dim, rows)
            tables[f"rpe_{letter}.{inside}lookup_table_weight"] = shape
    return {name: torch.randn(shape, generator=generator) for name, shape in tables.items()}


def write(path, tensors):
    """Writes a checkpoint with what else theirs hold."""
    torch.save({"model": tensors, "args": ARGS, "epoch": 299}, path)
    return path


def attention(q, k, v, tables, spec, grid, num_prefix_tokens):
    """One head's output in the authors' convention; `tables` are those of the head."""
    alpha, beta, gamma = spec.index.alpha, spec.index.beta, spec.index.gamma
    index = functools.partial(oracles.piecewise, alpha=alpha, beta=beta, gamma=gamma)
    maps, _ = oracles.bucket_ids(spec.method, grid, num_prefix_tokens, index, math.floor(beta))
    n, d = len(q), len(q[0])
    z = []
    for i in range(n):
        e = []
        for j in range(n):
            score = sum(a * b for a, b in zip(q[i], k[j], strict=True)) / math.sqrt(d)
            for ids, inside in zip(maps, INSIDE[spec.method], strict=True):
                score += _score(q[i], k[j], ids[i][j], ids[j][i], inside, tables, d)
            e.append(score)
        top = max(e)
        a = [math.exp(x - top) for x in e]
        a = [x / sum(a) for x in a]
        z.append([_value(a, v, i, c, maps, spec, tables) for c in range(d)])
    return z


def _score(q, k, there, back, inside, tables, d):
    """What they add to a score that is scaled already."""
    score = 0.0
    if f"rpe_k.{inside}lookup_table_bias" in tables:
        score += tables[f"rpe_k.{inside}lookup_table_bias"][there]
    key, query = (tables.get(f"rpe_{c}.{inside}lookup_table_weight") for c in "kq")
    if key is not None:
        score += sum(q[c] * key[c][there] for c in range(d)) / math.sqrt(d)
    if query is not None:  # looked up from the key's side
        score += sum(k[c] * query[c][back] for c in range(d)) / math.sqrt(d)
    return score


def _value(a, v, i, c, maps, spec, tables):
    total = sum(a[j] * v[j][c] for j in range(len(a)))
    for ids, inside in zip(maps, INSIDE[spec.method], strict=True):
        table = tables.get(f"rpe_v.{inside}lookup_table_weight")
        if table is not None:
            total += sum(a[j] * table[ids[i][j]][c] for j in range(len(a)))
    return total


def attend(q, k, v, tables, spec, grid, num_prefix_tokens):
    """All heads of all samples; tables by their names in the file."""
    out = torch.empty_like(q)
    for sample in range(len(q)):
        for head in range(q.shape[1]):
            own = {name: t[min(head, len(t) - 1)].tolist() for name, t in tables.items()}
            vectors = (part[sample, head].tolist() for part in (q, k, v))
            out[sample, head] = out.new_tensor(
                attention(*vectors, own, spec, grid, num_prefix_tokens)
            )
    return out.transpose(1, 2).flatten(2)
