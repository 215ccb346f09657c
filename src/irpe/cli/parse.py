"""Command lines from typed functions and configurations: one parser for every command.

A parameter of a command is annotated with its type and its help text, and with a second text where
the word that stands for its value is not that of its type. Parameters before `*` are arguments,
those behind it options. The settings of a run that many people choose become options with the
values of its recipe; `--set name=value` reaches the others.
"""

import argparse
import dataclasses
import inspect
import json
import shutil
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from irpe.errors import UserError, check_choice, did_you_mean
from irpe.train.config import SCHEDULE_PARTS, SETTINGS, RunConfig

C = TypeVar("C", bound=RunConfig)
Command = Callable[..., None]
Configure = Callable[..., tuple[RunConfig | None, str]]

_SETTING, _SET = "setting:", "setting:others"  # what the results of options for settings begin with


class UsageError(Exception):
    """A command line that the command does not understand."""


class _Help(argparse.RawDescriptionHelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(text, width=width)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(f"{message.removeprefix('argument ')} ({self.prog} --help)")


def parse(
    command: Command,
    words: Sequence[str],
    name: str,
    configure: Configure | None = None,
    settings: Sequence[str] = SETTINGS,
) -> dict[str, Any]:
    """Returns the arguments of a command; prints its help and exits if that is asked for.

    Args:
        command: The function. Its docstring is the help; lines after "Examples:" stay as they are.
        words: What was written behind its name.
        name: Its name, as in "irpe train".
        configure: Returns, from what was given, the configuration whose settings are
            options too (`None`: there is none), and a text for the help in place of the docstring.
            The command gets it as `config`, and the settings that were given as `changes`.
        settings: Which settings are options.
    """
    if configure is None:
        return _parse(_make_parser(command, name), words)
    first = _make_parser(command, name, add_help=False)
    for setting in settings:
        _add(first, setting, str, "", default=argparse.SUPPRESS, dest=_SETTING + setting)
    first.add_argument("--set", action="append", dest=_SET, default=argparse.SUPPRESS)
    asking = {"-h", "--help"} & {*words}
    given, unknown = first.parse_known_intermixed_args([w for w in words if w not in asking])
    own = {key: value for key, value in vars(given).items() if not key.startswith(_SETTING)}
    try:
        config, text = configure(**own, **_given(vars(given)))
    except UserError:
        _refuse(first, unknown)  # "--epoch 3 laptop": 3 is not meant as a recipe
        raise
    parser = _make_parser(command, name, text, is_whole=not (config and text))
    if config is None:
        _refuse(first, unknown)
        if asking:
            parser.parse_args(["--help"])
        return {**own, "config": None, "changes": _given(vars(given))}
    _add_settings(parser, config, settings)
    known = _settings_of(config, settings)
    found = _parse(parser, words, known)
    changes = _given(found)
    by_option = {*changes}
    for text in changes.pop("others", []):
        setting, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set {text}: write NAME=VALUE, as in --set min_lr=1e-5")
        if setting in by_option:
            raise UserError(f"--set {text}: {setting} is given twice")
        check_choice("setting", setting, known)
        try:
            changes[setting] = _reader_of(get_type_hints(type(config))[setting])(value)
        except argparse.ArgumentTypeError as error:
            raise UserError(f"--set {setting}: {error}") from error
    own = {key: value for key, value in found.items() if not key.startswith(_SETTING)}
    return {**own, "config": config, "changes": changes}


def change_config(config: C, changes: Mapping[str, Any]) -> tuple[C, list[str]]:
    """Returns a configuration with what was given on the command line, and notes.

    Fewer epochs shrink the parts of the schedule that were not given, with a note.
    """
    given = dict(changes)
    changed = config
    if "epochs" in given and not {*SCHEDULE_PARTS} & {*given}:
        changed = config.with_fewer_epochs(given.pop("epochs"))
    changed = changed.replace(**given)
    notes = [
        f"{changed.epochs} epochs shorten {name} to {getattr(changed, name)} (it was "
        f"{getattr(config, name)} of {config.epochs} epochs)"
        for name in SCHEDULE_PARTS
        if name not in changes and getattr(changed, name) != getattr(config, name)
    ]
    return changed, notes


def wrap(text: str, first: str = "", other: str = "", width: int = 0) -> list[str]:
    """Returns a text as lines for a terminal, whose words (paths, options) stay whole.

    Args:
        text: The text.
        first: What the first line begins with.
        other: What the other lines begin with.
        width: The most columns; 0: those of the terminal, at most 80.
    """
    return textwrap.wrap(
        text,
        width or min(80, shutil.get_terminal_size().columns) - 1,
        initial_indent=first,
        subsequent_indent=other,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _given(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings among the values of options; those of --set are `others`."""
    return {k.removeprefix(_SETTING): found[k] for k in found if k.startswith(_SETTING)}


def _parse(
    parser: argparse.ArgumentParser, words: Sequence[str], settings: Collection[str] = ()
) -> dict[str, Any]:
    """Returns the values of arguments and options."""
    found, unknown = parser.parse_known_intermixed_args(words)
    _refuse(parser, unknown, settings)
    return vars(found)


def _refuse(
    parser: argparse.ArgumentParser, unknown: Sequence[str], settings: Collection[str] = ()
) -> None:
    """Raises an error if words were not understood; it names what may be meant."""
    for word in sorted(unknown, key=lambda word: not word.startswith("-")):
        if not word.startswith("-"):
            parser.error(f"unexpected argument {word!r}")
        flag = word.partition("=")[0]
        setting = flag.lstrip("-").replace("-", "_")
        if setting in settings:
            parser.error(f"{flag} is not an option: write --set {setting}=...")
        known = [flag for action in parser._actions for flag in action.option_strings]
        parser.error(f"{flag} is not an option{did_you_mean(flag, known, 0.75)}")


def _make_parser(
    command: Command, name: str, text: str = "", add_help: bool = True, is_whole: bool = True
) -> argparse.ArgumentParser:
    """Returns a parser for the parameters of a command.

    Args:
        command: The command.
        name: Its name.
        text: What the help says, in place of the docstring.
        add_help: Whether it has --help.
        is_whole: Whether its help has the arguments without a flag and the examples.
    """
    about, _, examples = (inspect.getdoc(command) or "").partition("Examples:\n")
    paragraphs = ("\n".join(wrap(each)) for each in about.strip().split("\n\n"))
    examples = f"examples:\n{textwrap.indent(textwrap.dedent(examples), '  ')}" if examples else ""
    parser = _Parser(
        prog=name,
        description=text or "\n\n".join(paragraphs),
        epilog=examples if is_whole else "",
        formatter_class=lambda prog: _Help(
            prog, max_help_position=26, width=min(80, shutil.get_terminal_size().columns) - 1
        ),
        add_help=add_help,
        allow_abbrev=False,
    )
    hints = get_type_hints(command, include_extras=True)
    arguments: list[str] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in ("config", "changes"):
            continue
        hint, text, *word = get_args(hints[parameter.name])
        if parameter.kind is parameter.KEYWORD_ONLY:
            _add(parser, parameter.name, hint, text, *word, default=parameter.default)
            continue
        is_required = parameter.default is parameter.empty
        kind, is_list = _kind_of(hint)
        count = ("+" if is_required else "*") if is_list else (None if is_required else "?")
        parser.add_argument(
            parameter.name, nargs=count, type=_READERS[kind][1], metavar=word[0],
            default=None if is_required else parameter.default,
            help=text if is_whole else argparse.SUPPRESS,
        )  # fmt: skip
        shown = word[0] + "..." * is_list
        arguments.append(shown if is_required else f"[{shown}]")
    parser.usage = " ".join([name, *arguments, "[options]"])
    return parser


def _add(
    parser: Any, name: str, hint: Any, text: str, word: str = "", default: Any = None, **more: Any
) -> None:
    """Adds an option; its help ends with its default in brackets.

    The flags of `as_json` and `config_file` are --json and --config.
    """
    flag = "--" + name.removeprefix("as_").removesuffix("_file").replace("_", "-")
    flags = ["-o", flag] if name == "output" else [flag]
    kind, is_list = _kind_of(hint)
    has_default = isinstance(default, str | int | float | Path) and default is not False
    if has_default and default != argparse.SUPPRESS:
        text = _with_default(text, str(default))
    more = {"dest": name, "default": default, **more, "help": text.replace("%", "%%")}
    if kind is bool:
        more["action"] = "store_true" if default is False else argparse.BooleanOptionalAction
    else:
        more |= {"type": _reader_of(hint), "metavar": word or _READERS[kind][0]}
        more["action"] = "append" if is_list else "store"
    parser.add_argument(*flags, **more)


def _add_settings(
    parser: argparse.ArgumentParser, config: RunConfig, settings: Sequence[str]
) -> None:
    """Adds an option for each of these settings that a configuration has."""
    group = parser.add_argument_group("settings [value in the recipe]")
    known, hints = _settings_of(config, settings), get_type_hints(type(config))
    for name in (name for name in settings if name in known):
        value: Any = getattr(config, name)
        shown = "none" if value is None else str(value)
        shown = json.dumps(value) if isinstance(value, Mapping) else shown
        text = _with_default(known[name].metadata["help"], shown)
        _add(group, name, hints[name], text, default=argparse.SUPPRESS, dest=_SETTING + name)
    others = ", ".join(name for name in known if name not in settings)
    text = f"Another setting; repeat it. irpe train RECIPE --show prints the values: {others}."
    group.add_argument(
        "--set", action="append", metavar="NAME=VALUE", help=text, dest=_SET,
        default=argparse.SUPPRESS,
    )  # fmt: skip


def _settings_of(config: RunConfig, offered: Sequence[str]) -> dict[str, "dataclasses.Field[Any]"]:
    """Returns the settings of a configuration, without those that a command decides itself."""
    own = {*SETTINGS} - {*offered}
    fields = dataclasses.fields(config)
    return {each.name: each for each in fields if each.metadata and each.name not in own}


def _with_default(text: str, default: str) -> str:
    return f"{text.removesuffix('.')} [{default}]."


def _kind_of(hint: Any) -> tuple[Any, bool]:
    """Returns the type of one value of a parameter, and whether it takes several."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    if get_origin(hint) is list:
        return kinds[0], True
    if get_origin(hint) is Mapping or hint in _READERS:
        return get_origin(hint) or hint, False
    return _kind_of(kinds[0])


def _reader_of(hint: Any) -> Callable[[str], Any]:
    """Returns what reads a value; "none" where there may be none, which is no value of a list."""
    kind, is_list = _kind_of(hint)
    read = _READERS[kind][1]
    if is_list or type(None) not in get_args(hint):
        return read
    return lambda text: None if text == "none" else read(text)


def _reader(read: Callable[[str], Any], what: str) -> Callable[[str], Any]:
    def reads(text: str) -> Any:
        try:
            return read(text)
        except (ValueError, KeyError, RecursionError) as error:
            raise argparse.ArgumentTypeError(f"{shortened(text)} is not {what}") from error

    return reads


def _read_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


_READERS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    str: ("TEXT", str),
    Path: ("PATH", Path),
    int: ("N", _reader(int, "a whole number")),
    float: ("NUMBER", _reader(float, "a number")),
    bool: ("BOOL", _reader({"true": True, "false": False}.__getitem__, "true or false")),
    Mapping: ("JSON", _reader(_read_object, 'a JSON object, as in {"depth": 6}')),
}  # the word that stands for a value, and what reads it
