"""Every field of a configuration as an option of a command."""

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from irpe.train.config import TrainConfig

_PLAIN = (str, int, float, bool)
_OPTIONAL = {"initial", "root"}  # "none" takes them away


Command = Callable[..., None]


def with_fields(*without: str) -> Callable[[Command], Command]:
    """Adds an option for each field of `TrainConfig` to a command, but for some.

    The command gets those that were given in its last argument, `changes`.
    """
    fields = [field for field in dataclasses.fields(TrainConfig) if field.name not in without]
    return functools.partial(_with_options, fields)


def _with_options(fields: list["dataclasses.Field[Any]"], command: Command) -> Command:
    own = list(inspect.signature(command).parameters.values())[:-1]
    names = [field.name for field in fields]
    options = [_option(field) for field in fields]

    def run(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in names}
        changes = {name: value for name, value in given.items() if value is not None}
        for name in _OPTIONAL & set(changes):
            changes[name] = None if changes[name] == "none" else changes[name]
        if "model_args" in changes:
            changes["model_args"] = _read_json(changes["model_args"])
        command(**arguments, changes=changes)

    parameters = [*own, *options]
    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    vars(run)["__signature__"] = inspect.Signature(parameters)
    return run


def _option(field: "dataclasses.Field[Any]") -> inspect.Parameter:
    hint = get_type_hints(TrainConfig)[field.name]
    kind = hint if hint in _PLAIN else str
    name = "--" + field.name.replace("_", "-")
    flags = [f"{name}/--no-{name[2:]}"] if kind is bool else [name]
    option = typer.Option(
        *flags, help=field.metadata["help"], rich_help_panel="Fields of the recipe"
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def _read_json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"model_args {text!r} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"model_args {text!r} must be a JSON object, as in '{{\"depth\": 6}}'")
    return value
