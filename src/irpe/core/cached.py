"""Tensors that depend on a few plain values alone: built once, shared, never written to."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

P = ParamSpec("P")
R = TypeVar("R")


def cached_constant(maxsize: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator that caches the `maxsize` last results of a function that makes tensors.

    They outlive the call, so they must be plain tensors whatever goes on around it: modes
    (inference, tracing, default device) belong to a thread, and a new thread has none. A compiled
    graph holds the tensors, their sizes fixed; for that the arguments must be plain values.
    """

    def decorate(build: Callable[P, R]) -> Callable[P, R]:
        @functools.lru_cache(maxsize)
        @functools.wraps(build)
        def build_in_fresh_thread(*args: Any, **kwargs: Any) -> R:
            with ThreadPoolExecutor(max_workers=1) as fresh_thread:
                found = fresh_thread.submit(build, *args, **kwargs).result()
            _change_tensors(found, _fix_sizes)
            return found

        @functools.wraps(build)
        def build_or_find(*args: Any, **kwargs: Any) -> R:
            found = build_in_fresh_thread(*args, **kwargs)
            if torch._C._len_torch_dispatch_stack() and (mode := _fake_mode()) is not None:
                return _change_tensors(found, mode.from_tensor)
            return found

        build_or_find.cache_clear = build_in_fresh_thread.cache_clear  # pyright: ignore
        return traced_as_constant(cast(Callable[P, R], build_or_find))

    return decorate


def is_fake(tensor: Tensor) -> bool:
    """Tells whether a tensor has a shape and no values."""
    return isinstance(tensor, FakeTensor)


def _fake_mode() -> Any:
    """Returns the mode that refuses real tensors, if one is in force on this thread."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return None if mode is None or mode.allow_non_fake_inputs else mode


def _change_tensors(found: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns what was found with each of its tensors changed."""
    if isinstance(found, tuple):
        parts = [_change_tensors(part, change) for part in cast(tuple[Any, ...], found)]
        return type(found)(*parts) if hasattr(found, "_fields") else tuple(parts)
    if hasattr(found, "with_tensors"):
        return found.with_tensors(change)
    return change(found)


def _fix_sizes(tensor: Tensor) -> Tensor:
    """As torch._dynamo.mark_static, without loading the compiler on import.

    Where a program keeps all sizes open (dynamic=True), those of a constant would be guarded by a
    name that nothing defines.
    """
    tensor._dynamo_static_indices = set(range(tensor.ndim))  # pyright: ignore
    return tensor


def traced_as_constant(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a compiled graph hold what the function returns instead of what it does.

    This is torch.compiler.assume_constant_result without loading the compiler on import.
    """
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010
    return function
