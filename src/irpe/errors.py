"""Errors that the user can mend: a command prints them in one line and ends with exit code 1."""


class UserError(ValueError):
    """A value, file or installation that the user can mend; the message says how."""


class UserTypeError(UserError, TypeError):
    """A value of a type that is not taken."""


class MissingFileError(UserError, FileNotFoundError):
    """A file or directory that is not there."""


class MissingExtraError(UserError, ModuleNotFoundError):
    """A library that is not installed; the message names the extra that brings it."""
