"""Calls in other circumstances: each must be equal to the plain call, or refused with its remedy.

Threads that change between forward and backward pass, several gradients at once, tensors without
values, autocast, tables and maps of which some are shared, and nothing to attend to or from.
"""

from functools import partial
from unittest import mock

import torch
from hostile import native
from hostile.cases import Case
from hostile.operators import IMPLEMENTATIONS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import irpe
from irpe.ops.impl.fast.slices import BOUNDS, Bounds

SMALL = Bounds(weights=400, mask=400, kept=0)  # so that a call has many slices
REMEDY = "impl='plain'"


class Draw(native.Draw):
    """A random call in float64, some of whose maps differ between images."""

    def __init__(self, seed):
        super().__init__(seed)
        self.queries, self.keys = min(self.queries, 20), min(self.keys, 20)
        self.name = str(self.random.choice(["auto", *IMPLEMENTATIONS]))
        self.dropout = float(self.random.choice([0.0, 0.5]))

    def __str__(self):
        return f"{self.name} {super().__str__()}, dropout {self.dropout}"

    def normal(self, *shape):
        return super().normal(*shape).double()

    def maps(self):
        found = super().maps()
        for index, bucket_map in enumerate(found):
            if self.random.random() < 0.4:
                ids = [(bucket_map.ids + n) % self.rows[index] for n in range(self.batch)]
                if ids:
                    found[index] = irpe.BucketMap(torch.stack(ids), self.rows[index])
        return found

    def call(self):
        """Returns the attention as a function of its leaves and options, and the leaves."""
        leaves = {
            name: self.tokens(count).detach()
            for name, count in zip("qkv", (self.queries, self.keys, self.keys), strict=True)
        }
        maps, tables, mask = self.maps(), self.tables(), self.mask()
        flat = [*leaves.values(), *(table for kind in tables.values() for table in kind)]

        def attend(flat, impl=self.name, dtype=torch.float64, **options):
            rest = iter(flat[3:])
            learned = {kind: [next(rest) for _ in kinds] for kind, kinds in tables.items()}
            seen = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
            options |= {"attn_mask": seen, "scale": self.scale, "impl": impl}
            return irpe.rpe_attention(*flat[:3], maps, **learned, **options)

        return attend, flat


def with_gradient(flat, dtype=torch.float64):
    return [x.detach().to(dtype).requires_grad_() for x in flat]


def results(attend, flat, grad, **options):
    """Returns the output and all gradients."""
    flat = with_gradient(flat, options.get("dtype", torch.float64))
    out = attend(flat, **options)
    return [out.detach(), *torch.autograd.grad(out, flat, grad.to(out.dtype))]


def compare(found, expected, bound=1e-9):
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"result {index} is {one.dtype} {one.shape}, not {other.dtype} {other.shape}"
        size = max(1.0, float(other.abs().max())) if other.numel() else 1.0
        error = float((one - other).abs().max()) if other.numel() else 0.0
        if not error <= bound * size:
            return f"result {index}: error {error:.2e} where the largest element is {size:.2e}"
    return "equal"


def is_refusal(error, impl):
    return impl != "auto" and f"impl {impl!r} cannot compute this call" in str(error)


def check_sharing(draw):
    """Against the reference, whatever is shared, and again without gradients."""
    attend, flat = draw.call()
    grad = draw.tokens(draw.queries)
    expected = results(attend, flat, grad, impl="reference")
    try:
        found = results(attend, flat, grad)
    except ValueError as error:
        return "refused" if is_refusal(error, draw.name) else str(error)
    with torch.no_grad():
        again = attend(flat)
    return compare([*found, again], [*expected, expected[0]])


def check_threads(draw):
    """Dropped weights and their gradients, with other threads in each pass."""
    attend, flat = draw.call()
    grad, before = draw.tokens(draw.queries), torch.get_num_threads()

    def run(forward, backward):
        torch.manual_seed(7)
        torch.set_num_threads(forward)
        leaves = with_gradient(flat)
        out = attend(leaves, impl="fast", dropout_p=0.5)
        torch.set_num_threads(backward)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    try:
        with mock.patch.dict(BOUNDS, cpu=SMALL):
            expected = run(1, 1)
            pairs = [(1, 3), (4, 1), (2, 2), tuple(draw.random.integers(1, 5, 2).tolist())]
            found = [compare(run(*pair), expected) for pair in pairs]
        found.append(compare(run(1, 1), expected))  # in one slice
    finally:
        torch.set_num_threads(before)
    return next((each for each in found if each != "equal"), "equal")


def check_several_gradients(draw):
    """Several gradients in one backward pass, and the Jacobian made in that way."""
    attend, flat = draw.call()
    flat = with_gradient(flat)
    grads = torch.stack([draw.tokens(draw.queries) for _ in range(3)])
    try:
        out = attend(flat)
    except ValueError as error:
        return "refused" if is_refusal(error, draw.name) else str(error)
    expected = [
        torch.autograd.grad(out, flat, each, retain_graph=True, allow_unused=True) for each in grads
    ]
    try:
        found = torch.autograd.grad(out, flat, grads, is_grads_batched=True, retain_graph=True)
    except NotImplementedError as error:
        return "refused" if REMEDY in str(error) else str(error)
    return compare(found, [torch.stack(each) for each in zip(*expected, strict=True)])


def check_shapes(draw):
    """The same call on tensors without values, and after it on others again."""
    attend, flat = draw.call()
    grad = draw.tokens(draw.queries)
    options = {"dropout_p": draw.dropout} if draw.name in ("auto", "fast", "plain") else {}
    torch.manual_seed(5)
    try:
        expected = results(attend, flat, grad, **options)
    except ValueError as error:
        return "refused" if is_refusal(error, draw.name) else str(error)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(x.contiguous()) for x in flat]
    with mode:
        try:
            found = results(attend, fakes, mode.from_tensor(grad.contiguous()), **options)
        except ValueError as error:
            return "refused" if is_refusal(error, draw.name) else str(error)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not isinstance(one, FakeTensor) or (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"result {index} is {type(one)} {one.dtype} {one.shape}"
    torch.manual_seed(5)
    return compare(results(attend, flat, grad, **options), expected, 0.0)


def check_autocast(draw):
    """float64 stays what it is; float32 is computed as in the dtype of autocast."""
    attend, flat = draw.call()
    grad = draw.tokens(draw.queries)
    try:
        expected = results(attend, flat, grad)
        with torch.autocast("cpu", torch.bfloat16):
            found = results(attend, flat, grad)
            half = attend([x.float() for x in flat], impl="auto", dtype=torch.float32)
    except ValueError as error:
        return "refused" if is_refusal(error, draw.name) else str(error)
    if half.dtype != torch.bfloat16:
        return f"float32 became {half.dtype}"
    return compare(found, expected, 1e-12)


def check_nothing(draw):
    """No image, no query, no key: zeros, and no gradient of anything."""
    which = draw.random.integers(3)
    draw.batch, draw.queries, draw.keys = (
        0 if which == index else size
        for index, size in enumerate((draw.batch, draw.queries, draw.keys))
    )
    attend, flat = draw.call()
    leaves = with_gradient(flat)
    try:
        out = attend(leaves)
        with torch.no_grad():
            again = attend(leaves)
    except ValueError as error:
        return "refused" if is_refusal(error, draw.name) else str(error)
    gradients = torch.autograd.grad(out.sum(), leaves, allow_unused=True)
    zeros = [torch.zeros_like(leaves[0])] * 2 + [torch.zeros_like(x) for x in leaves]
    found = [x if x is not None else zero for x, zero in zip(gradients, zeros[2:], strict=True)]
    return compare([out.detach(), again, *found], zeros, 0.0)


CHECKS = [
    check_sharing, check_threads, check_several_gradients, check_shapes, check_autocast,
    check_nothing,
]  # fmt: skip


def cases(seed, count):
    """Yields `count` random calls for each circumstance."""
    for number in range(count):
        for index, check in enumerate(CHECKS):
            key = [seed, number, index]
            name = f"{check.__name__} {key} {Draw(key)}"
            yield Case(name, partial(lambda check, key: check(Draw(key)), check, key))
