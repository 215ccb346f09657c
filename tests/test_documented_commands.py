"""Every command in the documentation exists, with the options that it is shown with."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from irpe.cli.app import app
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
            lines += code.replace("\\\n", " ").splitlines()
    lines += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [part for part in parts if part.startswith(STARTS)]


COMMANDS = [(page, line) for page in PAGES for line in commands_of(page.read_text())]


def flags_of(words):
    return {word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)}


def check_irpe(words):
    """Asserts that a command of `irpe` has the options; a WORD stands for any of its commands."""
    commands = [typer.main.get_command(app)]
    while words and hasattr(commands[0], "commands"):
        known = commands[0].commands
        if words[0] in known:
            commands = [known[words[0]]]
        elif words[0].isupper() or words[0] == "...":
            commands = list(known.values())
        elif words[0].startswith("-"):
            break
        else:
            raise AssertionError(f"irpe has no command {words[0]}")
        words = words[1:]
    if commands[0].name == "train" and words and words[0].isidentifier():
        assert words[0] in RECIPES or words[0].isupper(), words[0]
    taken = {"--help", "-h"}
    for command in commands:
        for parameter in command.params:
            taken |= {*parameter.opts, *parameter.secondary_opts}
    assert flags_of(words) <= taken, flags_of(words) - taken


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
def test_commands_exist_with_their_options(page):
    for line in commands_of(page.read_text()):
        words = shlex.split(line, comments=True)
        if "irpe" in words:
            check_irpe(words[words.index("irpe") + 1 :])
        elif words[1] == "-m":
            check_script(path_of(words[2]), words[3:])
        else:
            check_script(ROOT / words[1], words[2:])


def test_commands_are_found_and_mistakes_noticed():
    assert len({line for _, line in COMMANDS}) > 100
    for wrong in (["trian"], ["train", "laptop", "--encodng", "x"], ["train", "latpop"]):
        with pytest.raises(AssertionError):
            check_irpe(wrong)
    with pytest.raises(AssertionError):
        check_script(path_of("benchmarks.models"), ["--no-such-option"])
