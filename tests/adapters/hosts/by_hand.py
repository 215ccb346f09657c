"""An oracle: the stock forward of an attention, with the encoding added by hand while it runs.

The host's own class runs, and the two products of its attention, or its one call of
`scaled_dot_product_attention`, are found by a mode of PyTorch: nothing of how an attention is
equipped is used. Where it rotates queries and keys, those before the rotation are kept.
"""

import sys
from contextlib import ExitStack
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from irpe.adapters.equipped import equipped_attentions

ROTATIONS = ("apply_rot_embed_cat", "apply_rotary_pos_emb")
# They scale their queries before the product.
SCALING = (
    "SamVisionAttention", "VitDetAttention", "ShiftedWindowAttention", "WindowAttentionGlobal",
    "MultiScaleAttention",
)  # fmt: skip


def calls_of(model, run):
    """How attentions are called in a run of a model: module, arguments, keywords, result, grid."""
    calls, grids = [], []

    def note_grid(encoding, args, kwargs):
        grids.append(kwargs["grid"])

    def note(attention, args, kwargs, result):
        result = result[0] if isinstance(result, tuple) else result
        calls.append((attention, args, kwargs, result, grids.pop()))
        assert not grids  # attention was answered once

    with ExitStack() as stack, torch.no_grad():
        for attention in equipped_attentions(model).values():
            for handle in (
                attention.rpe.register_forward_pre_hook(note_grid, with_kwargs=True),
                attention.register_forward_hook(note, with_kwargs=True),
            ):
                stack.callback(handle.remove)
        run()
    return calls


def stock_forward(attention, args, kwargs, grid):
    """What the host's own class computes, with the encoding added by hand."""
    kept = []

    def keeping(rotate):
        def keep(*arguments, **options):
            pair = isinstance(arguments[1], torch.Tensor) and rotate.__name__ == ROTATIONS[1]
            kept.extend(arguments[: 2 if pair else 1])
            return rotate(*arguments, **options)

        return keep

    kind = type(attention)
    stock = kind.__base__
    module = sys.modules[stock.__module__]
    with ExitStack() as stack, torch.no_grad():
        for name in ROTATIONS:
            if hasattr(module, name):
                stack.enter_context(patch.object(module, name, keeping(getattr(module, name))))
        stack.callback(setattr, attention, "__class__", kind)
        attention.__class__ = stock
        result = stack.enter_context(AddingEncoding(attention, grid, kept)).run(args, kwargs)
    return result[0] if isinstance(result, tuple) else result


class AddingEncoding(TorchFunctionMode):
    """While it is active, the attention that runs has an encoding (Eq. 5 and 13-17)."""

    def __init__(self, attention, grid, kept):
        super().__init__()
        self.attention, self.encoding, self.kept = attention, attention.rpe, kept
        self.grid, self.num_products = grid, 0
        self.order = vars(attention).get("rpe_order")  # in which tokens are those of the grid

    def run(self, args, kwargs):
        result = self.attention(*args, **kwargs)
        assert self.num_products == 2
        return result

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return self.attend(*args, **kwargs)
        is_product = getattr(function, "__name__", "") in ("matmul", "__matmul__", "bmm")
        if not is_product or args[1].ndim < 3 or self.num_products == 2:
            return function(*args, **kwargs)
        self.num_products += 1
        return function(*args) + (self.scores if self.num_products == 1 else self.values)(*args)

    def scores(self, q, transposed):
        """What a product of queries and keys gets."""
        scale = q.shape[-1] ** -0.5 if self.attention.__class__.__name__ in SCALING else 1.0
        b = self.of_encoding(q / scale, transposed.mT) * scale
        return b.reshape(*q.shape[:-1], b.shape[-1])

    def values(self, a, v):
        """What a product of weights and values gets."""
        heads = self.encoding.size.num_heads
        weights = a.unflatten(0, (-1, heads)) if a.ndim == 3 else a
        return self.of_tables(weights).reshape(*a.shape[:-1], v.shape[-1])

    def attend(self, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_):
        self.num_products += 2
        heads, lead = self.encoding.size.num_heads, q.shape[:-1]
        flat, mask = q.ndim == 3, attn_mask  # flat: batch and heads in one axis
        if mask is not None and flat and mask.ndim == 3:
            mask = mask.unflatten(0, (-1, heads))
        q, k, v = (x.unflatten(0, (-1, heads)) if flat else x for x in (q, k, v))
        q, k, v = (x.flatten(0, 1) if x.ndim == 5 else x for x in (q, k, v))
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        e = (q @ k.mT + self.of_encoding(q, k)) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if mask is not None:
            e = e.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else e + mask
        a = e.softmax(-1)
        return (a @ v + self.of_tables(a)).reshape(*lead, v.shape[-1])

    def of_encoding(self, q, k):
        """The encoding's scores b: batch heads query key."""
        heads = self.encoding.size.num_heads
        q, k = (x.unflatten(0, (-1, heads)) if x.ndim == 3 else x for x in (q, k))
        if self.kept:
            parts = (x.unflatten(0, (len(q), -1)) if x.ndim == 3 else x for x in self.kept)
            q, k = (before_rotation(x, part) for x, part in zip((q, k), parts, strict=True))
        if self.order is None:
            return self.encoding.scores(q, k, grid=self.grid)
        order = self.order(q.shape[2], self.grid)
        b = self.encoding.scores(q[:, :, order], k[:, :, order], grid=self.grid)
        return b[:, :, order.argsort()][..., order.argsort()]

    def of_tables(self, a):
        """Eq. 17: the value table rows of the offsets, weighted."""
        order = None if self.order is None else self.order(a.shape[2], self.grid)
        a = a if order is None else a[:, :, order][..., order]
        z = a.new_zeros(*a.shape[:3], self.encoding.size.head_dim)
        maps = self.encoding.maps(self.grid)
        for bucket_map, table in zip(maps, self.encoding.value_tables, strict=True):
            rows = table[:, bucket_map.ids].expand(a.shape[1], -1, -1, -1)
            z = z + torch.einsum("bhij,hijd->bhid", a, rows)
        return z if order is None else z[:, :, order.argsort()]


def before_rotation(x, part):
    """The tokens of x, those of the patches as they were before the rotation."""
    part = part.repeat_interleave(x.shape[1] // part.shape[1], dim=1)
    return torch.cat([x[:, :, : x.shape[2] - part.shape[2]], part], dim=2)
