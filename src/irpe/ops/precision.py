"""The precision that attention is computed in, also inside `torch.autocast`."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def compute_dtype(q: Tensor) -> torch.dtype:
    """Returns the dtype that `scaled_dot_product_attention` would use, also under autocast."""
    device = q.device.type
    autocasts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocasts else q.dtype


def without_autocast(q: Tensor) -> AbstractContextManager[object]:
    """Returns a context in which no operation on the device changes the dtype of its inputs."""
    device = q.device.type
    if not torch.amp.is_autocast_available(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)
