"""The Triton kernels, as far as they can be proved without a GPU, and the same cases on one.

The numbers come from Triton's interpreter, in a process of its own (`triton_cases.py`); that the
kernels compile is shown by `test_triton_compiled.py`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton_cases
from cases import Case
from pairs import text
from triton_cases import CASES, FEW, SPECIAL

from irpe import BucketMap, Clip, RPESpec, bucket_maps, explain
from irpe.ops.impl import triton
from irpe.ops.impl.triton.buckets import bits_of_maps, pack_ids
from irpe.ops.impl.triton.configuration import block_dim_of, tile_of

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(
    triton.importlib.util.find_spec("triton") is None, reason="needs triton, which PyTorch brings"
)
IN_EACH_RUN = [*FEW, *SPECIAL]
OTHERS = [str(index) for index in range(len(CASES)) if str(index) not in FEW]


def name_of(key):
    return key if key in SPECIAL else f"{key}-{text(CASES[int(key)])}"


def interpret(names):
    """Returns the error of each case, or `None`."""
    command = [sys.executable, "-W", "ignore", triton_cases.__file__, *names]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.fixture(scope="module")
def interpreted():
    return interpret(IN_EACH_RUN)


@pytest.fixture(scope="module")
def all_interpreted():
    return interpret(OTHERS)


@needs_triton
@pytest.mark.parametrize("key", IN_EACH_RUN, ids=name_of)
def test_interpreted_kernels_are_right(key, interpreted):
    assert interpreted[key] is None, interpreted[key]


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("key", OTHERS, ids=name_of)
def test_interpreted_kernels_are_right_for_every_pair_of_factors(key, all_interpreted):
    assert all_interpreted[key] is None, all_interpreted[key]


@pytest.mark.cuda
@pytest.mark.parametrize("factors", CASES, ids=text)
def test_kernels_are_right(factors):
    triton_cases.check(factors, "cuda")


def test_the_cases_above_are_all_pairs():
    def values(name, case):
        return str(case[name])

    names = list(triton_cases.FACTORS)
    for a in names:
        for b in names[names.index(a) + 1 :]:
            found = {(values(a, case), values(b, case)) for case in CASES}
            sizes = len(triton_cases.FACTORS[a]), len(triton_cases.FACTORS[b])
            assert len(found) == sizes[0] * sizes[1]
    few = [CASES[int(key)] for key in FEW]
    for name in names:
        assert len({values(name, case) for case in few}) == len(triton_cases.FACTORS[name])


def refusal(case, **arguments):
    return explain(case.q, case.k, case.v, case.maps, **case.tables, **arguments).others["triton"]


def test_what_is_refused_says_why(monkeypatch):
    case = Case(RPESpec(index=Clip(1)), (3, 5), dtype=torch.float32)
    if triton.importlib.util.find_spec("triton") is not None:
        assert refusal(case) == "it runs on CUDA and ROCm devices, not on cpu"
        with pytest.raises(ValueError, match="impl 'triton' cannot compute this call: it runs on"):
            case.attention("triton")
    monkeypatch.setattr(triton, "_what_is_missing", lambda *_: None)
    assert refusal(case) == "its interpreter is for tests"
    mask = torch.zeros(16, requires_grad=True)
    assert "gradients to masks that have all queries and keys" in refusal(case, attn_mask=mask)
    wide = Case(RPESpec(index=Clip(1)), (3, 5))
    assert refusal(wide) == "it takes float16, bfloat16 and float32, not torch.float64"
    for tensors, rows, reason in (
        (torch.zeros(1, 1, 16, 136), 10, "head dimensions up to 128, not 136"),
        (torch.zeros(1, 1, 2**15 + 1, 16), 1, "up to 32,768 tokens, not 32,769"),
        (torch.zeros(1, 1, 20, 16), 400, "400 rows are in use for 20 keys"),
    ):
        tokens = tensors.shape[2]
        ids = torch.arange(400).view(20, 20) if rows == 400 else torch.zeros(1, 1).long()
        bucket_map = BucketMap(ids, rows)
        bucket_map.compact_ids = bucket_map.compact_ids.expand(tokens, tokens)
        found = explain(
            *[tensors] * 3,
            [bucket_map],
            key_tables=[torch.zeros(1, max(rows, 1), tensors.shape[3])],
        )
        assert reason in found.others["triton"]


IMPORTS = """
import sys
if sys.argv[1] == "without":
    sys.modules["triton"] = None
import torch, irpe
attention = irpe.RPEAttention(32, num_heads=2, spec="product-contextual-qkv", num_prefix_tokens=1)
attention(torch.randn(2, 1 + 3 * 5, 32), grid=(3, 5)).sum().backward()
q = torch.randn(1, 2, 15, 16)
maps = irpe.bucket_maps("product-bias-k", (3, 5))
table = [torch.zeros(1, maps[0].num_buckets)]
print(irpe.explain(q, q, q, maps, bias_tables=table).others["triton"])
print(any(name.startswith("irpe.ops.impl.triton.kernels") for name in sys.modules))
"""


@pytest.mark.parametrize("way", ["with", "without"])
def test_nothing_loads_the_kernels_or_needs_triton(way):
    """PyTorch itself may load triton, so the kernels are looked for, which alone import it."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, way], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    reason, kernels = done.stdout.splitlines()
    assert kernels == "False"
    if way == "without":
        assert reason == "triton is not installed: it comes with PyTorch for CUDA and ROCm"


@pytest.mark.parametrize(("method", "grid"), [("product", (5, 7)), ("cross", (5, 7))])
def test_a_tile_lists_the_rows_that_occur_in_it(method, grid):
    maps = bucket_maps(RPESpec(method, index=Clip(2)), grid, 1)
    rows = [m.num_used_buckets for m in maps]
    packed = pack_ids([m.compact_ids for m in maps], rows)
    found, ends = packed.rows_of_tiles(16, 8)
    height, width = maps[0].compact_ids.shape
    tiles = [(i, j) for i in range(0, height, 16) for j in range(0, width, 8)]
    assert found.shape[:2] == ends.shape[:2] == (1, len(tiles))
    for tile, (i, j) in enumerate(tiles):
        start = 0
        for index, bucket_map in enumerate(maps):
            first = int(ends[0, tile, index - 1]) if index else 0
            listed = found[0, tile, first : int(ends[0, tile, index])]
            expected = bucket_map.compact_ids[i : i + 16, j : j + 8].unique().int() + start
            assert listed.tolist() == expected.tolist()
            start += rows[index]


def test_packed_ids_are_found_again_and_end_with_their_maps():
    maps = bucket_maps("cross-contextual-k@3", (4, 6))
    ids, rows = [m.compact_ids.clone() for m in maps], [m.num_used_buckets for m in maps]
    packed = pack_ids(ids, rows)
    assert pack_ids(ids, rows) is packed
    assert pack_ids([ids[0], ids[1].clone()], rows) is not packed
    for index, (of_map, start) in enumerate(zip(ids, (0, rows[0]), strict=True)):
        assert torch.equal(packed.of_map(index)[0], of_map.int() + start)
    assert packed.ids.dtype == torch.int16
    count = len(triton.buckets._packed)
    del ids, of_map
    assert len(triton.buckets._packed) < count


def test_sizes_that_kernels_are_compiled_for():
    assert [block_dim_of(d) for d in (4, 16, 24, 48, 64, 80, 128)] == [16, 16, 32, 64, 64, 128, 128]
    assert [bits_of_maps(rows) for rows in ([1], [50], [28, 28], [128, 128], [200, 200])] == [
        1, 6, 6, 8, 9,
    ]  # fmt: skip
    for kernel in ("forward", "value", "query", "key", "mask"):
        for dtype in (torch.float16, torch.float32):
            for dim in (16, 64, 128):
                tile = tile_of(kernel, dtype, dim, num_terms=3)
                assert min(tile.queries, tile.keys) >= 16
                assert tile.warps in (4, 8)
