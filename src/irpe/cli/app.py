"""The commands, in the order in which `irpe --help` lists them."""

from typing import Any

import typer
import typer.core

import irpe
from irpe.cli import ablate, convert, encodings, evaluate, models, profile, show, train

_WORDS = {"Path": "PATH", "str": "TEXT", "int": "N", "float": "NUMBER"}

app = typer.Typer(
    name="irpe",
    help="Image relative position encodings for vision transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
)

app.command("ablate", epilog=ablate.EPILOG)(ablate.compare)
app.command(epilog=train.EPILOG)(train.train)
app.command("eval", epilog=evaluate.EPILOG, no_args_is_help=True)(evaluate.evaluate)
app.command()(encodings.encodings)
app.command(epilog=models.EPILOG)(models.models)
app.command()(profile.profile)
app.add_typer(show.app, name="show")
app.command("convert", epilog=convert.EXAMPLES, no_args_is_help=True)(convert.convert)


def use_words() -> None:
    """Lets the help name kinds of values in words: typer's newer releases print Python's types."""
    for each in (typer.core.TyperOption, typer.core.TyperArgument):
        if hasattr(each, "display_type"):
            setattr(each, "display_type", _word_of)  # noqa: B010


def _word_of(parameter: Any, context: object) -> str:
    if getattr(parameter, "is_flag", False) or parameter.param_type_name == "argument":
        return ""
    descriptor = parameter.type_descriptor
    if descriptor.is_choice:
        return "|".join(str(getattr(c, "value", c)) for c in descriptor.choices)
    return next((w for kind, w in _WORDS.items() if kind in str(descriptor.annotation)), "TEXT")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"irpe {irpe.__version__}")
        raise typer.Exit


@app.callback()
def _options(  # pyright: ignore[reportUnusedFunction]
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
) -> None:
    """Image relative position encodings for vision transformers."""
    # irpe.cli.main takes --debug, before or after the command; here it is for the help.
