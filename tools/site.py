"""What the documentation site makes when it is built.

The reference of the commands, the explorer, and formulas that a browser shows without a script.

MkDocs calls the functions whose names begin with `on_` (`hooks:` in mkdocs.yml).
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from irpe.cli.app import app, use_words
from irpe.viz.explorer import explorer_page

_CODE_OR_FORMULA = re.compile(
    r"(?P<code>```.*?```|`[^`]*`)|\$\$(?P<block>.+?)\$\$|\$(?P<inline>[^$\n]+)\$", re.DOTALL
)
_TITLE = "# Commands\n\nMade from `irpe COMMAND --help`.\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that follow from the code."""
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))
    files.append(File.generated(config, "explanation/explorer/page.html", content=explorer_page()))
    changes = Path("CHANGELOG.md").read_text().replace("(docs/", "(")
    files.append(File.generated(config, "changes.md", content=changes))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Takes the formulas out, so that Markdown does not read them."""
    formulas: list[str] = []

    def take(found: re.Match[str]) -> str:
        if found["code"]:
            return found["code"]
        formulas.append(_as_mathml(found["block"] or found["inline"], bool(found["block"])))
        return f"FORMULA-{len(formulas) - 1}-"

    text = _CODE_OR_FORMULA.sub(take, markdown)
    page.meta["formulas"] = formulas
    return text


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Puts the formulas back, as MathML."""
    return re.sub(r"FORMULA-(\d+)-", lambda found: page.meta["formulas"][int(found[1])], html)


def _as_mathml(latex: str, is_block: bool) -> str:
    number = re.search(r"\\tag\{([^}]*)\}", latex)
    plain = re.sub(r"\\tag\{[^}]*\}", "", latex).replace(r"\cr", r"\\")
    if number:
        plain += rf"\qquad \text{{({number[1]})}}"
    if not is_block:
        return convert(plain, display="inline")
    return f'<span class="formula">{convert(plain, display="block")}</span>'


def commands_page() -> str:
    """Returns every command with its options, as Markdown."""
    use_words()
    root: Any = typer.main.get_command(app)
    return "\n".join([_TITLE, *_describe_all("irpe", root.commands)])


def _describe_all(parent: str, commands: dict[str, Any]) -> Iterator[str]:
    for name, command in commands.items():
        full_name = f"{parent} {name}"
        yield f"## `{full_name}`\n\n{command.help}\n"
        yield _option_table(command.params)
        if command.epilog:
            yield command.epilog
        yield from _describe_all(full_name, getattr(command, "commands", {}))


def _option_table(parameters: Iterable[Any]) -> str:
    """Returns one table of a command's options, the panels of its help one after another."""
    panels: dict[str, list[str]] = {}
    for parameter in parameters:
        if parameter.name != "help":
            panel = getattr(parameter, "rich_help_panel", None) or "Options"
            panels.setdefault(panel, []).append(_option_row(parameter))
    lines = ["| | |", "| --- | --- |"]
    for panel, rows in panels.items():
        lines += [f"| **{panel}** | |", *rows]
    return "\n".join([*lines, ""]) if panels else ""


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
