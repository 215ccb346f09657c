"""Candidates with a fault each, to see what a proof makes of it; all compute with `plain`."""

import os
import signal
import sys
import time

import torch

from irpe.ops.impl import plain


class Right:
    """Computes what the reference computes, in the same bits each time."""

    IS_DETERMINISTIC = True

    @staticmethod
    def supports(call):
        return None

    attention = staticmethod(plain.attention)


class Picky(Right):
    """Takes no masks."""

    @staticmethod
    def supports(call):
        return None if call.mask is None else "it takes no masks"


class Nondeterministic(Right):
    """Promises no bits."""

    IS_DETERMINISTIC = False


class Slow(Right):
    @staticmethod
    def attention(call):
        time.sleep(0.05)
        return plain.attention(call)


class WrongOutput(Right):
    @staticmethod
    def attention(call):
        return plain.attention(call) + 1e-2


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.01


class WrongGradient(Right):
    """The gradient of the keys alone is wrong."""

    @staticmethod
    def attention(call):
        return plain.attention(replaced(call, k=_WrongGradient.apply(call.k)))


class NaNAtOneSize(Right):
    """Right on small tensors, NaN at a size that they do not have."""

    @staticmethod
    def attention(call):
        out = plain.attention(call)
        return out * torch.nan if call.q.shape[2] == 98 else out


class NaNWhenSmall(Right):
    @staticmethod
    def attention(call):
        out = plain.attention(call)
        return out * torch.nan if call.q.shape[2] < 16 else out


class Raises(Right):
    @staticmethod
    def attention(call):
        raise RuntimeError("the compiler gave up")


class OutOfMemory(Right):
    @staticmethod
    def attention(call):
        raise torch.OutOfMemoryError("CUDA out of memory")


class OutOfMemoryWhenLarge(Right):
    @staticmethod
    def attention(call):
        if call.q.shape[2] == 98:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain.attention(call)


class OtherBits(Right):
    """Right within rounding, but with other bits each time."""

    runs = 0

    @classmethod
    def attention(cls, call):
        cls.runs += 1
        return plain.attention(call) + cls.runs * 1e-9


class Lies(Right):
    """Says that it takes every call, and raises for learned masks."""

    @staticmethod
    def attention(call):
        if call.mask is not None:
            raise NotImplementedError("no masks")
        return plain.attention(call)


class Dies(Right):
    @staticmethod
    def attention(call):
        print("an illegal memory access was encountered", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)


class Exits(Right):
    """Ends the process as if all were well, after it claimed to have passed."""

    @staticmethod
    def attention(call):
        print('{"error": "", "is_lasting": true, "worst": 0.1}', flush=True)
        os._exit(0)


class Hangs(Right):
    @staticmethod
    def attention(call):
        time.sleep(600)


class KeepsAll(Right):
    """Drops nothing where weights are to be dropped."""

    @staticmethod
    def attention(call):
        return plain.attention(replaced(call, dropout_p=0.0))


def replaced(call, **fields):
    return call._replace(**fields)
