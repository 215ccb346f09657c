"""Tensors that depend on a few plain values alone: built once, shared, never written to."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


def built_once(maxsize: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator that caches the `maxsize` last results of a function that makes tensors.

    They outlive the call, so they must be plain tensors whatever goes on around it: modes
    (inference, tracing, default device) belong to a thread, and a new thread has none.
    """

    def decorate(build: Callable[P, R]) -> Callable[P, R]:
        @functools.lru_cache(maxsize)
        @functools.wraps(build)
        def build_in_fresh_thread(*args: Any, **kwargs: Any) -> R:
            with ThreadPoolExecutor(max_workers=1) as fresh_thread:
                return fresh_thread.submit(build, *args, **kwargs).result()

        return cast(Callable[P, R], build_in_fresh_thread)

    return decorate


def traced_as_constant(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a compiled graph hold what the function returns instead of what it does.

    This is torch.compiler.assume_constant_result without loading the compiler on import.
    """
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010
    return function
