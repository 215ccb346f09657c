"""The commands, in the order in which `irpe --help` lists them."""

import typer

import irpe
from irpe.cli import ablate, convert, encodings, evaluate, models, profile, show, train

app = typer.Typer(
    name="irpe",
    help="Image relative position encodings for vision transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
)

app.command(epilog=ablate.EPILOG)(ablate.ablate)
app.command(epilog=train.EPILOG)(train.train)
app.command("eval", epilog=evaluate.EPILOG, no_args_is_help=True)(evaluate.evaluate)
app.command()(encodings.encodings)
app.command(epilog=models.EPILOG)(models.models)
app.command()(profile.profile)
app.add_typer(show.app, name="show")
app.command("convert", epilog=convert.EXAMPLES, no_args_is_help=True)(convert.convert)


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
