"""docs/explanation/reliability.md, with the counts that commands write into it."""

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/explanation/reliability.md"


def read(name):
    """Returns the lines of the table between the marks of a name."""
    return _parts(name)[1].splitlines()


def replace(name, lines):
    """Replaces the table between the marks of a name."""
    before, _, after = _parts(name)
    PAGE.write_text(before + "\n".join(lines) + "\n" + after)


def _parts(name):
    """Returns what stands before, between and after two marks, the marks included."""
    before, begin, rest = PAGE.read_text().partition(f"<!-- {name} -->\n")
    table, end, after = rest.partition(f"<!-- end of {name} -->\n")
    assert begin, f"{PAGE} has no mark {name!r}"
    assert end, f"{PAGE} has no end of {name!r}"
    return before + begin, table, end + after
