"""What decides which code of a kernel runs, as a value; and the class of its sizes."""

import importlib.metadata
from typing import NamedTuple

import torch
from torch import Tensor

from irpe.core.cached import traced_as_constant
from irpe.ops.call import AttentionCall

_ALIGNMENT = 16  # compilers make other code for sizes that are multiples of this


class Signature(NamedTuple):
    """All of a call that decides which code runs: calls of one signature are proved once.

    Args:
        device: The model of the device.
        dtype: The dtype of the operands.
        dim: The head dimension.
        query: The query tables: "" for none, "shared" by all heads or one for "heads"; their
            widths after it where they split the head dimension.
        key: The key tables.
        value: The value tables.
        bias: The bias tables.
        maps: The number of bucket maps, with "by image" if images differ, and "by axis" if each
            depends on one axis of the grid.
        bits: How many bits count the table rows in use.
        mask: Its kind and which of its axes are full; "" for none.
        dropout: "dropout" where weights are dropped.
        rotated: Which of q and k are not those that the tables use, "" for none.
        shape: "rectangular" where the numbers of queries and keys differ, or "square".
        alignment: "aligned" where both are multiples of 16, or "odd".
        layout: The order of the axes of q in memory.
        tf32: Whether float32 products are rounded to TF32.
        training: Whether gradients are needed.
    """

    device: str
    dtype: str
    dim: int
    query: str
    key: str
    value: str
    bias: str
    maps: str
    bits: int
    mask: str
    dropout: str
    rotated: str
    shape: str
    alignment: str
    layout: str
    tf32: bool
    training: bool

    def __str__(self) -> str:
        """Returns the text that names the signature in messages and files."""
        kinds = zip(("query", "key", "value", "bias"), self[3:7], strict=True)
        tables = [f"{kind} tables {described}" for kind, described in kinds if described]
        mask = [f"mask {self.mask}"] if self.mask else []
        rotated = [f"rotated {self.rotated}"] if self.rotated else []
        return ", ".join(
            [
                self.device, self.dtype, f"head dimension {self.dim}", *tables,
                f"maps {self.maps}, {self.bits} bits", *mask, *rotated,
                *([self.dropout] if self.dropout else []), self.shape, self.alignment, self.layout,
                *(["tf32"] if self.tf32 else []), "training" if self.training else "inference",
            ]
        )  # fmt: skip


class SizeClass(NamedTuple):
    """The sizes of a call, each rounded up to a power of two: times are kept for each class."""

    heads: int
    queries: int
    keys: int

    def __str__(self) -> str:
        """Returns the text that names the class in messages and files."""
        return f"up to {self.heads} heads of all images, {self.queries} queries, {self.keys} keys"


def signature_of(call: AttentionCall) -> Signature:
    """Returns the signature of a call."""
    q, keys = call.q, call.k.shape[2]
    queries, dim = q.shape[2:]
    return Signature(
        device_model(q.device.type, q.device.index),
        str(q.dtype).removeprefix("torch."),
        len(range(dim)),  # a constant, also where a compiler leaves sizes open
        _describe_tables(call.query_tables, dim),
        _describe_tables(call.key_tables, dim),
        _describe_tables(call.value_tables, dim),
        _describe_tables(call.bias_tables, dim),
        _describe_maps(call),
        max(1, (sum(m.num_used_buckets for m in call.maps) - 1).bit_length()),
        _describe_mask(call.mask),
        "dropout" if call.dropout_p > 0 else "",
        _describe_rotation(call),
        "rectangular" if queries != keys else "square",
        "aligned" if queries % _ALIGNMENT == 0 and keys % _ALIGNMENT == 0 else "odd",
        _describe_layout(q),
        q.dtype == torch.float32 and bool(torch.backends.cuda.matmul.allow_tf32),
        call.needs_grad,
    )


def size_class_of(call: AttentionCall) -> SizeClass:
    """Returns the size class of a call."""
    batch, heads, queries, _ = call.q.shape
    return SizeClass(*map(_next_power, (batch * heads, queries, call.k.shape[2])))


@traced_as_constant
def device_model(device: str, index: int | None) -> str:
    """Returns what is printed on a device: its name and what it can do."""
    if device != "cuda" or not torch.cuda.is_available():
        return device
    major, minor = torch.cuda.get_device_capability(index)
    return f"{torch.cuda.get_device_name(index)} {major}.{minor}"


@traced_as_constant
def version_of(package: str) -> str:
    """Returns the version of an installed package, "" if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _describe_tables(tables: tuple[Tensor, ...], dim: int) -> str:
    if not tables:
        return ""
    shapes = [table.shape for table in tables]
    heads = "shared" if max(shape[0] for shape in shapes) == 1 else "heads"
    if len(shapes[0]) == 2 or shapes[0][-1] == dim:
        return heads
    return f"{heads} " + "+".join(str(shape[-1]) for shape in shapes)


def _describe_maps(call: AttentionCall) -> str:
    if None not in [m.key_axis for m in call.maps]:
        return f"{len(call.maps)} by axis"
    return f"{len(call.maps)}" + " by image" * (3 in [m.compact_ids.ndim for m in call.maps])


def _describe_mask(mask: Tensor | None) -> str:
    if mask is None:
        return ""
    kind = "learned" if mask.requires_grad else "scores"
    kind = "boolean" if mask.dtype == torch.bool else kind
    axes = zip(mask.shape, ("b", "h", "q", "k"), strict=True)
    return f"{kind} " + "".join(axis if size > 1 else "1" for size, axis in axes)


def _describe_rotation(call: AttentionCall) -> str:
    is_there = (call.table_q is not None, call.table_k is not None)
    return " and ".join(name for name, is_rotated in zip("qk", is_there, strict=True) if is_rotated)


def _describe_layout(q: Tensor) -> str:
    _, head, token, element = q.stride()
    if element != 1:
        return "strided"
    return "heads first" if head >= token else "tokens first"


def _next_power(size: int) -> int:
    power = 1
    while power < size:  # comparisons, which a compiler with unknown sizes can guard
        power *= 2
    return power
