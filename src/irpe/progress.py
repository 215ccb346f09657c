"""How long work says what has happened: one event, one function that is called with it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

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
