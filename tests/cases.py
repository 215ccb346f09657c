"""Random attention problems: one encoding on one grid, with every input as a leaf."""

from dataclasses import dataclass, field

import oracles
import torch

from irpe import RPESpec, bucket_maps, rpe_attention

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
    tables: dict[str, list[torch.Tensor]] = field(init=False)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)

        def leaf(*shape):
            numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
            return numbers.to(self.dtype).requires_grad_()

        self.maps = bucket_maps(self.spec, self.grid, self.num_prefix_tokens)
        tokens = self.maps[0].ids.shape[0]
        self.q, self.k, self.v = (leaf(self.batch, self.heads, tokens, self.dim) for _ in range(3))
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
        self.attn_mask = None
        if self.mask == "boolean":
            self.attn_mask = torch.rand(self.batch, 1, tokens, tokens, generator=generator) > 0.3
            self.attn_mask[0, 0, 0] = False  # a query with no key left
        if self.mask == "additive":
            self.attn_mask = leaf(self.heads, tokens, tokens)
        self.grad_out = leaf(*self.q.shape).detach()

    def leaves(self):
        leaves = [self.q, self.k, self.v, *(t for ts in self.tables.values() for t in ts)]
        return [*leaves, self.attn_mask] if self.mask == "additive" else leaves

    def attention(self, impl, **arguments):
        return rpe_attention(
            self.q,
            self.k,
            self.v,
            self.maps,
            **self.tables,
            attn_mask=self.attn_mask,
            impl=impl,
            **arguments,
        )

    def output_and_gradients(self, impl):
        out = self.attention(impl)
        return [out, *torch.autograd.grad(out, self.leaves(), self.grad_out)]
