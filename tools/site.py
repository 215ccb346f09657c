"""What the documentation site makes when it is built.

The reference of the commands, the explorer, and formulas that a browser shows without a script.

MkDocs calls the functions whose names begin with `on_` (`hooks:` in mkdocs.yml).
"""

import io
import re
from contextlib import redirect_stdout, suppress
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from irpe.cli.main import COMMANDS, FIGURES, understand
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
    """Returns the help of every command, and of one recipe of each task, as Markdown."""
    words = [[name] for name in COMMANDS if name != "show"]
    words += [["train", name] for name in ("laptop", "detr_small", "seg_small")]
    words += [["show", name] for name in FIGURES]
    return "\n".join([_TITLE, *map(_help_of, sorted(words))])


def _help_of(words: list[str]) -> str:
    text = io.StringIO()
    with redirect_stdout(text), suppress(SystemExit):
        understand([*words, "--help"])
    name = " ".join(["irpe", *words])
    return f"## `{name}`\n\n```text\n{text.getvalue()}```\n"
