"""What a hostile case is: something that must end well, or in a clear error."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

CLEAR = (ValueError, TypeError, OSError)  # what the library raises on purpose


class Case(NamedTuple):
    """One hostile case.

    Args:
        name: Enough to make it again.
        check: Returns "equal", "refused", or what went wrong.
    """

    name: str
    check: Callable[[], str]


@dataclass
class Count:
    """What became of the cases of an area."""

    cases: int = 0
    refused: int = 0
    failures: tuple[str, ...] = ()

    def __add__(self, other):
        return Count(
            self.cases + other.cases, self.refused + other.refused, self.failures + other.failures
        )


def run(cases):
    """Returns what became of cases."""
    count = Count()
    for case in cases:
        try:
            with warnings.catch_warnings():  # torch's forward mode warns of its own code
                warnings.filterwarnings("ignore", message=".*torch.jit.script", module="torch")
                result = case.check()
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        count.cases += 1
        count.refused += result == "refused"
        if result not in ("equal", "refused"):
            count.failures += (f"{case.name}: {result}",)
    return count
