"""Values out of a fixed set: the error for any other names the set and the nearest member."""

import difflib
from collections.abc import Iterable

from irpe.errors import UserError


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raises an error unless `value` is one of `choices`.

    Args:
        name: What the value is, as the error names it.
        value: The value.
        choices: What it may be.
    """
    choices = tuple(choices)
    if value not in choices:
        known = ", ".join(map(str, choices))
        raise UserError(f"{name} {value!r} is not one of {known}{did_you_mean(value, choices)}")


def did_you_mean(value: object, choices: Iterable[object], cutoff: float = 0.6) -> str:
    """Returns the end of an error that names the nearest choice, or nothing if none is near.

    Args:
        value: What was given.
        choices: What could have been meant.
        cutoff: How near a choice must be, from 0 to 1.
    """
    near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], 1, cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""
