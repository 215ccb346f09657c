"""What the documentation site makes when it is built: the reference of the commands, the explorer.

MkDocs calls `on_files` (`hooks:` in mkdocs.yml).
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from irpe.cli.app import app, use_words
from irpe.viz.explorer import explorer_page

_TITLE = "# Commands\n\nMade from `irpe COMMAND --help`.\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that follow from the code."""
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))
    files.append(File.generated(config, "explorer/page.html", content=explorer_page()))
    changes = Path("CHANGELOG.md").read_text().replace("(docs/", "(")
    files.append(File.generated(config, "changes.md", content=changes))
    return files


def commands_page() -> str:
    """Returns every command with its options, as Markdown."""
    use_words()
    root: Any = typer.main.get_command(app)
    return "\n".join([_TITLE, *_describe_all("irpe", root.commands)])


def _describe_all(parent: str, commands: dict[str, Any]) -> Iterator[str]:
    for name, command in commands.items():
        full_name = f"{parent} {name}"
        yield f"## `{full_name}`\n\n{command.help}\n"
        yield from _option_tables(command.params)
        if command.epilog:
            yield command.epilog
        yield from _describe_all(full_name, getattr(command, "commands", {}))


def _option_tables(parameters: Iterable[Any]) -> Iterator[str]:
    panels: dict[str, list[str]] = {}
    for parameter in parameters:
        if parameter.name != "help":
            panel = getattr(parameter, "rich_help_panel", None) or "Options"
            panels.setdefault(panel, []).append(_option_row(parameter))
    for panel, rows in panels.items():
        yield "\n".join([f"| {panel} | |", "| --- | --- |", *rows, ""])


def _option_row(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    if parameter.param_type_name == "argument":
        names = [parameter.name.upper()]
    kind = parameter.display_type(None)
    shown = ", ".join(f"`{name} {kind}`" if kind else f"`{name}`" for name in names)
    text = (getattr(parameter, "help", None) or "").replace("|", "\\|")
    default = parameter.default
    if isinstance(default, int | float | str) and not isinstance(default, bool) and default != "":
        text += f" Default: {default}."
    return f"| {shown} | {text} |"
