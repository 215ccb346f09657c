"""Which tasks there are: a table of names, whose classes are imported when they are needed."""

import importlib
import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from irpe.errors import UserError, check_choice
from irpe.files import check_json
from irpe.train.config import RUN_FILE, TASKS, RunConfig

if TYPE_CHECKING:
    from irpe.train.task import Task
    from irpe.train.weights import Weights


def register_task(name: str, plug: str) -> None:
    """Makes a task known, also in the processes of an ablation, wherever these are.

    Args:
        name: Its name, which its configuration has as `task`.
        plug: Where its class is, as in "package.module:Class". `irpe.train.Task` says what it has.

    Examples:
        >>> import irpe.train
        >>> irpe.train.register_task("poses", "my_project.poses:PoseTask")
    """
    module, colon, owner = plug.partition(":")
    if not (module and colon and owner):
        raise UserError(f"task {name!r}: {plug!r} is not of the form package.module:Class")
    TASKS[name] = plug


def find_task(name: str) -> "type[Task]":
    """Returns the class of a task."""
    check_choice("task", name, TASKS)
    module, _, owner = TASKS[name].partition(":")
    return getattr(importlib.import_module(module), owner)


def make_task(config: RunConfig, weights: "Weights | None" = None) -> "Task":
    """Returns the task of a configuration.

    Args:
        config: The configuration.
        weights: Those that the model is built for, in place of the initial ones.
    """
    return find_task(config.task)(config, weights)


def parse_config(text: str, path: Path = Path(RUN_FILE)) -> RunConfig:
    """Returns the configuration that `RunConfig.to_json` wrote; what it does not name is default.

    Args:
        text: What it wrote.
        path: Where it was read.
    """
    try:
        written: dict[str, Any] = json.loads(text)
        content = {name: value for name, value in written.items() if name != "sha256"}
        name: Any = content.pop("task")
        is_known = name in TASKS
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not the configuration of a run: {error!r}") from error
    if not is_known:
        raise UserError(f"{path} is of the task {name!r}, not one of {', '.join(TASKS)}")
    config = find_task(name).Config
    unknown = sorted(set(content) - {field.name for field in fields(config)})
    if unknown:
        raise UserError(
            f"{path} is of another release (unknown settings: {', '.join(unknown)}): read it with "
            "that release, or train again"
        )
    try:
        parsed = config(**content)
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    except TypeError as error:
        raise UserError(f"{path} lacks a setting: {error}") from error
    check_json(written, path)
    return parsed
