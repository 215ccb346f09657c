"""Random encodings, grids, dtypes, masks, strides and options against the equations in NumPy.

The oracle shares no code with the library: bucket ids come from the plain loops of `oracles`, the
attention below is Eq. 1, 2 and 13-17 in float64.
"""

import functools
import math

import numpy as np
import oracles
import torch
from hostile.cases import Case

import irpe
from irpe.ops import choose

GRIDS = [(1, 1), (1, 7), (5, 1), (3, 5), (4, 4), (2, 9), (6,), (2, 3, 4), (1, 2, 1)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DIMS = [4, 8, 16, 24, 48, 80]
STEP = 1e-5  # of the finite differences
IMPLEMENTATIONS = [name for name in choose.IMPLEMENTATIONS if name != "triton"]  # not on the CPU


def attention(x, ids, scale, mask):
    """Returns attention with encodings; `x` has q, k, v and lists of tables by role, in float64."""
    q, k, v = x["q"], x["k"], x["v"]
    scores = np.einsum("bhid,bhjd->bhij", q, k)
    for table, matrix in zip(x["bias"], ids, strict=False):
        scores = scores + table[:, matrix]
    for table, matrix in zip(x["key"], ids, strict=False):
        scores = scores + _dot("bhid,hijd->bhij", q, table[:, matrix])
    for table, matrix in zip(x["query"], ids, strict=False):
        scores = scores + _dot("bhjd,hijd->bhij", k, table[:, matrix])
    scores = scores * scale
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e300))
    weights = weights / weights.sum(-1, keepdims=True)
    out = np.einsum("bhij,bhjd->bhid", weights, v)
    for table, matrix in zip(x["value"], ids, strict=False):
        out = out + _dot("bhij,hijd->bhid", weights, table[:, matrix])
    return out


def _dot(equation, tokens, rows):
    heads = tokens.shape[1]
    return np.einsum(equation, tokens, np.broadcast_to(rows, (heads, *rows.shape[1:])))


class Draw:
    """Everything that is random about a case."""

    def __init__(self, seed):
        random = self.random = np.random.default_rng(seed)
        self.grid = GRIDS[random.integers(len(GRIDS))]
        self.prefix = int(random.choice([0, 0, 1, 2, 5]))
        self.method = str(random.choice(oracles.METHODS))
        self.targets = str(random.choice(["bias", *oracles.CONTEXTUAL_TARGETS]))
        self.is_shared = bool(random.integers(2))
        self.dtype = DTYPES[random.choice(4, p=[0.4, 0.3, 0.15, 0.15])]
        self.batch = int(random.choice([0, 1, 2, 3], p=[0.1, 0.3, 0.4, 0.2]))
        self.heads, self.dim = int(random.integers(1, 4)), int(random.choice(DIMS))
        self.layout = str(random.choice(["contiguous", "transposed", "expanded", "sliced"]))
        self.mask = str(random.choice(["none", "none", "bool", "added", "row", "learned"]))
        self.scale = None if random.integers(2) else float(random.uniform(0.05, 1))
        self.text, self.index, self.bound = self._index()

    def _index(self):
        kind = self.random.integers(3)
        if kind == 0:
            beta = round(float(self.random.uniform(1, 6)), 3)
            return f"clip{beta}", functools.partial(oracles.clip, beta=beta), math.floor(beta)
        alpha = round(float(self.random.uniform(0.3, 4)), 3)
        beta, gamma = 2 * alpha, 8 * alpha
        if kind == 2:
            beta = round(alpha + float(self.random.uniform(0.7, 5)), 3)
            gamma = round(beta + float(self.random.uniform(0.5, 20)), 3)
        text = f"{alpha}" if kind == 1 else f"{alpha}:{beta}:{gamma}"
        index = functools.partial(oracles.piecewise, alpha=alpha, beta=beta, gamma=gamma)
        return text, index, math.floor(beta)

    @property
    def spec(self):
        mode = "bias-k" if self.targets == "bias" else f"contextual-{self.targets}"
        unshared = "" if self.is_shared else "+unshared"
        return f"{self.method}-{mode}@{self.text}{unshared}"

    def __str__(self):
        options = self.batch, self.heads, self.dim, self.layout, self.mask, self.scale
        return f"{self.spec} grid {self.grid}+{self.prefix} {self.dtype} {options}"

    def tokens(self, count):
        """Random tokens in a random layout."""
        shape = self.batch, self.heads, count, self.dim
        if self.layout == "transposed":
            return self._normal(shape[0], count, self.heads, self.dim).transpose(1, 2)
        if self.layout == "expanded":
            return self._normal(1, *shape[1:]).expand(shape)
        if self.layout == "sliced":
            return self._normal(*shape[:3], 2 * self.dim + 1)[..., 1 : self.dim + 1]
        return self._normal(*shape)

    def _normal(self, *shape):
        return torch.tensor(self.random.standard_normal(shape)).to(self.dtype)

    def inputs(self, ids, rows):
        """Tokens and tables by role."""
        count = len(ids[0])
        x = {name: self.tokens(count) for name in "qkv"}
        heads = 1 if self.is_shared else self.heads
        roles = {"q": "query", "k": "key", "v": "value"}
        names = ["bias"] if self.targets == "bias" else [roles[t] for t in self.targets]
        for name in ("bias", "query", "key", "value"):
            shapes = [(heads, n) if name == "bias" else (heads, n, self.dim) for n in rows]
            x[name] = [self._normal(*shape) for shape in shapes] if name in names else []
        return x

    def make_mask(self, count):
        """A mask, as `attn_mask` and in NumPy."""
        if self.mask == "none":
            return None
        if self.mask == "bool":
            keeps = self.random.random((self.batch, 1, count, count)) < 0.7
            return torch.tensor(keeps | np.eye(count, dtype=bool))
        shape = (1, 1, 1, count) if self.mask == "row" else (self.heads, count, count)
        return self._normal(*shape).requires_grad_(self.mask == "learned")


def _double(x):
    if isinstance(x, list):
        return [_double(each) for each in x]
    return x.detach().to(torch.float64).numpy()


def check_maps(draw):
    """Compares bucket maps."""
    ids, rows = _maps_of(draw)
    maps = irpe.bucket_maps(draw.spec, grid=draw.grid, num_prefix_tokens=draw.prefix)
    if [m.num_buckets for m in maps] != rows:
        return f"{[m.num_buckets for m in maps]} buckets, not {rows}"
    found = [m.ids.tolist() for m in maps]
    return "equal" if found == ids else "other ids"


def _maps_of(draw):
    return oracles.bucket_ids(draw.method, draw.grid, draw.prefix, draw.index, draw.bound)


def check_attention(draw, impl):
    """Compares outputs and, in float64, a derivative in a random direction."""
    lists, rows = _maps_of(draw)
    ids = [np.array(matrix) for matrix in lists]
    x, mask = draw.inputs(ids, rows), draw.make_mask(len(ids[0]))
    scale = draw.scale or 1 / math.sqrt(draw.dim)
    leaves = [leaf for part in x.values() for leaf in (part if isinstance(part, list) else [part])]
    for leaf in leaves:
        leaf.requires_grad_()
    maps = irpe.bucket_maps(draw.spec, grid=draw.grid, num_prefix_tokens=draw.prefix)
    tables = {f"{n}_tables": x[n] or None for n in ("bias", "query", "key", "value")}
    options = {"attn_mask": mask, "scale": draw.scale, "impl": impl}
    try:
        out = irpe.rpe_attention(x["q"], x["k"], x["v"], maps, **tables, **options)
    except ValueError as error:
        if impl != "auto" and "cannot compute this call" in str(error):
            return "refused"
        raise
    exact = {name: _double(part) for name, part in x.items()}
    seen = None if mask is None else mask.numpy() if mask.dtype == torch.bool else _double(mask)
    expected = attention(exact, ids, scale, seen)
    result = _compare(out, expected, draw.dtype)
    out.sum().backward()
    if not all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves):
        return "a gradient is missing or not finite"
    if result != "equal" or draw.dtype != torch.float64:
        return result
    return _check_derivative(draw, x, exact, leaves, ids, scale, seen)


def _compare(out, expected, dtype):
    if out.dtype != dtype or out.shape != expected.shape:
        return f"{out.dtype} of shape {tuple(out.shape)}"
    size = max(1.0, float(np.abs(expected).max(initial=0)))
    bound = {torch.float64: 1e-11, torch.float32: 1e-5}.get(dtype, 32 * torch.finfo(dtype).eps)
    error = float(np.abs(_double(out) - expected).max(initial=0))
    return "equal" if error <= bound * size else f"error {error:.2e}, bound {bound * size:.2e}"


def _check_derivative(draw, x, exact, leaves, ids, scale, mask):
    """Compares the derivative of the sum in a random direction with finite differences."""
    moved = {}
    for name, part in exact.items():
        draws = [draw.random.standard_normal(each.shape) for each in _as_list(part)]
        if name in "qkv" and draw.layout == "expanded" and draw.batch:
            draws = [np.broadcast_to(d[:1], d.shape) for d in draws]
        moved[name] = draws
    sides = []
    for sign in (1, -1):
        shifted = {
            name: [p + sign * STEP * d for p, d in zip(_as_list(part), moved[name], strict=True)]
            for name, part in exact.items()
        }
        shifted |= {name: shifted[name][0] for name in "qkv"}
        sides.append(attention(shifted, ids, scale, mask).sum())
    numeric = (sides[0] - sides[1]) / (2 * STEP)
    directions = [d for name in exact for d in moved[name]]
    pairs = zip(leaves, directions, strict=True)
    given = sum((_double(leaf.grad) * d).sum() for leaf, d in pairs)
    error = abs(given - numeric)
    return "equal" if error <= 1e-6 * max(1, abs(numeric)) else f"derivative {given}, not {numeric}"


def _as_list(part):
    return part if isinstance(part, list) else [part]


def cases(seed, count):
    """Yields `count` draws: bucket maps once, attention in every implementation."""
    for number in range(count):
        key = [seed, number]
        name = str(Draw(key))
        yield Case(f"maps {name}", lambda key=key: check_maps(Draw(key)))
        for impl in ("auto", *IMPLEMENTATIONS):
            yield Case(f"{impl} {name}", lambda k=key, i=impl: check_attention(Draw(k), i))
