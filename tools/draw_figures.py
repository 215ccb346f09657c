"""Draws the figures of README.md and the pages on figures again, with the commands there.

    irpe train laptop --encoding product-contextual-k --absolute none
    irpe train laptop -o runs/absolute
    irpe ablate --seeds 3
    python tools/draw_figures.py [WORD]

Every `irpe show ... -o docs/...` and every `chromium ...` is run as printed, from the root of the
repository, those that contain WORD if one is given.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOW_TO = ("draw-figures", "look-inside", "other-images")
PAGES = ("README.md", *(f"docs/how-to/{page}.md" for page in HOW_TO))
COMMAND = re.compile(r"`((?:irpe show|chromium) [^`]*-(?:o |-screenshot=)(?:docs/|page)[^`]*)`")


def main() -> None:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    text = "\n".join((ROOT / page).read_text() for page in PAGES)
    failed: list[str] = []
    for command in dict.fromkeys(" ".join(found.split()) for found in COMMAND.findall(text)):
        if word in command:
            print(f"$ {command}", flush=True)
            if subprocess.run(["bash", "-c", command], cwd=ROOT).returncode:
                failed.append(command)
    sys.exit("\n".join(["failed:", *failed]) if failed else 0)


main()
