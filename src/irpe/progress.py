"""How long work tells what it has done; the command line decides how to show it."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, TypeVar

T = TypeVar("T")


class Progress(Protocol):
    """Is told how a piece of work goes, to show it."""

    def start(self, name: str, total: int, done: int = 0) -> None:
        """A piece of work begins.

        Args:
            name: What is done.
            total: Its number of steps.
            done: The steps that were done before.
        """
        ...

    def step(self, done: int, values: Mapping[str, float]) -> None:
        """A step is done.

        Args:
            done: The steps done so far.
            values: What was measured in it, by name.
        """
        ...

    def report(self, name: str, values: Mapping[str, float]) -> None:
        """A result is there.

        Args:
            name: What it belongs to, for example an epoch.
            values: The result, by name.
        """
        ...


class NoProgress:
    """Shows nothing."""

    def start(self, name: str, total: int, done: int = 0) -> None:
        """Shows nothing."""

    def step(self, done: int, values: Mapping[str, float]) -> None:
        """Shows nothing."""

    def report(self, name: str, values: Mapping[str, float]) -> None:
        """Shows nothing."""


NO_PROGRESS = NoProgress()


def track(progress: Progress, work: Iterable[T], total: int, name: str) -> Iterator[T]:
    """Yields the items of some work, and tells how many of them are done.

    Args:
        progress: Is told.
        work: The items.
        total: How many there are.
        name: What is done.
    """
    progress.start(name, total)
    for done, item in enumerate(work, 1):
        yield item
        progress.step(done, {})
