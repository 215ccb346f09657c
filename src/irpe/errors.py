"""Errors that the user can mend: a command prints them in one line and ends with exit code 1."""

import difflib
from collections.abc import Iterable
from decimal import Decimal


class UserError(ValueError):
    """A value, file or installation that the user can mend; the message says how.

    Every refusal of irpe is one. It is a `ValueError`, and a `TypeError`, `FileNotFoundError` or
    `ImportError` as well where it speaks of a type, a missing file or a missing package.

    Examples:
        >>> import irpe
        >>> try:
        ...     irpe.Piecewise.from_ratio(-1)
        ... except irpe.UserError as error:
        ...     print(type(error).__name__)
        UserError
    """


class UserTypeError(UserError, TypeError):
    """A value of a type that is not taken."""


class MissingFileError(UserError, FileNotFoundError):
    """A file or directory that is not there."""


class MissingExtraError(UserError, ModuleNotFoundError):
    """A library that is not installed; the message names the extra that brings it."""


class UserFileError(UserError, OSError):
    """A file, folder or device that cannot be used for what it is named for."""


class FolderError(UserError, IsADirectoryError):
    """A folder where a file is meant."""


class TakenPathError(UserError, FileExistsError):
    """A path where something else is, which is not replaced."""


class NotFiniteError(UserError, FloatingPointError):
    """A loss or weights that are not finite any more."""


class UserStateError(UserError, RuntimeError):
    """Something that was done before does not allow this: a run that diverged, for example."""


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

    The nearest is the shortest that goes on from what was given, if one does.

    Args:
        value: What was given.
        choices: What could have been meant.
        cutoff: How near a choice must be, from 0 to 1.
    """
    names, text = [str(choice) for choice in choices], str(value)
    longer = sorted((name for name in names if text and name.startswith(text)), key=len)
    near = longer or difflib.get_close_matches(text, names, 1, cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


_MOST_ELEMENTS = 2**35  # of one tensor: 128 GiB in float32


def check_is_holdable(what: str, of: object, elements: int, remedy: str) -> None:
    """Raises an error for a tensor that no machine holds.

    Args:
        what: What would have these elements, in the plural.
        of: What it belongs to, which is written out in the error alone.
        elements: How many they are.
        remedy: What to do instead.
    """
    if elements > _MOST_ELEMENTS:
        raise UserError(
            f"{what} {of} would have {Decimal(elements):.3g} elements, more than any machine "
            f"holds: {remedy}"
        )
