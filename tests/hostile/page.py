"""docs/reliability.md, with the counts that commands write into it."""

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def replace(name, lines):
    """Replaces the table between the marks of a name."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = PAGE.read_text().partition(begin)
    after = rest.partition(end)[2]
    PAGE.write_text(before + begin + "\n".join(lines) + "\n" + end + after)
