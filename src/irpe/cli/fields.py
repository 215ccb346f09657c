"""Every field of a configuration as an option of a command."""

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Collection
from reprlib import repr as shortened
from typing import Annotated, Any, get_type_hints

import typer

from irpe.train.config import RunConfig

_PLAIN = (str, int, float, bool)
_OPTIONAL = {"initial", "root"}  # "none" unsets them


Command = Callable[..., None]


def with_fields(
    *configs: type[RunConfig], without: Collection[str] = ()
) -> Callable[[Command], Command]:
    """Adds an option for each field of some configurations to a command.

    The command gets those that were given in its last argument, `changes`.

    Args:
        configs: The configurations.
        without: Fields that get no option.
    """
    options = {
        field.name: _option(kind, field)
        for config in configs
        for kind in (RunConfig, config)
        for field in dataclasses.fields(kind)
        if field.metadata and field.name not in {*without, *_shared(kind)}
    }
    return functools.partial(_with_options, options)


def _shared(kind: type[RunConfig]) -> set[str]:
    shared = {field.name for field in dataclasses.fields(RunConfig)}
    return set() if kind is RunConfig else shared


def _with_options(options: dict[str, inspect.Parameter], command: Command) -> Command:
    own = list(inspect.signature(command).parameters.values())[:-1]

    def run(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in options}
        changes = {name: value for name, value in given.items() if value is not None}
        for name in _OPTIONAL & set(changes):
            changes[name] = None if changes[name] == "none" else changes[name]
        if "model_args" in changes:
            changes["model_args"] = _read_json(changes["model_args"])
        command(**arguments, changes=changes)

    parameters = [*own, *options.values()]
    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    vars(run)["__signature__"] = inspect.Signature(parameters)
    return run


def _option(config: type[RunConfig], field: "dataclasses.Field[Any]") -> inspect.Parameter:
    hint = get_type_hints(config)[field.name]
    kind = hint if hint in _PLAIN else str
    name = "--" + field.name.replace("_", "-")
    flags = [f"{name}/--no-{name[2:]}"] if kind is bool else [name]
    panel = "Settings of every recipe" if config is RunConfig else f"Settings of {config.task}"
    option = typer.Option(*flags, help=field.metadata["help"], rich_help_panel=panel)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def _read_json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"model_args {shortened(text)} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(
            f"model_args {shortened(text)} must be a JSON object, as in '{{\"depth\": 6}}'"
        )
    return value
