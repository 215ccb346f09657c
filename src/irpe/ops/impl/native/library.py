"""The compiled library: found, loaded, and called with arguments that were checked."""

import ctypes
import math
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from irpe.ops.impl.native import build
from irpe.ops.impl.native.layout import MASK, TABLES, TOKENS, Call

WORK_OF_A_THREAD = 2**19  # multiplications, below which another thread does not pay
_MOST_ELEMENTS = 2**40  # of a tensor that is passed, so that no size overflows
_MOST_ROWS = 2**16  # of a map: plans have 16 bits for a row
_NO_MEMORY = 1  # Status in kernel/call.h; 0 is done
_plans_of_ids: Any = WeakIdKeyDictionary()  # as long as the ids of a map live
_lock = threading.Lock()


@cache
def load() -> Any:
    """Returns the library for this processor; raises `OSError` with the reason if there is none."""
    width = torch.backends.cpu.get_cpu_capability()
    known = width in build.WIDTHS
    if reason := build.why_unusable([width] if known else []):
        raise OSError(reason)
    if not known:
        raise OSError(f"it is compiled for {' and '.join(build.WIDTHS)}; PyTorch uses {width} here")
    path = build.library_path(width)
    try:
        library: Any = ctypes.CDLL(str(path))
        of_torch = ctypes.CDLL("libtorch_cpu.so").torch_parallel_for
    except (OSError, AttributeError) as error:
        raise OSError(f"{path.name} cannot be loaded ({error}): reinstall irpe") from error
    library.parallel_for = ctypes.cast(of_torch, ctypes.c_void_p).value
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.irpe_make_plan.argtypes = [pointer, *[size] * 6, ctypes.c_int32, pointer]
    library.irpe_free.argtypes, library.irpe_free.restype = [pointer], None
    return library


@cache
def why_unavailable() -> str | None:
    """Returns why there is no compiled library, or `None` if there is."""
    try:
        load()
    except OSError as error:
        return str(error)
    return None


class Inputs(NamedTuple):
    """A call as the kernels take it: float32, with one table of each kind for all maps.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        table_q: The queries that the key table meets; `None` if they are q.
        table_k: The keys that the query table meets; `None` if they are k.
        query: r^Q, the rows in use of all maps, one after the other; or `None`.
        key: r^K.
        value: r^V.
        bias: The scalars in use.
        mask: Four axes, each full or 1: booleans, or floats to add.
        ids: The compact ids of each map.
        rows: How many table rows each map uses.
        scale: The factor of the scores.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    table_q: Tensor | None
    table_k: Tensor | None
    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    bias: Tensor | None
    mask: Tensor | None
    ids: Sequence[Tensor]
    rows: Sequence[int]
    scale: float

    @property
    def has_pairs(self) -> bool:
        """Whether there is anything to compute."""
        return self.q.numel() > 0 and self.k.numel() > 0


def outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    """Returns an empty output, in the order that models want next, and empty normalizers."""
    batch, heads, queries, dim = q.shape
    out = q.new_empty(batch, queries, heads, dim).transpose(1, 2)
    return out, q.new_empty(2, batch, heads, queries)


def forward(x: Inputs) -> tuple[Tensor, Tensor]:
    """Returns the output and the normalizers of the queries, which the backward pass needs."""
    out, normalizers = outputs(x.q)
    if not x.has_pairs:
        return out.zero_(), normalizers
    _run("irpe_forward", x, {"out": out}, normalizers)
    return out, normalizers


def backward(
    x: Inputs, out: Tensor, normalizers: Tensor, grad: Tensor
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Returns the gradients of the first five inputs, and those of the tables."""
    make = torch.empty_like if x.has_pairs else torch.zeros_like
    dense = torch.contiguous_format
    found = [None if t is None else make(t, memory_format=dense) for t in x[:9]]
    if x.has_pairs:
        gradients = zip((f"grad_{name}" for name in x._fields), found, strict=False)
        _run("irpe_backward", x, {**dict(gradients), "out": out, "grad_out": grad}, normalizers)
    return found[:5], found[5:]


def _run(name: str, x: Inputs, others: dict[str, Tensor | None], normalizers: Tensor) -> None:
    """Calls a kernel. All that it reads and writes is checked here: it trusts what it is given."""
    library, given = load(), x._asdict() | others
    (batch, heads, queries, dim), keys, rows = x.q.shape, x.k.shape[2], sum(x.rows)
    work = batch * heads * queries * keys * dim
    threads = min(torch.get_num_threads(), 1 + work // WORK_OF_A_THREAD)
    _check("normalizers", normalizers, (2, batch, heads, queries))
    call: dict[str, float] = {"normalizers": normalizers.data_ptr()}
    alive: list[Any] = []  # what has to live until the kernel returns
    for field, parts in TOKENS.items():
        if (tensor := given.get(field)) is None:
            continue
        _check(field, tensor, (batch, heads, keys if field[-1] in "kv" else queries, dim))
        if dim > 1 and tensor.stride(3) != 1:
            if field in others and field != "grad_out":
                raise ValueError(f"{field} has strides {tensor.stride()}: its last axis is dense")
            tensor = tensor.contiguous()
        alive.append(tensor)
        call |= zip(parts, (tensor.data_ptr(), *tensor.stride()), strict=False)
    for field, parts in TABLES.items():
        if (table := given[field]) is None:
            continue
        of_heads = 1 if table.shape[0] == 1 else heads
        shape = (of_heads, rows) if field == "bias" else (of_heads, rows, dim)
        _check(field, table, shape)
        alive.append(table := table.contiguous())
        if (gradient := others.get(f"grad_{field}")) is not None:
            _check(f"grad_{field}", gradient, shape)
        addresses = (table.data_ptr(), 0 if gradient is None else gradient.data_ptr())
        call |= zip(parts, (*addresses, of_heads), strict=True)
    if (mask := x.mask) is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
        alive.append(mask)
        sizes = zip(mask.shape, (batch, heads, queries, keys), strict=True)
        _check("mask", mask, [size if size == 1 else full for size, full in sizes])
        strides = (0 if n == 1 else s for n, s in zip(mask.shape, mask.stride(), strict=True))
        call |= zip(MASK["mask"], (mask.data_ptr(), *strides), strict=True)
    maps: list[int] = []
    for ids, of_map in zip(x.ids, x.rows, strict=True):
        plans = _plans(ids, of_map, (queries, keys), 1 if x.query is None else 2)
        alive.append(plans)
        maps += [plans[0].value, plans[-1].value, of_map]
    in_memory = (ctypes.c_int64 * len(maps))(*maps)
    call |= {"maps": ctypes.addressof(in_memory), "parallel_for": library.parallel_for}
    sizes = (batch, heads, queries, keys, dim, len(x.ids), threads, x.scale)
    status = getattr(library, name)(ctypes.byref(Call(*sizes, **call)))
    del alive, in_memory
    if status == _NO_MEMORY:
        raise MemoryError(f"attention of {queries:,} queries and {keys:,} keys, {threads} threads")
    if status:
        raise RuntimeError(f"{name} returned {status}")


def _check(
    name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> None:
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    fits = tensor.shape == tuple(shape) and math.prod(shape) <= _MOST_ELEMENTS
    if not (is_plain and fits and tensor.dtype == dtype):
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}, "
            f"{tensor.layout}: a kernel takes {dtype} of shape {tuple(shape)} on the CPU"
        )


class _Plan(ctypes.c_void_p):
    """A plan of a map, in memory of the library."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self.free = library.irpe_free

    def __del__(self) -> None:
        self.free(self)


def _plans(ids: Tensor, rows: int, shape: Sequence[int], num_plans: int) -> list[Any]:
    """Returns the plan of keys of a map and, with two, that of queries; they are made once."""
    _check("ids", ids, shape, ids.dtype)
    known: dict[tuple[int, bool], _Plan] = _plans_of_ids.get(ids, {})
    wanted = [(rows, False), (rows, True)][:num_plans]
    if not known.keys() >= set(wanted):
        with _lock:
            known = _plans_of_ids.get(ids, {})
            made = {key: known.get(key) or _make_plan(ids, *key) for key in wanted}
            _plans_of_ids[ids] = known = known | made
    return [known[key] for key in wanted]


def _make_plan(ids: Tensor, rows: int, of_queries: bool) -> _Plan:
    if ids.is_floating_point() or ids.is_complex() or rows > _MOST_ROWS:
        raise ValueError(
            f"ids are {ids.dtype} for {rows:,} rows: integers for up to {_MOST_ROWS:,}"
        )
    ids = ids if ids.dtype in (torch.uint8, torch.int16) else ids.long()
    axes = (0, 1) if of_queries else (1, 0)  # of rows, of lanes
    sizes = [size for axis in axes for size in (ids.shape[axis], ids.stride(axis))]
    library, bits = load(), 8 * ids.itemsize
    plan, make = _Plan(library), library.irpe_make_plan
    status = make(ids.data_ptr(), bits, *sizes, rows, of_queries, ctypes.byref(plan))
    if status == _NO_MEMORY:
        raise MemoryError(f"a plan for {ids.shape[0]:,} queries and {ids.shape[1]:,} keys")
    if status:
        raise ValueError(f"compact_ids name rows outside of the {rows} that their map uses")
    return plan
