"""The compiled library: found, loaded, and called with arguments that were checked."""

import ctypes
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
_ID_TYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


class UnavailableError(Exception):
    """Says why there is no compiled library."""


@cache
def load() -> Any:
    """Returns the library for this processor; raises `UnavailableError` where there is none."""
    if os.environ.get("IRPE_NATIVE") == "0":
        raise UnavailableError("it is switched off by IRPE_NATIVE=0")
    width = torch.backends.cpu.get_cpu_capability()
    if width not in WIDTHS:
        raise UnavailableError(
            f"it is compiled for {' and '.join(WIDTHS)}; PyTorch uses {width} here"
        )
    path = library_path(width)
    if not path.exists():
        raise UnavailableError("this installation has no compiled library")
    try:
        library: Any = ctypes.CDLL(str(path))
        torch_cpu = ctypes.CDLL("libtorch_cpu.so")
        library.parallel_for = ctypes.cast(torch_cpu.torch_parallel_for, ctypes.c_void_p)
        library.irpe_hash.restype = ctypes.c_char_p
        library.irpe_size_of_call.restype = ctypes.c_int64
        library.irpe_make_plan.restype = ctypes.c_void_p
        library.irpe_make_plan.argtypes = [
            ctypes.c_void_p, *[ctypes.c_int64] * 6, ctypes.c_int32, ctypes.POINTER(ctypes.c_int64),
        ]  # fmt: skip
        library.irpe_free.argtypes = [ctypes.c_void_p]
        library.irpe_free.restype = None
        hashed, size = library.irpe_hash().decode(), library.irpe_size_of_call()
    except (OSError, AttributeError) as error:
        raise UnavailableError(f"{path.name} cannot be loaded ({error}): reinstall irpe") from error
    if hashed != source_hash() or size != ctypes.sizeof(Call):
        raise UnavailableError(f"{path.name} is older than its sources: reinstall irpe")
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
    """A call as the kernels take it: float32, with one table of each kind.

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


def outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    """Returns an empty output, in the order that models want next, and empty normalizers."""
    batch, heads, queries, dim = q.shape
    out = q.new_empty(batch, queries, heads, dim).transpose(1, 2)
    return out, q.new_empty(2, batch, heads, queries)


def forward(x: Inputs) -> tuple[Tensor, Tensor]:
    """Returns the output and the normalizers of the queries, which the backward pass needs."""
    out, normalizers = outputs(x.q)
    if not _has_pairs(x):
        return out.zero_(), normalizers
    _run("irpe_forward", x, {"out": out}, normalizers, {})
    return out, normalizers


def backward(
    x: Inputs, out: Tensor, normalizers: Tensor, grad: Tensor
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Returns the gradients of the first five inputs, and those of the tables."""
    inputs = (x.q, x.k, x.v, x.table_q, x.table_k, x.query, x.key, x.value, x.bias)
    dense = torch.contiguous_format
    found = [None if t is None else torch.empty_like(t, memory_format=dense) for t in inputs]
    if _has_pairs(x):
        names = (f"grad_{name}" for name in x._fields)
        written = {n: t for n, t in zip(names, found, strict=False) if t is not None}
        _run("irpe_backward", x, {"out": out, "grad_out": grad}, normalizers, written)
    else:
        found = [None if t is None else t.zero_() for t in found]
    return found[:5], found[5:]


def _has_pairs(x: Inputs) -> bool:
    return x.q.numel() > 0 and x.k.numel() > 0


def _run(
    name: str,
    x: Inputs,
    others: dict[str, Tensor],
    normalizers: Tensor,
    gradients: dict[str, Tensor],
) -> None:
    """Calls a kernel. All that it reads and writes is checked here: it trusts what it is given."""
    library, alive = load(), [normalizers]
    (batch, heads, queries, dim), keys, rows = x.q.shape, x.k.shape[2], sum(x.rows)
    work = batch * heads * queries * keys * dim
    threads = min(torch.get_num_threads(), 1 + work // WORK_OF_A_THREAD)
    call = Call(batch, heads, queries, keys, dim, len(x.ids), threads, x.scale)
    call.parallel_for = library.parallel_for

    tokens = dict(zip(Inputs._fields[:5], x[:5], strict=True)) | others
    for field in TOKENS:
        tensor = tokens.get(field, gradients.get(field))
        if tensor is None:
            continue
        count = keys if field.endswith(("k", "v")) else queries
        _check(field, tensor, torch.float32, (batch, heads, count, dim))
        if dim > 1 and tensor.stride(3) != 1:
            if field in gradients or field == "out":
                raise ValueError(f"{field} has strides {tensor.stride()}: its last axis is dense")
            tensor = tensor.contiguous()
        alive.append(tensor)
        setattr(call, field, Tokens(tensor.data_ptr(), *tensor.stride()[:3]))
    for field in TABLES:
        table, gradient = getattr(x, field), gradients.get(f"grad_{field}")
        if table is None:
            continue
        of_heads = table.shape[0] if table.shape[0] in (1, heads) else heads
        shape = (of_heads, rows) if field == "bias" else (of_heads, rows, dim)
        for tensor in (table, gradient):
            if tensor is not None:
                _check(field, tensor, torch.float32, shape)
        alive.append(table := table.contiguous())
        pointer = None if gradient is None else gradient.data_ptr()
        setattr(call, field, Table(table.data_ptr(), pointer, of_heads))
    if x.mask is not None:
        call.mask = _mask(x.mask, (batch, heads, queries, keys))
    _check("normalizers", normalizers, torch.float32, (2, batch, heads, queries))
    call.normalizers = normalizers.data_ptr()
    plans = [
        _plans(ids, count, (queries, keys), x.query is not None)
        for ids, count in zip(x.ids, x.rows, strict=True)
    ]
    call.maps = (Map * len(plans))(*(plan.as_map for plan in plans))
    status = getattr(library, name)(ctypes.byref(call))
    del alive, plans  # they had to live until here
    if status == NO_MEMORY:
        raise MemoryError(f"attention of {queries:,} queries and {keys:,} keys, {threads} threads")
    if status:
        raise RuntimeError(f"{name} returned {status}")


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    if not is_plain or tensor.dtype != dtype or tensor.shape != shape:
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}, "
            f"{tensor.layout}: a kernel takes {dtype} of shape {shape} on the CPU"
        )


def _mask(mask: Tensor, pairs: tuple[int, ...]) -> Mask:
    shape = tuple(size if size == 1 else full for size, full in zip(mask.shape, pairs, strict=True))
    _check("mask", mask, torch.bool if mask.dtype == torch.bool else torch.float32, shape)
    strides = (0 if n == 1 else stride for n, stride in zip(shape, mask.stride(), strict=True))
    return Mask(mask.data_ptr(), *strides, mask.dtype == torch.bool)


class _Plans(NamedTuple):
    of_keys: Tensor
    of_queries: Tensor | None
    as_map: Map


# By the ids of a map, as long as these live.
_known: Any = WeakIdKeyDictionary()
_lock = threading.Lock()


def _plans(ids: Tensor, rows: int, shape: tuple[int, int], with_queries: bool) -> _Plans:
    """Returns the plans of a map, which are made once."""
    known = _known.get(ids)
    if known is None or (with_queries and known.of_queries is None) or known.as_map.rows != rows:
        if ids.dtype not in _ID_TYPES:
            raise ValueError(f"ids are {ids.dtype}: a kernel takes one of {_ID_TYPES}")
        _check("ids", ids, ids.dtype, shape)
        with _lock:
            of_keys = _make_plan(ids, rows, of_queries=False)
            of_queries = _make_plan(ids, rows, of_queries=True) if with_queries else None
            pointer = None if of_queries is None else of_queries.data_ptr()
            known = _Plans(of_keys, of_queries, Map(of_keys.data_ptr(), pointer, rows))
            _known[ids] = known
    return known


def _make_plan(ids: Tensor, rows: int, of_queries: bool) -> Tensor:
    size, library = ctypes.c_int64(), load()
    made = library.irpe_make_plan(
        ids.data_ptr(), ids.element_size(), *ids.shape, *ids.stride(), rows, of_queries,
        ctypes.byref(size),
    )  # fmt: skip
    if made is None:
        if -size.value == NO_MEMORY:
            raise MemoryError(f"a plan for {ids.shape[0]:,} queries and {ids.shape[1]:,} keys")
        raise ValueError(f"compact_ids name rows outside of the {rows} that their map uses")
    plan = torch.empty(size.value, dtype=torch.int32)
    ctypes.memmove(plan.data_ptr(), made, 4 * size.value)
    library.irpe_free(made)
    return plan
