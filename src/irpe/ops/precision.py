"""The precision that attention is computed in, also inside `torch.autocast`."""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def compute_dtype(q: Tensor) -> torch.dtype:
    """Returns the dtype that `scaled_dot_product_attention` would use, also under autocast."""
    return torch.get_autocast_dtype(q.device.type) if autocasts(q) else q.dtype


def without_autocast(q: Tensor) -> AbstractContextManager[object]:
    """Returns a context in which no operation on the device changes the dtype of its inputs."""
    return torch.autocast(q.device.type, enabled=False) if autocasts(q) else nullcontext()


def autocasts(q: Tensor) -> bool:
    """Tells whether autocast would change the dtype of operations with q."""
    if not torch._C._is_any_autocast_enabled():  # quicker than to ask for the device
        return False
    if q.dtype == torch.float64:  # which autocast leaves alone
        return False
    device = q.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of scores and sums: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Returns the dtype in which matrices enter a product whose result is float32 at least.

    CUDA and ROCm devices multiply 16-bit matrices with float32 sums; elsewhere they are widened.
    """
    return dtype if device.type == "cuda" else accumulation_dtype(dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x in a dtype; costs nothing where it is that already."""
    return x if x.dtype == dtype else x.to(dtype)


def product(a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """Returns alpha * (a @ b) in float32 at least; 16-bit matrices are not widened first.

    Args:
        a: A matrix, or several along leading axes.
        b: One matrix for all of a, or one for each along the last leading axes.
        alpha: A factor of the result.
    """
    is_narrow = a.dtype in (torch.float16, torch.bfloat16)
    if b.ndim == 2:
        rows = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
        if is_narrow:
            flat = torch.mm(rows, b, out_dtype=torch.float32)
        else:
            flat = rows.new_empty(rows.shape[0], b.shape[1])
            torch.addmm(flat, rows, b, beta=0, alpha=alpha, out=flat)
    else:
        b = b if b.ndim == a.ndim else b.expand(*a.shape[:-2], *b.shape[-2:])
        rows, b = a.flatten(0, -3), b.flatten(0, -3)
        if is_narrow:
            flat = torch.bmm(rows, b, out_dtype=torch.float32)
        else:
            flat = rows.new_empty(*rows.shape[:2], b.shape[2])
            torch.baddbmm(flat, rows, b, beta=0, alpha=alpha, out=flat)
    if is_narrow and alpha != 1.0:
        flat.mul_(alpha)
    return flat.view(*a.shape[:-1], b.shape[-1])


def add_product_(
    total: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0, beta: float = 1.0
) -> Tensor:
    """Sets the total to beta * total + alpha * (a @ b), in place; with beta = 0 it may be empty.

    Both factors have the leading axes of the total.
    """
    if a.dtype != total.dtype:
        found = product(a, b)
        return total.add_(found, alpha=alpha) if beta else torch.mul(found, alpha, out=total)
    shape = (math.prod(total.shape[:-2]), *total.shape[-2:])
    flat = total.view(shape)  # an error, not a copy, if it cannot be a view
    rows, columns = a.flatten(0, -3), b.flatten(0, -3)
    torch.baddbmm(flat, rows, columns, beta=beta, alpha=alpha, out=flat)
    return total
