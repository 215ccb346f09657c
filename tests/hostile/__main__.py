"""`python -m tests.hostile`: runs the campaign and writes its counts to docs/reliability.md."""

import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

import torch  # noqa: E402
from hostile import areas, page  # noqa: E402


def main():
    torch.set_num_threads(1)
    lines = ["| area | cases | refused | failures |", "| --- | ---: | ---: | ---: |"]
    total = [0, 0, 0]
    for name, (what, *_) in areas.AREAS.items():
        with tempfile.TemporaryDirectory() as folder:
            count = areas.run_area(name, areas.WHOLE, Path(folder))
        row = [count.cases, count.refused, len(count.failures)]
        total = [a + b for a, b in zip(total, row, strict=True)]
        lines.append(f"| {what} | " + " | ".join(f"{n:,}" for n in row) + " |")
        print(lines[-1], *count.failures, sep="\n", flush=True)
    lines.append("| all | " + " | ".join(f"{n:,}" for n in total) + " |")
    page.replace("counts", lines)
    sys.exit(total[-1] > 0)


if __name__ == "__main__":
    main()
