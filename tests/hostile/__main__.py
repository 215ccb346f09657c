"""`python -m tests.hostile [AREA ...]`: runs the campaign, or some areas of it.

The counts go to docs/explanation/reliability.md; those of areas that are not run stay.
"""

import argparse
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

import torch  # noqa: E402
from hostile import areas, page  # noqa: E402

HEAD = ["| area | cases | refused | failures |", "| --- | ---: | ---: | ---: |"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("areas", nargs="*", choices=[[], *areas.AREAS], default=[])
    given = parser.parse_args().areas
    torch.set_num_threads(1)
    before = {line.split(" | ")[0]: line for line in page.read("counts")}
    rows = {}
    for name, (what, *_) in areas.AREAS.items():
        rows[name] = _counts(before.get(f"| {what}", ""))
        if name in given or not given:
            with tempfile.TemporaryDirectory() as folder:
                count = areas.run_area(name, areas.WHOLE, Path(folder))
            rows[name] = [count.cases, count.refused, len(count.failures)]
            print(_line(what, rows[name]), *count.failures, sep="\n", flush=True)
    total = [sum(column) for column in zip(*rows.values(), strict=True)]
    lines = [_line(areas.AREAS[name][0], row) for name, row in rows.items()]
    page.replace("counts", [*HEAD, *lines, _line("all", total)])
    sys.exit(total[-1] > 0)


def _line(what, row):
    return f"| {what} | " + " | ".join(f"{n:,}" for n in row) + " |"


def _counts(line):
    """Returns the counts in a line of the page; zeros if there is none."""
    return [int(cell.replace(",", "")) for cell in line.strip(" |").split(" | ")[1:]] or [0, 0, 0]


if __name__ == "__main__":
    main()
