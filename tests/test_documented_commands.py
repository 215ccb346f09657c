"""Every command in the documentation exists, with the options that it is shown with."""

import re
import shlex
from pathlib import Path

import pytest

from irpe.cli.main import COMMANDS, FIGURES, understand
from irpe.cli.parse import UsageError
from irpe.errors import UserError
from irpe.recipes import RECIPES

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
STARTS = ("irpe ", "python -m irpe", "python -m benchmarks", "python -m tests", "python tools/",
          "python examples/", "torchrun ")  # fmt: skip


def commands_of(text):
    """The commands in blocks of code and in inline code."""
    lines = []
    for language, code in FENCE.findall(text):
        if language in ("", "sh"):
            lines += whole_lines(code.replace("\\\n", " "))
    lines += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [part for part in parts if part.startswith(STARTS)]


def whole_lines(code):
    """The lines of a block; a quotation may go over several."""
    lines = []
    for line in code.splitlines():
        if lines and lines[-1].partition(" #")[0].count("'") % 2:
            lines[-1] += line
        else:
            lines.append(line)
    return lines


DOCUMENTED = [(page, line) for page in PAGES for line in commands_of(page.read_text())]


STANDS_FOR = {
    "RECIPE": "laptop", "N": "1", "PIXELS,...": "64", "COMMAND": "", "NAME=VALUE": "flip=0",
    "...": "", "[options]": "",
}  # fmt: skip


def flags_of(words):
    return {word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)}


def check_irpe(words, folder):
    """Asserts that a command of `irpe` is understood: its options and their values."""
    words = [STANDS_FOR.get(word, word.partition("|")[0]) for word in words]
    words = [word for word in words if word]
    if words[-1:] == ["--model-args"]:
        words.append("{}")
    if "--config" in words:
        words[words.index("--config") + 1] = str(folder / "run.json")
    if words in ([], ["--version"], ["--help"]) or (
        words[0] == "show" and not {*words} & {*FIGURES}
    ):
        return
    if flags_of(words) - {"--help"} or len(words) > 1 + (words[0] == "show"):
        understand([word for word in words if word != "--help"])
    else:  # the name of a command in a sentence
        assert words[0] in COMMANDS


def check_script(path, words):
    """Asserts that a script of ours exists and knows the options."""
    assert path.exists(), path
    files = [path, *path.parent.glob("*.py")] if path.name == "__init__.py" else [path]
    files += (ROOT / "benchmarks").glob("timing.py")
    source = "".join(file.read_text() for file in files)
    unknown = {flag for flag in flags_of(words) if f'"{flag}"' not in source}
    assert not unknown, unknown


def path_of(module):
    base = ROOT / module.replace(".", "/")
    return base / "__main__.py" if base.is_dir() else base.with_suffix(".py")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_understood(page, tmp_path):
    (tmp_path / "run.json").write_text(RECIPES["laptop"]().to_json())
    for line in commands_of(page.read_text()):
        words = shlex.split(line, comments=True)
        if "irpe" in words:
            check_irpe(words[words.index("irpe") + 1 :], tmp_path)
        elif words[1] == "-m":
            check_script(path_of(words[2]), words[3:])
        else:
            check_script(ROOT / words[1], words[2:])


def test_commands_are_found_and_mistakes_noticed():
    assert len({line for _, line in DOCUMENTED}) > 100
    for wrong in (["trian", "x"], ["train", "laptop", "--encodng", "x"], ["train", "latpop"]):
        with pytest.raises((UsageError, UserError)):
            check_irpe(wrong, None)
    with pytest.raises(AssertionError):
        check_script(path_of("benchmarks.models"), ["--no-such-option"])
