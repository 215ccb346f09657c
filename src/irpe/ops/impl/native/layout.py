"""What Python passes to the kernels: the fields of `Call` in kernel/call.h, of 8 bytes each."""

import ctypes


def _fields(names: str, parts: str) -> dict[str, tuple[str, ...]]:
    return {name: tuple(f"{name}_{part}" for part in parts.split()) for name in names.split()}


_SIZES = ("batch", "heads", "queries", "keys", "dim", "num_maps", "threads", "scale")
TOKENS = _fields(
    "q k v table_q table_k out grad_out grad_q grad_k grad_v grad_table_q grad_table_k",
    "data batch head token",  # the address, and strides
)
TABLES = _fields("query key value bias", "data gradient heads")
MASK = _fields("mask", "data batch head query key")
_PARTS = [part for parts in (TOKENS | TABLES | MASK).values() for part in parts]


class Call(ctypes.Structure):
    """A call of the forward or the backward pass; what is not given is 0."""

    _fields_ = [
        (name, ctypes.c_double if name == "scale" else ctypes.c_int64)
        for name in (*_SIZES, *_PARTS, "maps", "normalizers", "parallel_for")
    ]
