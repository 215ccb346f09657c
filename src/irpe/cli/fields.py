"""Every field of a configuration as an option of a command."""

import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from reprlib import repr as shortened
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from irpe.cli.devices import RUN_PANEL
from irpe.errors import UserError
from irpe.train.config import SCHEDULE_PARTS, RunConfig
from irpe.train.configs import CONFIGS

_PLAIN = (str, int, float, bool)
_PANELS = {
    "Most used settings": "encoding absolute data epochs batch_size lr table_lr precision seed",
    "Data": "root holdout max_broken image_size channels crop train_split val_split limit "
    "ignore_label class_names short_side min_short_side long_side cached_versions crop_height "
    "crop_width sliding stride",
    "Model": "model head model_args initial builtin_bias drop_path backbone backbone_lr "
    "backbone_weights",
    "Optimisation": "device_batch_size absolute_lr min_lr low_lr_epochs poly_power warmup_lr "
    "warmup_epochs optimizer weight_decay clip_grad ema_decay label_smoothing",
    "Augmentation": "flip aug_repeats auto_augment color_jitter min_scale min_resize max_resize "
    "erasing mixup cutmix random_crop",
    RUN_PANEL: "compile workers eval_every save_every",
}
_OPTIONAL = {"initial", "root", "class_names", "head"}  # "none" unsets them


Command = Callable[..., None]
C = TypeVar("C", bound=RunConfig)


def with_fields(
    *configs: type[RunConfig], without: Collection[str] = ()
) -> Callable[[Command], Command]:
    """Adds an option for each field of some configurations to a command.

    The command gets those that were given in its last argument, `changes`.

    Args:
        configs: The configurations.
        without: Fields that get no option.
    """
    owners: dict[str, list[type[RunConfig]]] = {}
    for config in (RunConfig, *configs):
        for name in _own_fields(config).keys() - set(without):
            owners.setdefault(name, []).append(config)
    ordered = sorted(owners, key=lambda name: _place(name, owners[name]))
    options = {name: _option(name, owners[name]) for name in ordered}
    return functools.partial(_with_options, options)


def change_config(config: C, changes: Mapping[str, Any]) -> tuple[C, list[str]]:
    """Returns a recipe's configuration with what was given on the command line, and notes.

    Fewer epochs shrink the parts of the schedule that were not given, with a note for when the run
    begins; errors name options, not fields.
    """
    given = dict(changes)
    for name in given:
        tasks = [each.task for each in CONFIGS.values() if name in each.__dataclass_fields__]
        if config.task not in tasks:
            raise UserError(
                f"{_flag(name)} is for {' and '.join(tasks)}, and the recipe for {config.task}: "
                "leave it out"
            )
    try:
        changed = config
        if "epochs" in given and not {*SCHEDULE_PARTS} & {*given}:
            changed = config.with_fewer_epochs(given.pop("epochs"))
        changed = changed.replace(**given)
    except ValueError as error:
        raise UserError(name_options(str(error), config)) from error
    notes = [
        f"--epochs {changed.epochs} shortens {_flag(name)} to {getattr(changed, name)} (it was "
        f"{getattr(config, name)} of {config.epochs} epochs)"
        for name in SCHEDULE_PARTS
        if name not in changes and getattr(changed, name) != getattr(config, name)
    ]
    return changed, notes


def name_options(message: str, config: RunConfig) -> str:
    """Returns an error of a configuration with options in the place of fields."""
    names = sorted((each.name for each in dataclasses.fields(config)), key=len, reverse=True)
    whole_words = "|".join(name for name in names if "_" in name)
    short = "|".join(name for name in names if "_" not in name)  # words of English, too
    pattern = re.compile(rf"\b({whole_words}|(?:{short})(?= = | '))\b")
    return pattern.sub(lambda found: _flag(found[1]), message).replace(" = ", " ")


def _panel(name: str, owners: Sequence[type[RunConfig]]) -> str:
    """Returns the heading under which the help lists a field, with the tasks that it is for."""
    panel = next(panel for panel, names in _PANELS.items() if name in names.split())
    tasks = [config.task for config in owners if config is not RunConfig]
    return f"{panel}: {', '.join(tasks)}" if tasks else panel


def _place(name: str, owners: Sequence[type[RunConfig]]) -> tuple[int, int, int]:
    """Returns where the help lists a field: what more tasks have comes first in its panel."""
    names = [names.split() for names in _PANELS.values()]
    panel = next(index for index, of in enumerate(names) if name in of)
    count = len(CONFIGS) if RunConfig in owners else len(owners)
    return panel, -count, names[panel].index(name)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _own_fields(config: type[RunConfig]) -> "dict[str, dataclasses.Field[Any]]":
    """Returns the fields with a help text that not every task has, or those of `RunConfig`."""
    shared = set() if config is RunConfig else {each.name for each in dataclasses.fields(RunConfig)}
    return {
        each.name: each
        for each in dataclasses.fields(config)
        if each.metadata and each.name not in shared
    }


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

    by_name = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    later = [parameter for parameter in by_name if _has_panel(parameter)]
    first = [parameter for parameter in by_name if parameter not in later]
    parameters = [*first, *options.values(), *later]
    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    vars(run)["__signature__"] = inspect.Signature(parameters)
    return run


def _has_panel(parameter: inspect.Parameter) -> bool:
    """Returns whether an option of a command itself is listed under a heading, after settings."""
    settings: tuple[Any, ...] = getattr(parameter.annotation, "__metadata__", ())
    return any(getattr(each, "rich_help_panel", None) for each in settings)


def _option(name: str, owners: Sequence[type[RunConfig]]) -> inspect.Parameter:
    """Returns the option of a field that one or several configurations have."""
    hint = get_type_hints(owners[0])[name]
    kind = hint if hint in _PLAIN else str
    flag = _flag(name)
    flags = [f"{flag}/--no-{flag[2:]}"] if kind is bool else [flag]
    option = typer.Option(*flags, help=_help(name, owners), rich_help_panel=_panel(name, owners))
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def _help(name: str, owners: Sequence[type[RunConfig]]) -> str:
    """Returns the help text of a field; where tasks differ in it, that of each."""
    texts = {config: str(_own_fields(config)[name].metadata["help"]) for config in owners}
    if len(set(texts.values())) == 1:
        return texts[owners[0]]
    return " ".join(f"For {config.task}: {text}" for config, text in texts.items())


def _read_json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"model_args {shortened(text)} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(
            f"model_args {shortened(text)} must be a JSON object, as in '{{\"depth\": 6}}'"
        )
    return value
