"""PyTorch's own error in a dtype, which every implementation is measured by.

It is that of `scaled_dot_product_attention` in the dtype, with the exact b_ij times the scale,
rounded to the dtype, as its mask; for value tables, of its weights times v + r.
"""

from itertools import zip_longest

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel


def pytorchs_own(case):
    """Returns the output and the gradients of PyTorch in the dtype of the case."""
    mask = _mask(case)
    if "value_tables" not in case.tables:
        out = F.scaled_dot_product_attention(case.q, case.k, case.v, mask)
    else:
        tokens = case.q.shape[2]
        one_hot = torch.eye(tokens, dtype=case.dtype, device=case.device)
        one_hot = one_hot.expand(case.batch, case.heads, -1, -1)
        weights = F.scaled_dot_product_attention(case.q, case.k, one_hot, mask)
        values = case.v.unsqueeze(2)
        for table, bucket_map in zip(case.tables["value_tables"], case.maps, strict=True):
            values = values + rows_of_pairs(table, bucket_map)
        out = torch.einsum("bhij,bhijd->bhid", weights, values)
    return [out, *torch.autograd.grad(out, case.leaves(), case.grad_out, allow_unused=True)]


def fused_errors(case):
    """Returns the errors of PyTorch's fused kernel: output, gradients of q, k and v.

    The kernel has no gradient for its mask, so b_ij is a constant here and the exact values are
    those with that constant.
    """
    mask = _mask(case)
    if not case.q.numel():
        return [0.0] * 4
    if mask is not None:
        mask = mask.detach().expand(*case.q.shape[:3], -1).contiguous()
    leaves = [case.q, case.k, case.v]
    exact = [x.detach().double().requires_grad_() for x in leaves]

    def run(inputs, mask):
        out = F.scaled_dot_product_attention(*inputs, mask)
        return [out, *torch.autograd.grad(out, inputs, case.grad_out.to(out.dtype))]

    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        found = run(leaves, mask)
    with sdpa_kernel(SDPBackend.MATH):
        expected = run(exact, None if mask is None else mask.double())
    return [(f - e).abs().nan_to_num(0).max().item() for f, e in zip(found, expected, strict=True)]


def rows_of_pairs(table, bucket_map):
    """Returns the row of the table that the map names for every pair."""
    ids = bucket_map.ids.long()
    return table[:, ids if ids.ndim == 3 else ids.unsqueeze(0)].transpose(0, 1)


def _mask(case):
    """Returns the exact b_ij times the scale, with the mask of the case, in its dtype."""
    q, k = (case.unrotated.get(f"table_{name}", getattr(case, name)) for name in "qk")
    b = torch.zeros((), dtype=torch.float64, device=case.device)
    for name, tokens, sum_of in (
        ("key_tables", q, "bhid,bhijd->bhij"),
        ("query_tables", k, "bhjd,bhijd->bhij"),
    ):
        for table, bucket_map in zip(case.tables.get(name, []), case.maps, strict=False):
            r = rows_of_pairs(table.double(), bucket_map)
            b = b + torch.einsum(sum_of, tokens.double(), r)
    for table, bucket_map in zip(case.tables.get("bias_tables", []), case.maps, strict=False):
        b = b + rows_of_pairs(table.double(), bucket_map)
    has_scores = b.ndim > 0 and any(t.any() for ts in case.tables.values() for t in ts)
    if not has_scores and case.attn_mask is None:
        return None
    b = b * case.dim**-0.5
    if case.attn_mask is not None and case.attn_mask.dtype == torch.bool:
        b = b.expand(*case.q.shape[:3], -1) if b.ndim else b
        b = b.masked_fill(~case.attn_mask, -torch.inf)
    elif case.attn_mask is not None:
        b = b + case.attn_mask
    return b.to(case.dtype)


def assert_at_most_twice(found, own, exact, fused=(), floor=0.0):
    """Compares whole tensors; NaN is an error.

    Args:
        found: The output and the gradients to judge.
        own: Those of PyTorch in the dtype; `None` for what it has not got.
        exact: Those of the reference in float64.
        fused: The errors of PyTorch's fused kernel, for the first of them.
        floor: An error relative to the largest element of all that is always allowed.
    """
    sizes = [e.abs().max().item() for e in exact if e is not None and e.numel()]
    largest = max(sizes, default=0.0)
    for e, o, f, least in zip_longest(exact, own, found, fused, fillvalue=0.0):
        if e is None or (o is None and not e.any()):  # what nothing depends on
            assert f is None or not f.any()
        if o is None:  # the gradient of tables that PyTorch has not got
            continue
        assert f.shape == e.shape
        assert f.isfinite().all()
        if f.numel():
            allowed = 2 * max((o - e).abs().max().item(), least) + floor * largest
            assert (f - e).abs().max() <= allowed, ((f - e).abs().max().item(), allowed)
