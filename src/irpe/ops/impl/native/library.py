"""The compiled library: found, loaded, and called with arguments that were checked."""

import ctypes
import math
import os
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from irpe.ops.impl.native.build import WIDTHS, library_path, source_hash
from irpe.ops.impl.native.layout import NO_MEMORY, TABLES, TOKENS, Call, Map, Mask, Table, Tokens

WORK_OF_A_THREAD = 2**19  # multiplications, below which another thread does not pay
_MOST_ELEMENTS = 2**40  # of a tensor that is passed, so that no size overflows
_plans_of_ids: Any = WeakIdKeyDictionary()  # as long as the ids of a map live
_lock = threading.Lock()


class UnavailableError(Exception):
    """Says why there is no compiled library."""


@cache
def load() -> Any:
    """Returns the library for this processor; raises `UnavailableError` where there is none."""
    if os.environ.get("IRPE_NATIVE") == "0":
        raise UnavailableError("it is switched off by IRPE_NATIVE=0")
    width = torch.backends.cpu.get_cpu_capability()
    if width not in WIDTHS:
        known = " and ".join(WIDTHS)
        raise UnavailableError(f"it is compiled for {known}; PyTorch uses {width} here")
    path = library_path(width)
    if not path.exists():
        raise UnavailableError("this installation has no compiled library")
    if source_hash().encode() not in path.read_bytes():
        raise UnavailableError(f"{path.name} is older than its sources: reinstall irpe")
    try:
        library: Any = ctypes.CDLL(str(path))
        of_torch = ctypes.CDLL("libtorch_cpu.so").torch_parallel_for
    except (OSError, AttributeError) as error:
        raise UnavailableError(f"{path.name} cannot be loaded ({error}): reinstall irpe") from error
    library.parallel_for = ctypes.cast(of_torch, ctypes.c_void_p)
    library.irpe_make_plan.restype = ctypes.c_void_p
    size = ctypes.c_int64
    library.irpe_make_plan.argtypes = [ctypes.c_void_p, size, size, size, ctypes.c_int32]
    library.irpe_make_plan.argtypes += [ctypes.POINTER(size)]
    library.irpe_free.argtypes, library.irpe_free.restype = [ctypes.c_void_p], None
    return library


@cache
def why_unavailable() -> str | None:
    """Returns why there is no compiled library, or `None` if there is."""
    try:
        load()
    except UnavailableError as error:
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
    inputs = (x.q, x.k, x.v, x.table_q, x.table_k, x.query, x.key, x.value, x.bias)
    make = torch.empty_like if x.has_pairs else torch.zeros_like
    dense = torch.contiguous_format
    found = [None if t is None else make(t, memory_format=dense) for t in inputs]
    if x.has_pairs:
        names = (f"grad_{name}" for name in x._fields)
        written = {n: t for n, t in zip(names, found, strict=False) if t is not None}
        _run("irpe_backward", x, {**written, "out": out, "grad_out": grad}, normalizers)
    return found[:5], found[5:]


def _run(name: str, x: Inputs, others: dict[str, Tensor], normalizers: Tensor) -> None:
    """Calls a kernel. All that it reads and writes is checked here: it trusts what it is given."""
    library = load()
    alive = [normalizers]  # what has to live until the kernel returns
    (batch, heads, queries, dim), keys, rows = x.q.shape, x.k.shape[2], sum(x.rows)
    work = batch * heads * queries * keys * dim
    threads = min(torch.get_num_threads(), 1 + work // WORK_OF_A_THREAD)
    call = Call(batch, heads, queries, keys, dim, len(x.ids), threads, x.scale)
    call.parallel_for = library.parallel_for
    tokens = x._asdict() | others
    for field in TOKENS:
        if (tensor := tokens.get(field)) is None:
            continue
        count = keys if field.endswith(("k", "v")) else queries
        _check(field, tensor, (batch, heads, count, dim))
        if dim > 1 and tensor.stride(3) != 1:
            if field in others and field != "grad_out":
                raise ValueError(f"{field} has strides {tensor.stride()}: its last axis is dense")
            tensor = tensor.contiguous()
        alive.append(tensor)
        setattr(call, field, Tokens(tensor.data_ptr(), *tensor.stride()[:3]))
    for field in TABLES:
        if (table := tokens[field]) is None:
            continue
        of_heads = 1 if table.shape[0] == 1 else heads
        shape = (of_heads, rows) if field == "bias" else (of_heads, rows, dim)
        _check(field, table, shape)
        alive.append(table := table.contiguous())
        gradient = others.get(f"grad_{field}")
        if gradient is not None:
            _check(f"grad_{field}", gradient, shape)
        pointer = None if gradient is None else gradient.data_ptr()
        setattr(call, field, Table(table.data_ptr(), pointer, of_heads))
    if x.mask is not None:
        alive.append(mask := _scores_to_add(x.mask))
        pairs = zip(mask.shape, (batch, heads, queries, keys), strict=True)
        _check("mask", mask, tuple(size if size == 1 else full for size, full in pairs))
        strides = (0 if n == 1 else s for n, s in zip(mask.shape, mask.stride(), strict=True))
        call.mask = Mask(mask.data_ptr(), *strides)
    _check("normalizers", normalizers, (2, batch, heads, queries))
    call.normalizers = normalizers.data_ptr()
    maps = zip(x.ids, x.rows, strict=True)
    plans = [_plans(ids, n, (queries, keys), x.query is not None) for ids, n in maps]
    call.maps = (Map * len(plans))(*(plan.as_map for plan in plans))
    status = getattr(library, name)(ctypes.byref(call))
    del alive, plans
    if status == NO_MEMORY:
        raise MemoryError(f"attention of {queries:,} queries and {keys:,} keys, {threads} threads")
    if status:
        raise RuntimeError(f"{name} returned {status}")


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: Any = torch.float32) -> None:
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    fits = tensor.shape == shape and math.prod(shape) <= _MOST_ELEMENTS
    if not (is_plain and fits and tensor.dtype == dtype):
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}, "
            f"{tensor.layout}: a kernel takes {dtype} of shape {shape} on the CPU"
        )


def _scores_to_add(mask: Tensor) -> Tensor:
    """Returns a boolean mask as scores, and any other as it is."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)


class _Plans(NamedTuple):
    of_keys: Tensor
    of_queries: Tensor | None
    as_map: Map


def _plans(ids: Tensor, rows: int, shape: tuple[int, int], with_queries: bool) -> _Plans:
    """Returns the plans of a map, which are made once."""
    known = _plans_of_ids.get(ids)
    if known is None or (with_queries and known.of_queries is None) or known.as_map.rows != rows:
        if ids.is_floating_point() or ids.is_complex():
            raise ValueError(f"ids are {ids.dtype}: they are integers")
        _check("ids", ids, shape, ids.dtype)
        with _lock:
            of_keys = _make_plan(ids, rows, of_queries=False)
            of_queries = _make_plan(ids, rows, of_queries=True) if with_queries else None
            pointer = None if of_queries is None else of_queries.data_ptr()
            known = _Plans(of_keys, of_queries, Map(of_keys.data_ptr(), pointer, rows))
            _plans_of_ids[ids] = known
    return known


def _make_plan(ids: Tensor, rows: int, of_queries: bool) -> Tensor:
    library, size = load(), ctypes.c_int64()
    if ids.dtype == torch.int64:  # no wrong one may become a right one of 32 bits
        ids = ids.clamp(-1, rows)
    small = ids.to(torch.int32).contiguous()
    made = library.irpe_make_plan(
        small.data_ptr(), *ids.shape, rows, of_queries, ctypes.byref(size)
    )
    if made is None:
        if -size.value == NO_MEMORY:
            raise MemoryError(f"a plan for {ids.shape[0]:,} queries and {ids.shape[1]:,} keys")
        raise ValueError(f"compact_ids name rows outside of the {rows} that their map uses")
    plan = torch.empty(size.value, dtype=torch.int32)
    ctypes.memmove(plan.data_ptr(), made, 4 * size.value)
    library.irpe_free(made)
    return plan
