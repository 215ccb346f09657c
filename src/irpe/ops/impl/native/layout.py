"""What Python passes to the kernels: the structures of kernel/call.h, field by field."""

import ctypes

POINTER, INT = ctypes.c_void_p, ctypes.c_int64
TOKENS = (
    *("q", "k", "v", "table_q", "table_k"),
    *("out", "grad_out", "grad_q", "grad_k", "grad_v", "grad_table_q", "grad_table_k"),
)
TABLES = ("query", "key", "value", "bias")
NO_MEMORY = 1  # what a kernel returns without memory; 0 if it is done


class Tokens(ctypes.Structure):
    """Queries, keys, values or a gradient: (batch, heads, tokens, dim), the last axis dense."""

    _fields_ = [("data", POINTER), *((axis, INT) for axis in ("batch", "head", "token"))]


class Table(ctypes.Structure):
    """The rows in use of all maps, (heads or 1, rows, dim), and where their gradient goes."""

    _fields_ = [("data", POINTER), ("gradient", POINTER), ("heads", INT)]


class Mask(ctypes.Structure):
    """Scores to add, by strides, which are 0 where it is broadcast."""

    _fields_ = [("data", POINTER), *((axis, INT) for axis in ("batch", "head", "query", "key"))]


class Map(ctypes.Structure):
    """The plans of a map, and how many rows it uses."""

    _fields_ = [("of_keys", POINTER), ("of_queries", POINTER), ("rows", INT)]


class Call(ctypes.Structure):
    """A call of the forward or the backward pass."""

    _fields_ = [
        *((n, INT) for n in ("batch", "heads", "queries", "keys", "dim", "num_maps", "threads")),
        ("scale", ctypes.c_double),
        *((name, Tokens) for name in TOKENS),
        *((name, Table) for name in TABLES),
        ("mask", Mask),
        ("maps", ctypes.POINTER(Map)),
        ("normalizers", POINTER),
        ("parallel_for", POINTER),
    ]
