"""Random attention problems: one encoding on one grid, with every input as a leaf."""

from dataclasses import dataclass, field

import oracles
import torch

from irpe import RPESpec, bucket_maps, rpe_attention
from irpe.ops.choose import IMPLEMENTATIONS

# Those that take every call on the CPU; test_folded, test_triton and native/ test the others.
_OTHERS = ("folded", "native", "triton")
CPU_IMPLEMENTATIONS = [name for name in IMPLEMENTATIONS if name not in _OTHERS]
SPECS = [
    RPESpec(method, mode, targets, shared_heads=shared)
    for method in oracles.METHODS
    for mode, targets in [
        ("bias", "k"),
        *(("contextual", targets) for targets in oracles.CONTEXTUAL_TARGETS),
    ]
    for shared in (True, False)
]


@dataclass
class Case:
    spec: RPESpec
    grid: tuple[int, ...]
    num_prefix_tokens: int = 1
    batch: int = 2
    heads: int = 2
    dim: int = 4
    dtype: torch.dtype = torch.float64
    mask: str | None = None
    seed: int = 0
    is_rotated: bool = False
    is_strided: bool = False
    factor: float = 1.0
    device: str = "cpu"
    tables: dict[str, list[torch.Tensor]] = field(init=False)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)

        def leaf(*shape):
            numbers = torch.randn(shape, generator=generator, dtype=torch.float64) * self.factor
            return numbers.to(self.device, self.dtype).requires_grad_()

        def tokens():
            if not self.is_strided:
                return leaf(self.batch, self.heads, num_tokens, self.dim)
            packed = leaf(self.batch, num_tokens, self.heads, self.dim).detach()
            return packed.transpose(1, 2).requires_grad_()

        self.maps = bucket_maps(self.spec, self.grid, self.num_prefix_tokens, self.device)
        num_tokens = self.maps[0].compact_ids.shape[0]
        self.q, self.k, self.v = (tokens() for _ in range(3))
        table_heads = 1 if self.spec.shared_heads else self.heads
        rows = [(table_heads, m.num_buckets) for m in self.maps]
        if self.spec.mode == "bias":
            self.tables = {"bias_tables": [leaf(*shape) for shape in rows]}
        else:
            names = {"q": "query_tables", "k": "key_tables", "v": "value_tables"}
            self.tables = {
                names[target]: [leaf(*shape, self.dim) for shape in rows]
                for target in self.spec.targets
            }
        self.unrotated = {}
        for name, kind in (("table_q", "key_tables"), ("table_k", "query_tables")):
            if self.is_rotated and kind in self.tables:
                self.unrotated[name] = tokens()
        self.attn_mask = None
        if self.mask == "boolean":
            mask = torch.rand(self.batch, 1, num_tokens, num_tokens, generator=generator) > 0.3
            mask[:1, 0, 0] = False  # a query with no key left
            self.attn_mask = mask.to(self.device)
        if self.mask == "padding":
            mask = torch.rand(self.batch, 1, 1, num_tokens, generator=generator) > 0.3
            self.attn_mask = mask.to(self.device)
        if self.mask == "additive":
            self.attn_mask = leaf(self.heads, num_tokens, num_tokens)
        self.grad_out = leaf(*self.q.shape).detach()

    def leaves(self):
        tables = [t for ts in self.tables.values() for t in ts]
        leaves = [self.q, self.k, self.v, *tables, *self.unrotated.values()]
        return [*leaves, self.attn_mask] if self.mask == "additive" else leaves

    def attention(self, impl, **arguments):
        return rpe_attention(
            self.q,
            self.k,
            self.v,
            self.maps,
            **self.tables,
            **self.unrotated,
            attn_mask=self.attn_mask,
            impl=impl,
            **arguments,
        )

    def output_and_gradients(self, impl):
        out = self.attention(impl)
        found = torch.autograd.grad(out, self.leaves(), self.grad_out, allow_unused=True)
        return [out, *found]

    def in_float64(self):
        """The same problem with the same numbers, computed in float64."""
        wide = Case(**{**self.arguments(), "dtype": torch.float64})

        def widened(x):
            return x.detach().double().requires_grad_()

        wide.q, wide.k, wide.v = (widened(x) for x in (self.q, self.k, self.v))
        wide.tables = {name: [widened(t) for t in ts] for name, ts in self.tables.items()}
        wide.unrotated = {name: widened(x) for name, x in self.unrotated.items()}
        if self.attn_mask is not None and self.attn_mask.is_floating_point():
            wide.attn_mask = widened(self.attn_mask)
        wide.grad_out = self.grad_out.double()
        return wide

    def arguments(self):
        made = ("tables",)
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in made}


def assert_all_close(actual, expected, tolerance):
    for a, e in zip(actual, expected, strict=True):
        if e is None:
            assert a is None or not a.any()
            continue
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)
