"""The cases of the Triton kernels, and the process in which its interpreter computes them.

python tests/triton_cases.py 0 5 dropout    # by index or name; a line of JSON for each

The interpreter is chosen when triton is first imported, so it needs a process of its own. The cases
are the same on a GPU. Tiles are small here, so that tokens fill several and the last one in part.
"""

import json
import os
import sys
import traceback

import pytest
import torch

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)

from cases import Case
from own_error import assert_at_most_twice, fused_errors, pytorchs_own, rows_of_pairs
from pairs import all_pairs
from torch.utils.checkpoint import checkpoint

from irpe import (
    BucketMap,
    Clip,
    Piecewise,
    RPESpec,
    bucket_maps,
    rpe_attention,
    rpe_attention_weights,
)
from irpe.ops.checks import check_call
from irpe.ops.differentiable import _flatten

FACTORS = {
    "method": ["product", "cross", "euclidean", "quantization"],
    "targets": ["bias", "q", "k", "v", "qk", "qv", "kv", "qkv"],
    "dtype": [torch.float16, torch.bfloat16, torch.float32],
    "dim": [16, 24, 32, 48, 64, 80, 96, 128],
    "grid": [((3, 11), 1), ((1, 1), 0), ((5, 8), 0), ((1, 20), 5), ((2, 3, 5), 1)],
    "mask": [None, "boolean", "padding", "additive"],
    "index": [Clip(1), Piecewise.from_ratio(1.9)],
    "shared": [True, False],
    "layout": ["rotated", "strided", ""],
    "batch": [1, 2, 0],
}
CASES = all_pairs(**FACTORS)
FEW = ["5", "7", "8", "15", "36", "37", "49", "54", "55", "56", "57", "62"]  # all single values


def make_case(factors, device="cpu"):
    f = factors
    is_bias = f["targets"] == "bias"
    mode, targets = ("bias", "k") if is_bias else ("contextual", f["targets"])
    grid, prefix = f["grid"]
    case = Case(
        RPESpec(f["method"], mode, targets, f["index"], f["shared"]),
        grid,
        prefix,
        f["batch"],
        dim=f["dim"],
        dtype=f["dtype"],
        mask=f["mask"],
        is_rotated=f["layout"] == "rotated",
        is_strided=f["layout"] == "strided",
        device=device,
    )
    for tables in case.tables.values():
        for table in tables:  # so that the scores of both kinds are alike
            table.data /= 1 if is_bias else case.dim**0.5
    return case


def check(factors, device="cpu"):
    """Compares the output and all gradients of one case with PyTorch's own error."""
    case = make_case(factors, device)
    exact = case.in_float64().output_and_gradients("reference")
    own, fused = pytorchs_own(case), fused_errors(case)
    floor = torch.finfo(case.dtype).eps * (4 if case.dtype == torch.float32 else 1 / 64)
    found = case.output_and_gradients("triton")
    assert all(x is None or x.dtype == case.dtype for x in found)
    assert_at_most_twice(found, own, exact, fused, floor)


def check_gradient(attend, expected, leaves):
    """Compares the output and all gradients of two functions in float32."""
    found, wanted = attend(), expected()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).to(wanted)
    pairs = zip(*(torch.autograd.grad(x, leaves, weight) for x in (found, wanted)), strict=True)
    for f, w in pairs:
        torch.testing.assert_close(f, w, rtol=1e-4, atol=1e-4)


def leaf(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).requires_grad_()


def tokens(*counts, dim=16):
    return [leaf(2, 2, count, dim, seed=i) for i, count in enumerate(counts)]


def check_dropout():
    """The pairs that were dropped are found with unit vectors as values."""
    spec = RPESpec("cross", targets="qkv", index=Clip(1))
    case = Case(spec, (5, 7), 1, batch=1, dim=36, dtype=torch.float32)  # several tiles

    def attend(**arguments):
        torch.manual_seed(3)
        return case.attention("triton", dropout_p=0.4, **arguments)

    v, tables = case.v, case.tables
    case.v = torch.eye(36).expand(1, 2, -1, -1)
    case.tables = {name: ts for name, ts in tables.items() if name != "value_tables"}
    kept = (attend() != 0).float()
    assert 0.5 < kept.mean() < 0.7
    weights = rpe_attention_weights(case.q, case.k, case.maps, **case.tables)
    case.v, case.tables = v, tables

    def expected():
        a = weights * kept / 0.6
        z = a @ v
        for table, bucket_map in zip(tables["value_tables"], case.maps, strict=True):
            z = z + torch.einsum("bhij,bhijd->bhid", a, rows_of_pairs(table, bucket_map))
        return z

    check_gradient(attend, expected, case.leaves())


def check_repetition():
    """Each run gives the same bits: no sum depends on which program came first."""
    case = Case(RPESpec(targets="qkv", index=Clip(1)), (5, 7), 0, 1, 1, 16, torch.float32)
    first, again = (case.output_and_gradients("triton") for _ in range(2))
    assert all(torch.equal(f, a) for f, a in zip(first, again, strict=True))


def check_rectangles():
    """Queries that are not the keys; maps that are those of each image; all roles at once."""
    for shape in ((21, 34), (2, 21, 34)):
        ids = torch.randint(7, shape, generator=torch.Generator().manual_seed(0))
        maps = [BucketMap(ids, 7)]
        q, k, v = tokens(21, 34, 34)
        names = ("query_tables", "key_tables", "value_tables")
        tables = {name: [leaf(2, 7, 16, seed=i)] for i, name in enumerate(names)}
        tables["bias_tables"] = [leaf(1, 7)]
        leaves = [q, k, v, *(t for ts in tables.values() for t in ts)]

        def attend(impl, inputs=(q, k, v, maps), tables=tables):
            return rpe_attention(*inputs, **tables, impl=impl)

        check_gradient(lambda a=attend: a("triton"), lambda a=attend: a("reference"), leaves)


def check_joined_tables():
    """Tables that split the head dimension (Eq. 12), of one head or all, and one table twice."""
    maps = bucket_maps(RPESpec("cross", index=Clip(2)), (4, 5), 1)
    q, k, v = tokens(21, 21, 21, dim=24)
    rows = [m.num_buckets for m in maps]
    halves = [leaf(1, rows[0], 8), leaf(2, rows[1], 16)]
    tied = [leaf(1, count, 24) for count in rows]
    for tables in (
        {"key_tables": halves, "value_tables": halves},
        {"key_tables": tied, "query_tables": tied},
    ):
        leaves = [q, k, v, *next(iter(tables.values()))]

        def attend(impl, tables=tables):
            return rpe_attention(q, k, v, maps, **tables, impl=impl)

        check_gradient(lambda a=attend: a("triton"), lambda a=attend: a("reference"), leaves)


def check_many_rows():
    """More rows than a byte counts, and a mask of the lowest number: no key is left, or all are."""
    ids = torch.arange(400).view(20, 20).flip(1) % 300
    maps, mask = [BucketMap(ids, 300)], torch.zeros(20, 20)
    mask[3] = torch.finfo(torch.float32).min
    mask[4] = -torch.inf
    q, k, v = (leaf(1, 1, 20, 16, seed=i) for i in range(3))
    table = [leaf(1, 300, 16)]

    def attend(impl):
        return rpe_attention(
            q, k, v, maps, key_tables=table, value_tables=table, attn_mask=mask, impl=impl
        )

    from irpe.ops.impl import triton

    triton._ROWS_IN_ANY_CASE = 300
    check_gradient(lambda: attend("triton"), lambda: attend("reference"), [q, k, v, *table])


def check_operators():
    """PyTorch's own check of the operators, with all that a call may hold."""
    case = Case(RPESpec("product", targets="qkv", index=Clip(1)), (2, 3), 0, 1, dtype=torch.float16)
    unrotated = {"table_q": case.q, "table_k": case.k}
    call = check_call(
        case.q, case.k, case.v, case.maps, **case.tables, **unrotated, dropout_p=0.1
    )  # fmt: skip
    call = call.with_leaves([None if x is None else x.detach() for x in call.leaves()])
    fields = _flatten(call)
    checks = ("test_schema", "test_faketensor")
    operator = torch.ops.irpe.triton.default
    torch.library.opcheck(operator, (*fields, True), test_utils=checks)
    out, *kept = operator(*fields, True)
    arguments = (torch.randn_like(out), [out, *kept], False, *fields)
    backward = torch.ops.irpe.triton_backward.default
    torch.library.opcheck(backward, arguments, test_utils=checks)


def check_hosts():
    """Compiled as a whole, checkpointed, in autocast, without gradients: what it gives alone."""
    case = Case(RPESpec(targets="kv", index=Clip(1)), (3, 5), dim=16, dtype=torch.float32)

    def attend(q):
        case.q = q
        return case.attention("triton")

    q = case.q.detach().requires_grad_()
    out = attend(q)
    (expected,) = torch.autograd.grad(out.square().sum(), q)
    for run in (
        torch.compile(attend, backend="aot_eager", fullgraph=True),
        lambda q: checkpoint(attend, q, use_reentrant=False),
    ):
        found = run(q)
        torch.testing.assert_close(found, out)
        torch.testing.assert_close(torch.autograd.grad(found.square().sum(), q)[0], expected)
    with torch.no_grad():
        torch.testing.assert_close(attend(q), out)
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(q).dtype == torch.bfloat16
    with pytest.raises(NotImplementedError, match="impl='plain'"):
        torch.autograd.grad(attend(q).sum(), q, create_graph=True)


SPECIAL = {
    "dropout": check_dropout,
    "repetition": check_repetition,
    "rectangles": check_rectangles,
    "joined tables": check_joined_tables,
    "many rows": check_many_rows,
    "operators": check_operators,
    "hosts": check_hosts,
}


def use_small_tiles():
    from irpe.ops.impl.triton import launch
    from irpe.ops.impl.triton.configuration import Tile

    launch.tile_of = lambda kernel, *_: Tile(16, 32) if kernel == "key" else Tile(32, 16)


def run(name):
    try:
        SPECIAL[name]() if name in SPECIAL else check(CASES[int(name)])
    except Exception:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    use_small_tiles()
    for name in sys.argv[1:]:
        print(json.dumps([name, run(name)]), flush=True)
