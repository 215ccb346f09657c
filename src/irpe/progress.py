"""How long work says what has happened: one event, one function that is called with it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Event:
    """What has just happened in a piece of work.

    Args:
        work: The work: "training", "evaluation", or what a result belongs to ("epoch 3/5").
        done: The steps done so far; an event before the first step says what was done before.
        total: All steps.
        values: What was measured in this step, by name.
        result: A result to show on a line of its own; `None`: a step.
    """

    work: str
    done: int = 0
    total: int = 0
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    result: object = None


Listener = Callable[[Event], None]


def silent(event: Event) -> None:
    """Listens, and shows nothing."""


def tracked(listen: Listener, items: Iterable[T], total: int, work: str) -> Iterator[T]:
    """Yields the items of some work, with an event before the first and after each.

    Args:
        listen: Is called with the events.
        items: The items.
        total: How many there are.
        work: What is done with them.
    """
    listen(Event(work, 0, total))
    for done, item in enumerate(items, 1):
        yield item
        listen(Event(work, done, total))


class Progress(Protocol):
    """Is told how a piece of work goes, to show it."""

    def start(self, name: str, total: int, done: int = 0) -> None:
        """A piece of work begins."""
        ...

    def step(self, done: int, values: Mapping[str, float]) -> None:
        """A step is done."""
        ...

    def report(self, name: str, values: Mapping[str, float]) -> None:
        """A result is there."""
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
    """Yields the items of some work, and tells how many of them are done."""
    progress.start(name, total)
    for done, item in enumerate(work, 1):
        yield item
        progress.step(done, {})
