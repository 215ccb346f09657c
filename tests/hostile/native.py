"""Random calls of the compiled kernels against the reference in float64, all gradients included."""

import numpy as np
import torch
from hostile.cases import Case

import irpe
from irpe.ops.impl.native import library

TOLERANCE = 3e-5  # of the largest element of all results: terms of that size cancel out in some
DIMS = [1, 2, 7, 8, 15, 16, 17, 24, 32, 33, 64, 70]
ID_TYPES = [torch.uint8, torch.int16, torch.int32, torch.int64]
ROLES = ["query", "key", "value", "bias"]


class Draw:
    """Everything that is random about a call: any sizes, maps, tables, layouts and masks."""

    def __init__(self, seed):
        random = self.random = np.random.default_rng(seed)
        self.batch, self.heads = (int(n) for n in random.integers(1, 4, 2))
        most = int(random.choice([3, 20, 70, 140], p=[0.2, 0.4, 0.3, 0.1]))
        self.queries, self.keys = (int(n) for n in random.integers(1, most + 1, 2))
        if random.random() < 0.02:
            self.keys = int(random.integers(500, 1600))  # several blocks of keys
        self.dim = int(random.choice(DIMS))
        self.is_rotated = bool(random.random() < 0.2)
        self.layout = str(random.choice(["contiguous", "transposed", "expanded", "sliced"]))
        kinds = ["none", "none", "bool", "added", "row", "window", "lowest", "all"]
        self.mask_kind = str(random.choice(kinds))
        self.scale = None if random.integers(2) else float(random.uniform(-1, 1))
        self.threads = int(random.integers(1, 4))
        self.rows = [int(n) for n in random.integers(1, 90, random.integers(1, 4))]
        self.roles = [role for role in ROLES if random.random() < 0.5] or ["key"]

    def __str__(self):
        sizes = f"{self.batch}x{self.heads}, {self.queries} queries, {self.keys} keys"
        options = self.layout, self.mask_kind, self.scale, self.is_rotated, self.threads
        return f"{sizes}, dim {self.dim}, rows {self.rows} {self.roles} {options}"

    def normal(self, *shape):
        return torch.tensor(self.random.standard_normal(shape)).float()

    def tokens(self, count):
        shape = self.batch, self.heads, count, self.dim
        if self.layout == "transposed":
            return self.normal(shape[0], count, self.heads, self.dim).transpose(1, 2)
        if self.layout == "expanded":
            return self.normal(1, *shape[1:]).expand(shape)
        if self.layout == "sliced":
            return self.normal(*shape[:3], 2 * self.dim + 1)[..., 1 : self.dim + 1]
        return self.normal(*shape)

    def maps(self):
        found = []
        for rows in self.rows:
            ids = torch.tensor(self.random.integers(0, rows, (self.queries, self.keys)))
            if self.random.random() < 0.5:  # few different ids, as on a grid
                ids = ids[:1].expand_as(ids) + torch.arange(self.queries)[:, None] // 7
                ids = ids % rows
            ids = ids.to(ID_TYPES[self.random.integers(4)])
            found.append(irpe.BucketMap(ids, rows))
        return found

    def tables(self):
        def heads():
            return self.heads if self.random.integers(2) else 1

        found = {}
        for role in self.roles:
            widths = [self.dim] * len(self.rows)
            if len(self.rows) == 2 and self.dim > 1 and self.random.random() < 0.3:
                widths = [self.dim // 2, self.dim - self.dim // 2]  # a part of the head each
            sizes = list(zip(self.rows, widths, strict=True))
            found[f"{role}_tables"] = [
                self.normal(heads(), rows, *([] if role == "bias" else [width]))
                for rows, width in sizes
            ]
        return found

    def mask(self):
        full = self.batch, self.heads, self.queries, self.keys
        if self.mask_kind == "none":
            return None
        if self.mask_kind == "row":
            return self.normal(1, 1, 1, self.keys)
        if self.mask_kind == "added":
            return self.normal(self.heads, self.queries, self.keys)
        if self.mask_kind == "window":
            return self.normal(self.keys, self.batch, self.queries).permute(1, 2, 0)[:, None]
        keeps = torch.tensor(self.random.random((self.batch, 1, self.queries, self.keys)) < 0.6)
        if self.mask_kind == "bool":
            return keeps
        lowest = torch.finfo(torch.float32).min if self.mask_kind == "lowest" else -torch.inf
        if self.mask_kind == "all":
            keeps = keeps & False
        return torch.zeros(full).masked_fill(~keeps, lowest)


def check(seed):
    """Compares the output and all gradients."""
    draw = Draw(seed)
    names = ["q", "k", "v"]
    tokens = dict(zip(names, map(draw.tokens, (draw.queries, draw.keys, draw.keys)), strict=True))
    maps, tables, mask = draw.maps(), draw.tables(), draw.mask()
    if draw.is_rotated and "key" in draw.roles:
        tokens["table_q"] = draw.tokens(draw.queries)
    if draw.is_rotated and "query" in draw.roles:
        tokens["table_k"] = draw.tokens(draw.keys)
    grad = draw.tokens(draw.queries)

    def run(impl, dtype):
        inputs = {name: x.detach().to(dtype).requires_grad_() for name, x in tokens.items()}
        learned = {
            name: [t.detach().to(dtype).requires_grad_() for t in role]
            for name, role in tables.items()
        }
        seen = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
        options = {"attn_mask": seen, "scale": draw.scale, "impl": impl}
        rest = {name: x for name, x in inputs.items() if name not in names}
        triple = [inputs[name] for name in names]
        out = irpe.rpe_attention(*triple, maps, **learned, **rest, **options)
        leaves = [*inputs.values(), *(t for role in learned.values() for t in role)]
        return [out, *torch.autograd.grad(out, leaves, grad.to(dtype))]

    threads, work = torch.get_num_threads(), library.WORK_OF_A_THREAD
    torch.set_num_threads(draw.threads)
    library.WORK_OF_A_THREAD = 1
    try:
        found = run("native", torch.float32)
    finally:
        torch.set_num_threads(threads)
        library.WORK_OF_A_THREAD = work
    expected = run("reference", torch.float64)
    size = max(1.0, *(float(x.detach().abs().max()) for x in expected))
    for index, (x, exact) in enumerate(zip(found, expected, strict=True)):
        error = float((x - exact).detach().abs().max())
        if not error <= TOLERANCE * size:
            return f"result {index}: error {error:.2e} where the largest element is {size:.2e}"
    return "equal"


def cases(seed, count):
    """Yields `count` random calls; none where there is no compiled library."""
    for number in range(count if library.why_unavailable() is None else 0):
        key = [seed, number]
        yield Case(f"native {Draw(key)}", lambda key=key: check(key))
